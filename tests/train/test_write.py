"""Files are whole or as they were, and a write that fails names its file."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from perilune.errors import Error
from perilune.train.write import naming, write_whole

_FULL = """
import resource, signal, sys
from pathlib import Path
from perilune.errors import Error
from perilune.train.log import MetricsFile
from perilune.train.report import write_report
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
out = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for work in (lambda: write_report(out), lambda: MetricsFile(out / "metrics.jsonl", 9)):
    try:
        work()
    except Error as error:
        print(error)
"""


def test_a_disk_that_fills_up_leaves_the_old_files(tmp_path: Path) -> None:
    # The kernel refuses bytes past a file-size limit: real failing writes, in the middle of a file.
    row = '{"step": 1, "loss": 1, "lr": 1, "grad_norm": 1, "seconds": 1, "tokens": 1, "flops": 1, "imbalance": {}}\n'
    (tmp_path / "metrics.jsonl").write_text(row)
    (tmp_path / "loss.png").write_bytes(b"old")
    (tmp_path / "report.html").write_text("old")
    done = subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        f"{tmp_path / name} could not be written: File too large" for name in ("loss.png", "metrics.jsonl")
    ], done.stderr
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "metrics.jsonl": row,
        "loss.png": "old",
        "report.html": "old",
    }


def test_write_whole_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for data in ("one", b"two"):
        write_whole(path, data)
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_without_a_name_gets_one() -> None:
    with pytest.raises(Error, match=r"^here could not be written: No space left on device$"), naming("here"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(Error, match=r"^there could not be written"), naming("here"):
        raise OSError(errno.ENOSPC, "No space left on device", "there")
