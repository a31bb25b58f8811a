"""A file system that is really full is an error of ours, and never a signal that ends the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A process is killed by SIGBUS where a mapped file has no room behind it.
SCRIPT = """
import resource, sys, torch
from pathlib import Path
from perilune import Error
from perilune.memory import FileStore
from perilune.memory.optimizer import States

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

def fill(more):
    made = []
    try:
        while len(made) < 20:
            made.append(more())
    except Error as error:
        print(len(made), error)
    return made

states, store, x = States(torch.device("cpu"), folder), FileStore(folder), torch.ones(50_000)
made = fill(lambda: states._home(x).fill_(3.0))
# What was there before is whole.
assert all(bool((y == 3.0).all()) for y in made)
del made

def put():
    ticket = store.put(x)
    assert torch.equal(store.get(ticket), x)
    return ticket

fill(put)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("limit", ["small file system", "largest file"])
def test_full(limit: str, tmp_path: Path) -> None:
    small = limit == "small file system"
    run = [sys.executable, "-c", SCRIPT, str(tmp_path), "0" if small else "100000"]
    if small:
        own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        mount = f"mount -t tmpfs -o size=1m none '{tmp_path}'"
        if (
            shutil.which("unshare") is None
            or subprocess.run([*own, mount], capture_output=True, check=False).returncode
        ):
            pytest.skip("a process may not mount a file system of its own here")
        run = [*own, f'{mount} && exec "$@"', "sh", *run]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        made, _, message = line.partition(" ")
        assert message.startswith("memory.nvme is ")
        assert ("No space left on device" if small else "File too large") in message
        # 200 kB each in 1 MiB.
        assert not small or int(made) >= 4
