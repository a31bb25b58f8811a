"""A training run under a memory plan: the same losses, clear errors, and a report that agrees with itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from perilune import Error
from perilune.cli import main
from perilune.train.config import MemoryConfig, TrainConfig, from_dict
from perilune.train.trainer import Trainer


def losses(config: TrainConfig, memory: MemoryConfig, out: Path, steps: int = 3) -> list[float]:
    trainer = Trainer(dataclasses.replace(config, memory=memory, out=str(out)))
    try:
        trainer.evaluate()
        return [trainer.train_step()["loss"] for _ in range(steps)]
    finally:
        trainer.close()


def test_plans_do_not_change_a_run(tiny_run: TrainConfig, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[plan]\n"norm" = "recompute"\n"kda.*" = "nvme"\n"*" = "host"\n')
    packed = tmp_path / "fp8.toml"
    packed.write_text('[plan]\n"*.gate" = "fp8"\n')
    reference = losses(tiny_run, MemoryConfig(), tmp_path / "none")
    for i, memory in enumerate(
        (
            MemoryConfig("full-recompute"),
            MemoryConfig(str(file), nvme=str(tmp_path)),
            MemoryConfig("fit", budget=1_500_000),
            MemoryConfig("k3"),
        )
    ):
        assert losses(tiny_run, memory, tmp_path / str(i)) == reference
    # FP8 changes gradients, not the forward pass: the first loss is the same.
    lossy = losses(tiny_run, MemoryConfig(str(packed)), tmp_path / "fp8")
    assert lossy[0] == reference[0]
    assert lossy == pytest.approx(reference, rel=1e-3)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"plan": "k4"}, r"memory plan is 'k4'; allowed: none, full-recompute, k3, fit"),
        ({"plan": "fit"}, r"memory.budget is 0; must be > 0"),
        ({"budget": 10}, r"memory.budget is 10; must be > 0 with plan fit only"),
        ({"plan": "k3", "host_bytes": -1}, r"memory.host_bytes is -1; must be >= 0"),
        ({"plan": "k3", "peer": 1}, r"unknown key memory.peer"),
    ],
)
def test_settings_that_are_refused(memory: dict[str, object], message: str, tiny_run: TrainConfig) -> None:
    with pytest.raises(Error, match=message):
        Trainer(from_dict(tiny_run.to_dict() | {"memory": memory}))


def test_files_need_a_folder_and_host_memory_room(tiny_run: TrainConfig, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[plan]\n"*" = "nvme"\n')
    with pytest.raises(Error, match=r"memory.nvme is not set"):
        losses(tiny_run, MemoryConfig(str(file)), tmp_path / "a")
    with pytest.raises(Error, match=r"memory.host_bytes is 1000; "):
        losses(tiny_run, MemoryConfig("k3", host_bytes=1000), tmp_path / "b")


@pytest.mark.parametrize("plan", ["none", "k3", "full-recompute"])
def test_the_report(plan: str, tiny_run: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = tiny_run.to_dict()
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if isinstance(value, str | int | float)]
    lines += ["[data]", *(f"{key} = {json.dumps(value)}" for key, value in values["data"].items())]
    file = tmp_path / "run.toml"
    file.write_text("\n".join(lines))
    main(["train", str(file), "--memory.plan", plan, "--memory-report"])
    out = capsys.readouterr().out
    last = {line.split("  ")[0]: line.split()[-3:] for line in out.splitlines() if line[0] in "psc"}
    assert last["predicted"] == last["step"]
    assert last["census of the device"][-1] == last["step"][0]
    assert " !" not in out
    assert "kda.core        (region)" in out
    assert not list((tmp_path / "run").glob("steps/*"))
    assert (Path(str(values["out"])) / "memory.png").read_bytes().startswith(b"\x89PNG")
