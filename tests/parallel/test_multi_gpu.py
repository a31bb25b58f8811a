"""bench/multi_gpu.py without GPUs: every part in one command, small and over gloo, its file, its plots and its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--ep-tokens", "32", "--ep-loads", "even", "16 experts", "--ep-repeat", "1", "--parallel-repeat", "1"]


def run(folder: Path, *options: str, limit: float) -> tuple[int, str]:
    """(exit code, what was printed) of two ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "bench/multi_gpu.py", "--out", str(folder / "out.json"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_part_runs(tmp_path: Path) -> None:
    caps = ["--seconds", "1000", "--ep-seconds", "400", "--parallel-seconds", "500"]
    code, said = run(tmp_path, *SMALL, *caps, "--step-models", "mini", "--plots", str(tmp_path), limit=1100)
    assert code == 0, said[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    ep, parallel = found["ep"], found["parallel"]
    layers = {name for row in ep["layers"] for name, cell in row.items() if isinstance(cell, dict)}
    assert layers == {"plain", "padded", "collective exact", "collective tolerant"}
    assert ep["check"]["copies_used"] > 0
    assert [row["tokens"] for row in parallel["kcp"]["layers"]] == [64, 128]
    assert {row["layout"] for row in parallel["step"]} == {
        "dp", "dp zero2", "dp zero3", "ep", "ep zero3", "cp", "tp", "pp",
    }  # fmt: skip
    assert not [row for row in parallel["step"] if "error" in row]
    assert all((tmp_path / f"{part}.svg").stat().st_size for part in ("ep", "parallel"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_ends_in_time_with_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text('{"ep": {"before": 1}}')
    code, said = run(tmp_path, *SMALL, "--seconds", "8", limit=250)
    assert code != 0
    assert "the 8 s are over" in said
    assert json.loads((tmp_path / "out.json").read_text())["ep"]["before"] == 1
