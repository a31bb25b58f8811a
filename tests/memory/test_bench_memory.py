"""The memory benches: a plan that fails or takes too long ends its own row only, and what was measured is on disk."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from perilune.memory import Plan

BENCH = Path(__file__).parents[2] / "bench"
TINY = "--slice tiny --layers 4 --experts 16 --row-seconds 400"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("memory")
    for name in ("memory", "memory_slice", "memory_device", "memory_selective"):
        sys.modules.pop(name, None)


class Slow:
    """Stands for the model: a plan's step does what its name says."""

    def __init__(self, table: dict[str, Plan]) -> None:
        self.names = {id(plan): name for name, plan in table.items()}
        self.tokens, self.calls = torch.zeros(10), list[str]()

    def step(self, plan: Plan, scale: float = 1.0, waits: Any = None) -> Any:
        name = self.names[id(plan)]
        self.calls.append(name)
        if name == "full" and self.calls.count(name) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if name == "hangs":
            while True:
                time.sleep(0.001)
        return {"ms": 2.0, "peak": 3e9, "kept": 1e9}, torch.zeros(()), SimpleNamespace(rows={})

    def gradients(self) -> dict[str, torch.Tensor]:
        return {"q_proj": torch.ones(3), "o_proj": torch.ones(3)}


def test_a_failed_plan_ends_its_row_only(bench: ModuleType, tmp_path: Path) -> None:
    plans = {name: Plan() for name in ("none", "full", "hangs", "k3")}
    states: list[list[dict[str, Any]]] = []
    out = tmp_path / "out.json"

    def note(rows: dict[str, dict[str, Any]]) -> None:
        sys.modules["memory_device"].write(out, {"plans": list(rows.values())})
        states.append(json.loads(out.read_text())["plans"])

    rounds = bench.Rounds(Slow(plans), plans, 1.0, note)
    begin = time.monotonic()
    rounds.first()
    assert time.monotonic() - begin < 10
    for _ in range(3):
        rounds.turn()
    rows = {row["plan"]: row for row in states[-1]}
    assert rows["full"]["ended"] == "OutOfMemoryError: CUDA out of memory"
    assert rows["hangs"]["ended"] == "TimeLimitError: took more than 1 s"
    assert [rows[name]["rounds"] for name in ("none", "k3")] == [3, 3]
    assert rows["none"]["peak_gb"] == 3.0
    # On disk after every plan of every turn, not only in the end.
    assert [row["plan"] for row in states[0] if "first" in row] == ["none"]
    assert len(states) == 4 + 3 * 2


def test_the_first_pattern_of_changes_decides(bench: ModuleType) -> None:
    placed = bench.plan_of("k3,layers.1.kda.gate=keep,mlp.gate=fp8").placement
    assert str(placed("layers.1.kda.gate", False, True)) == "keep"
    assert str(placed("layers.2.kda.gate", False, True)) == "host"
    assert str(placed("layers.2.mlp.gate", False, True)) == "fp8"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", ["table", "longest", "peer", "errors"])
def test_every_path_runs_to_its_end(path: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = {
        "table": f"memory.py {TINY} --tokens 32 --rounds 1 --fit 1e-7 1",
        "longest": f"memory.py {TINY} --tokens 64 --plans none k3 --longest",
        "peer": "memory_peer.py --small --layers 4 --tokens 40 --micro 3 --rounds 1",
        "errors": "memory_errors.py --width 128 --tokens 32 --dtype bfloat16",
    }[path].split()
    run = (
        [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]
        if path == "peer"
        else []
    )
    command = [*(run or [sys.executable]), str(BENCH / words[0]), *words[1:], "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # NIXL by itself ends with SIGSEGV at exit where UCX loads modules beside libibverbs, without a device.
    environment["UCX_MODULES"] = "none"
    done = subprocess.run(
        command, cwd=BENCH.parent, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    if path == "table":
        assert [row["rounds"] for row in found["plans"]] == [1] * 5
        assert "the least that can be reached" in found["not_fitted"]["fit(1e-07 GB)"]
    if path == "longest":
        assert all(0 < row["ran_tokens"] <= row["predicted_tokens"] for row in found["longest"])
    if path == "peer":
        assert [len(rank["peer"]["ms"]) for rank in found["stages"]["ranks"]] == [1, 1]
        assert found["copies messages"]["same"]
    if path == "errors":
        assert found["rows"].keys() == {"another rounding", "k3"}
