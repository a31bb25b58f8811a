"""What lasts: sandboxes, their states and snapshots, in one SQLite file. Every transition is a compare-and-set."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.sandbox.errors import Conflict, Exhausted, NotFound, SandboxError
from perilune.sandbox.snapshot import Snapshot, from_json, to_json
from perilune.sandbox.states import State, after_crash, may_move

SCHEMA = """
CREATE TABLE IF NOT EXISTS boxes (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, version INTEGER NOT NULL, template TEXT NOT NULL, owner TEXT NOT NULL,
    spec TEXT NOT NULL, metadata TEXT NOT NULL, snapshot TEXT, expires REAL, created REAL NOT NULL,
    changed REAL NOT NULL, reason TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS snapshots (
    id TEXT PRIMARY KEY, box TEXT NOT NULL, template TEXT NOT NULL, label TEXT, barrier TEXT,
    created REAL NOT NULL, manifest TEXT NOT NULL, hidden INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS layers (id TEXT PRIMARY KEY, kind TEXT NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS uses (
    snapshot TEXT NOT NULL REFERENCES snapshots(id) ON DELETE CASCADE, layer TEXT NOT NULL REFERENCES layers(id),
    PRIMARY KEY (snapshot, layer)
);
CREATE INDEX IF NOT EXISTS uses_layer ON uses(layer);
CREATE INDEX IF NOT EXISTS snapshots_box ON snapshots(box);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
TOLD_S = 24 * 3600.0  # for so long a sandbox whose life had no end says why it has ended
# What hundreds of moves write before the log is checkpointed.
_RESERVE_PAGES = 512
_CHANGEABLE = ("snapshot", "expires", "reason", "metadata", "owner", "spec")


@dataclass(frozen=True)
class Record:
    """One sandbox as it is stored. expires: seconds since 1970, None for never. reason: why it is in its state."""

    id: str
    state: State
    version: int
    template: str
    owner: str
    spec: Mapping[str, Any]
    metadata: Mapping[str, str]
    snapshot: str | None
    expires: float | None
    created: float
    changed: float
    reason: str


@dataclass(frozen=True)
class LayerRow:
    """One content-addressed file: its id, "memory", "disk" or "state", and its size."""

    id: str
    kind: str
    bytes: int


class Store:
    """One process at a time: the file is locked while it is open."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=0.2, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._db.executescript(SCHEMA)
            self._reserve()
        except sqlite3.DatabaseError as error:
            self._db.close()
            said = "another service uses it" if error.sqlite_errorcode == sqlite3.SQLITE_BUSY else "it cannot be opened"
            raise SandboxError(f"{path}: {error}; {said}") from error

    def _reserve(self) -> None:
        """Room in the file and in its log that is written over: states can be moved when the disk is full."""
        self._db.execute(f"PRAGMA wal_autocheckpoint={_RESERVE_PAGES // 2}")
        (page,) = self._db.execute("PRAGMA page_size").fetchone()
        with contextlib.suppress(sqlite3.OperationalError):  # on a disk that is full already
            self._db.executescript(
                f"CREATE TABLE reserve AS SELECT zeroblob({_RESERVE_PAGES * page}) AS room; DROP TABLE reserve;"
                "PRAGMA wal_checkpoint(RESTART);"
            )

    def close(self) -> None:
        """Give the file back."""
        self._db.close()

    @contextmanager
    def _transaction(self, durable: bool = False) -> Iterator[None]:
        # A state lost to a power cut is one of a machine that went with it; a snapshot is not.
        self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise Exhausted("the service's disk is full: nothing has changed") from error
            raise

    # Sandboxes

    def insert(
        self,
        box: str,
        template: str,
        spec: Mapping[str, Any],
        metadata: Mapping[str, str],
        owner: str = "",
        expires: float | None = None,
        snapshot: str | None = None,
    ) -> Record:
        """A new sandbox, in state CREATING."""
        now = time.time()
        with self._transaction():
            self._db.execute(
                "INSERT INTO boxes VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, '')",
                (
                    *(box, State.CREATING, template, owner, json.dumps(dict(spec)), json.dumps(dict(metadata))),
                    *(snapshot, expires, now, now),
                ),
            )
        return self.get(box)

    def get(self, box: str) -> Record:
        """One sandbox, or `NotFound`."""
        row = self._db.execute("SELECT * FROM boxes WHERE id=?", (box,)).fetchone()
        if row is None:
            raise NotFound(f"no sandbox {box!r}")
        return _record(row)

    def boxes(self, states: Iterable[State] | None = None) -> list[Record]:
        """All sandboxes, the newest first."""
        rows = self._db.execute("SELECT * FROM boxes ORDER BY created DESC, id").fetchall()
        wanted = None if states is None else set(states)
        return [record for record in map(_record, rows) if wanted is None or record.state in wanted]

    def count(self) -> int:
        """How many sandboxes there are that have not ended."""
        return int(self._db.execute("SELECT count(*) FROM boxes WHERE state!=?", (State.ENDED,)).fetchone()[0])

    def move(self, record: Record, after: State, **changes: Any) -> Record:
        """Compare and set: from `record` to the state `after`; `Conflict` if it has changed meanwhile."""
        with self._transaction():
            return self._move(record, after, changes)

    def _move(self, record: Record, after: State, changes: Mapping[str, Any]) -> Record:
        if not may_move(record.state, after) and record.state is not after:
            raise SandboxError(f"box {record.id!r}: no way from {record.state.value} to {after.value}")
        unknown = set(changes) - set(_CHANGEABLE)
        if unknown:
            raise SandboxError(f"{sorted(unknown)} cannot be changed; allowed: {', '.join(_CHANGEABLE)}")
        values = {name: json.dumps(value) if name in ("metadata", "spec") else value for name, value in changes.items()}
        sets = "".join(f", {name}=:{name}" for name in values)
        done = self._db.execute(
            f"UPDATE boxes SET state=:after, version=version+1, changed=:now{sets}"
            " WHERE id=:id AND state=:before AND version=:version",
            {
                **values,
                "after": after,
                "now": time.time(),
                "id": record.id,
                "before": record.state,
                "version": record.version,
            },
        )
        if done.rowcount != 1:
            now = self.get(record.id)
            raise Conflict(f"box {record.id!r} is {now.state.value} now; it was {record.state.value}")
        return self.get(record.id)

    def expired(self, now: float) -> list[Record]:
        """Sandboxes whose time is up; whoever acts on one checks again with `move`, which fails if it was renewed.

        Of one without an end that has ended the time is up after `TOLD_S`.
        """
        rows = self._db.execute(
            "SELECT * FROM boxes WHERE expires<=? OR (expires IS NULL AND state=? AND changed<=?)",
            (now, State.ENDED, now - TOLD_S),
        ).fetchall()
        return [_record(row) for row in rows]

    def shift(self, seconds: float) -> None:
        """The clock of this host was set: every life ends as much later as it says now."""
        with self._transaction():
            self._db.execute(
                "UPDATE boxes SET expires=expires+?, version=version+1 WHERE expires IS NOT NULL", (seconds,)
            )

    def delete(self, box: str) -> None:
        """Forget an ended sandbox."""
        with self._transaction():
            self._db.execute("DELETE FROM boxes WHERE id=? AND state=?", (box, State.ENDED))

    def reconcile(self) -> list[Record]:
        """After a start: every sandbox into a state that is true without a service; returns those that changed."""
        changed = []
        for record in self.boxes():
            after, reason = after_crash(record.state, record.snapshot is not None)
            if after is not record.state:
                with self._transaction(durable=True):
                    self._db.execute(
                        "UPDATE boxes SET state=?, version=version+1, changed=?, reason=? WHERE id=?",
                        (after, time.time(), reason, record.id),
                    )
                changed.append(self.get(record.id))
        return changed

    # Snapshots

    def commit(
        self, snapshot: Snapshot, layers: Iterable[LayerRow], record: Record, after: State, keep: bool = True
    ) -> Record:
        """One durable transaction: the snapshot exists, its layers are used, and the sandbox has moved to `after`.

        keep: False for one that lasts only as long as its sandbox stands on it, and is not listed.
        """
        with self._transaction(durable=True):
            for layer in layers:
                self._db.execute("INSERT OR IGNORE INTO layers VALUES (?, ?, ?)", (layer.id, layer.kind, layer.bytes))
            self._db.execute(
                "INSERT OR IGNORE INTO snapshots VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(snapshot.id, snapshot.box, snapshot.template, snapshot.label, snapshot.barrier),
                    *(snapshot.created, to_json(snapshot), not keep),
                ),
            )
            self._db.executemany(
                "INSERT OR IGNORE INTO uses VALUES (?, ?)", [(snapshot.id, layer) for layer in set(snapshot.layers())]
            )
            return self._move(record, after, {"snapshot": snapshot.id})

    def snapshot(self, name: str) -> Snapshot:
        """A snapshot by its id, or by its label (the newest one that has it)."""
        row = self._db.execute(
            "SELECT manifest FROM snapshots WHERE id=? OR (label=? AND hidden=0) ORDER BY id=? DESC, created DESC",
            (name, name, name),
        ).fetchone()
        if row is None:
            raise NotFound(f"no snapshot {name!r}")
        return from_json(row["manifest"])

    def snapshots(self, box: str | None = None) -> list[Snapshot]:
        """All snapshots, or those taken of one sandbox, the oldest first."""
        rows = self._db.execute(
            "SELECT manifest FROM snapshots WHERE hidden=0 AND (?1 IS NULL OR box=?1) ORDER BY created", (box,)
        )
        return [from_json(row["manifest"]) for row in rows]

    def hide(self, snapshot: str) -> None:
        """Delete a snapshot; one that a sandbox stands on goes when that sandbox has moved on."""
        with self._transaction(durable=True):
            done = self._db.execute("UPDATE snapshots SET hidden=1 WHERE id=?", (snapshot,))
            if done.rowcount != 1:
                raise NotFound(f"no snapshot {snapshot!r}")

    def collect(self, used: Iterable[str] = ()) -> list[LayerRow]:
        """Forget hidden snapshots that no sandbox stands on; returns the layers that nothing uses any more.

        used: snapshots that stay all the same.
        """
        with self._transaction(durable=True):
            self._db.execute(
                "DELETE FROM snapshots WHERE hidden=1 AND id NOT IN"
                " (SELECT snapshot FROM boxes WHERE snapshot IS NOT NULL AND state!=?)"
                " AND id NOT IN (SELECT value FROM json_each(?))",
                (State.ENDED, json.dumps(list(used))),
            )
            rows = self._db.execute("SELECT * FROM layers WHERE id NOT IN (SELECT layer FROM uses)").fetchall()
            self._db.execute("DELETE FROM layers WHERE id NOT IN (SELECT layer FROM uses)")
        return [LayerRow(*row) for row in rows]

    def layers(self) -> dict[str, LayerRow]:
        """Every layer, by id."""
        return {row["id"]: LayerRow(*row) for row in self._db.execute("SELECT * FROM layers")}

    # Facts

    def fact(self, name: str) -> str | None:
        """A remembered value."""
        row = self._db.execute("SELECT value FROM facts WHERE name=?", (name,)).fetchone()
        return None if row is None else str(row["value"])

    def remember(self, name: str, value: str) -> None:
        """Keep a value."""
        with self._transaction(durable=True):
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _record(row: sqlite3.Row) -> Record:
    fields = dict(row)
    fields["state"] = State(fields["state"])
    fields["spec"] = json.loads(fields["spec"])
    fields["metadata"] = json.loads(fields["metadata"])
    return Record(**fields)


__all__ = ["LayerRow", "Record", "Store"]
