"""bench/all.py: what is run with which GPU, what happens to jobs that do not end, and that the table names what is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_all", ROOT / "bench" / "all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_all"] = module
    spec.loader.exec_module(module)
    return module


def script(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(text)
    return f"{{python}} {path} {{out}}"


SAYS = """
import json, os, sys, pathlib
pathlib.Path(sys.argv[1]).write_text(json.dumps(os.environ["CUDA_VISIBLE_DEVICES"]))
"""
STUCK = """
import subprocess, sys, pathlib, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def test_each_job_has_its_gpus_and_its_end(bench: ModuleType, tmp_path: Path) -> None:
    says, stuck = script(tmp_path, "says", SAYS), script(tmp_path, "stuck", STUCK)
    jobs = [
        bench.Job("first", says, 30),
        bench.Job("second", says, 30),
        bench.Job("stuck", stuck, 2),
        bench.Job("broken", script(tmp_path, "broken", "raise SystemExit(3)"), 30),
        bench.Job("both", says, 30, gpus=2),
        bench.Job("none", says, 30, gpus=0),
        bench.Job("many", says, 30, gpus=8),
        bench.Job("traced", says + " {traces}", 30),
    ]
    begin = time.monotonic()
    outcomes = bench.measure(jobs, tmp_path, [0, 1], 50, None)
    assert time.monotonic() - begin < 40
    states = {outcome.name: outcome.state for outcome in outcomes}
    assert states == {
        "first": "ok",
        "second": "ok",
        "stuck": "cut",
        "broken": "failed",
        "both": "ok",
        "none": "ok",
        "many": "skipped",
        "traced": "skipped",
    }
    said = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second", "both", "none")}
    assert {said["first"], said["second"]} <= {"0", "1"}
    assert (said["both"], said["none"]) == ("0,1", "")
    child = int((tmp_path / "stuck.json").read_text())
    for _ in range(500):  # what it had started has ended with it
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        raise AssertionError("a child of a job that was cut runs on")
    assert [one["name"] for one in json.loads((tmp_path / "all.json").read_text())] == [o.name for o in outcomes]


def test_no_job_begins_without_time(bench: ModuleType, tmp_path: Path) -> None:
    outcomes = bench.measure([bench.Job("late", "false", 30)], tmp_path, [0], 1, None)
    assert [(outcome.state, outcome.why) for outcome in outcomes] == [("skipped", "no time is left")]


def test_names_choose(bench: ModuleType) -> None:
    jobs = bench.read(ROOT / "bench" / "all.toml")
    assert [job.name for job in bench.chosen(jobs, ["mx", "kda-decode"])] == ["mx-gemm", "mx-step", "kda-decode"]
    with pytest.raises(SystemExit, match="'kdb'"):
        bench.chosen(jobs, ["kdb"])


def test_the_table_names_options_that_exist(bench: ModuleType) -> None:
    """Every option of a command stands in its script or a module beside it."""
    for job in bench.read(ROOT / "bench" / "all.toml"):
        words = job.command.split()
        path = ROOT / words[1]
        beside = [path, *path.parent.glob(f"{path.stem}_*.py")]
        text = "\n".join(file.read_text() for file in beside)
        for word in words[2:]:
            if word.startswith("--"):
                assert f'"{word}"' in text, (job.name, word)


def test_its_command_line_lists() -> None:
    command = [sys.executable, "bench/all.py", "--list", "--only", "serve"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "serve-replay" in listed
    assert "kda" not in listed


def test_every_script_reads_its_arguments() -> None:
    """One that does not would measure, and write over its results, when it is asked for --help."""
    scripts = {path.name: path.read_text("utf-8") for path in (ROOT / "bench").glob("*.py")}
    started = {name: text for name, text in scripts.items() if '__name__ == "__main__"' in text}
    assert len(started) > 10
    assert [name for name, text in started.items() if ".parse_args(" not in text] == []
