"""Runs in the python guest: a counter in memory, an open file, and a database in the middle of a transaction.

    python3 python_guest.py FOLDER

What it is at is in FOLDER/state. When FOLDER/go appears, with the name of a machine in it, it goes on with the
transaction in that name, commits, and writes what the database says of itself into FOLDER/done.
"""

import json
import os
import sqlite3
import sys
import time
from typing import Any

BEFORE, AFTER = 150, 50


def publish(path: str, value: dict[str, Any]) -> None:
    """In one step: a reader sees the whole of it, or nothing."""
    with open(f"{path}.new", "w") as file:
        json.dump(value, file)
    os.rename(f"{path}.new", path)


def insert(database: sqlite3.Connection, first: int, count: int, who: str) -> None:
    """Rows of one machine."""
    for key in range(first, first + count):
        database.execute("INSERT INTO rows VALUES (?, ?, ?)", (key, who, os.urandom(1500)))


def main(folder: str) -> None:
    database = sqlite3.connect(f"{folder}/base", isolation_level=None)
    # With so small a cache pages of the open transaction are in the file, and what they replaced in the journal.
    database.execute("PRAGMA cache_size = 5")
    database.execute("CREATE TABLE rows (key INTEGER PRIMARY KEY, who TEXT, filling BLOB)")
    database.execute("BEGIN")
    insert(database, 0, BEFORE, "before")
    secret, count = os.urandom(16).hex(), 0
    with open(f"{folder}/log", "w") as log:
        while True:
            count += 1
            log.write(f"{count}\n")
            log.flush()
            publish(f"{folder}/state", {"count": count, "pid": os.getpid(), "secret": secret})
            if database.in_transaction and os.path.exists(f"{folder}/go"):
                with open(f"{folder}/go") as file:
                    name = file.read()
                insert(database, BEFORE, AFTER, name)
                database.execute("COMMIT")
                owners = dict(database.execute("SELECT who, count(*) FROM rows GROUP BY who"))
                check = [row[0] for row in database.execute("PRAGMA integrity_check")]
                publish(f"{folder}/done", {"owners": owners, "check": check})
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
