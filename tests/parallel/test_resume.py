"""A checkpoint of any layout continues in any other, and a rank that is killed ends the others, not the run.

float64: a run that changes its layout after three steps gives the losses of one process within 1e-9.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Transformer, load, save
from perilune.parallel.layout import Layout, left_whole
from perilune.parallel.mesh import Axes, without_groups
from perilune.parallel.tensor_model import CUT
from perilune.train.checkpoint import list_checkpoints, load_checkpoint
from perilune.train.config import from_dict
from perilune.train.export import export

sys.path.insert(0, str(Path(__file__).parent))

from test_expert_training import prepare, settings, spawn
from test_layouts import LAYOUTS

STEPS, CHANGE = 6, 3


def values_of(root: Path, out: str, parallel: dict[str, Any]) -> dict[str, Any]:
    values = settings(root, out, STEPS) | {"accumulate": 4, "eval_every": 0, "checkpoint_every": 0, "keep": 9}
    return values | {"parallel": {"policy": "exact", "timeout": 20.0} | parallel}


def go(rank: int, values: dict[str, Any], until: int, die: int = -1) -> list[float]:
    """Losses of the steps up to `until`, then a checkpoint. die: the rank that kills itself after the fifth step."""
    from perilune.train import Trainer

    trainer = Trainer(from_dict(values))
    losses = []
    while trainer.step < until:
        losses.append(trainer.train_step()["loss"])
        if trainer.step == 5 and rank == die:
            os.kill(os.getpid(), signal.SIGKILL)
    trainer.save()
    trainer.close()
    return losses


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def alone(root: Path) -> list[float]:
    return go(0, values_of(root, "alone", {}), STEPS)


def change(root: Path, alone: list[float], out: str, first: tuple[int, dict[str, Any]], *then: Any) -> None:
    ranks, parallel = first
    for got in spawn(go, ranks, values_of(root, out, parallel), CHANGE):
        assert not isinstance(got, str), got
        assert got == pytest.approx(alone[:CHANGE], rel=1e-9)
    written = list_checkpoints(root / out / "steps")
    assert len(written) == 1
    for i, (ranks, parallel) in enumerate(then):
        if i:
            for newer in list_checkpoints(root / out / "steps")[1:]:
                (newer / "meta.json").unlink()
        for got in (
            spawn(go, ranks, values_of(root, out, parallel), STEPS)
            if ranks > 1
            else [go(0, values_of(root, out, parallel), STEPS)]
        ):
            assert not isinstance(got, str), got
            assert got == pytest.approx(alone[CHANGE:], rel=1e-9)


def test_two_ranks_continue_in_another_layout_and_on_one(root: Path, alone: list[float]) -> None:
    change(root, alone, "two", (2, {"ep": 2, "zero": 3}), (2, {"tp": 2, "ep": 1}), (1, {}))
    one, _ = load_checkpoint(list_checkpoints(root / "alone" / "steps")[-1])
    two, _ = load_checkpoint(list_checkpoints(root / "two" / "steps")[-1])
    # The same names and shapes, whoever wrote it.
    assert {n: v.shape for n, v in one.items()} == {n: v.shape for n, v in two.items()}
    for name, value in one.items():
        if not name.startswith("rng"):
            assert (two[name].double() - value.double()).abs().max() <= 1e-9 * max(1, value.double().abs().max()), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sharded_stages_continue_elsewhere(root: Path, alone: list[float]) -> None:
    change(root, alone, "stages", (4, {"pp": 2, "zero": 3, "ep": 1}), (2, {"zero": 2}), (1, {}))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_ranks_continue_in_other_layouts(root: Path, alone: list[float]) -> None:
    change(
        root,
        alone,
        "four",
        (4, {"zero": 3, "ep": 1}),
        (4, {"tp": 2, "pp": 2, "ep": 1}),
        (2, {"cp": 2}),
        (4, {"pp": 2, "virtual": 2, "schedule": "Interleaved1F1B"}),
        (4, {"pp": 2, "zero": 3, "ep": 1}),
        (1, {}),
    )


def test_no_rank_writes_more_than_its_part(root: Path, alone: list[float]) -> None:
    """The files of a sharded checkpoint hold each number once, about evenly."""
    for got in spawn(go, 2, values_of(root, "even", {"zero": 3, "ep": 2}), 1):
        assert not isinstance(got, str), got
    path = list_checkpoints(root / "even" / "steps")[-1]
    sizes = [f.stat().st_size for f in path.glob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    chunks = stored["model/layers.1.ffn.gate_up_E2FL"].chunks  # type: ignore[union-attr]
    assert sorted(c.offsets[0] for c in chunks) == [0, 4]


KILLED = """
import sys
sys.path.insert(0, {folder!r})
from test_resume import go, values_of
from pathlib import Path
import json
import os
go(int(os.environ["RANK"]), values_of(Path({root!r}), "killed", {{"zero": 2, "ep": 1}}), 3)
go(int(os.environ["RANK"]), values_of(Path({root!r}), "killed", {{"zero": 2, "ep": 1}}), 6, die=1)
"""


def test_kill_9_of_a_rank_ends_the_others_and_the_run_continues_on_one(root: Path, alone: list[float]) -> None:
    script = root / "killed.py"
    script.write_text(KILLED.format(folder=str(Path(__file__).parent), root=str(root)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    begin = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode != 0
    assert time.monotonic() - begin < 80
    assert "exitcode  : -9" in done.stderr
    # The last checkpoint is that of step 3; nothing of a later one is left to stumble over.
    assert [p.name for p in list_checkpoints(root / "killed" / "steps")] == ["step-00000003"]
    assert go(0, values_of(root, "killed", {}), STEPS) == pytest.approx(alone[CHANGE:], rel=1e-9)


@pytest.mark.parametrize(("ranks", "name"), [(r, n) for r in LAYOUTS for n in LAYOUTS[r]])
def test_boxes_of_all_ranks_cover_every_number_once_for_each_copy(root: Path, ranks: int, name: str) -> None:
    chosen = {k: v for k, v in LAYOUTS[ranks][name].items() if k in ("pp", "shard", "cp", "tp", "ep")}
    config = ModelConfig.from_pretrained(root / "model")
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in Transformer(config).named_parameters()}
    sharded = frozenset(shapes) if LAYOUTS[ranks][name].get("zero") else frozenset()
    layouts = []
    for rank in range(ranks):
        mesh = without_groups(ranks, Axes(**chosen), rank)
        kept = frozenset(n for n in sharded if not left_whole(n, mesh))
        layouts.append(Layout(config, mesh, CUT, kept))
    for n, shape in shapes.items():
        seen, given = torch.zeros(shape), torch.zeros(shape)
        for layout in layouts:
            for box in layout.boxes(n, shape):
                at = tuple(slice(b, b + s) for b, s in zip(box.begin, box.size, strict=True))
                seen[at] += 1
                given[at] += layout.gives(n)
        stages = layouts[0].mesh.sizes[0]
        assert (seen == stages * layouts[0].copies(n)).all(), n
        assert (given == stages).all(), n


def test_export_from_two_ranks_is_the_model_that_one_rank_saves(root: Path, alone: list[float]) -> None:
    for got in spawn(go, 2, values_of(root, "sharded", {"zero": 3, "ep": 2}) | {"keep": 1}, 2):
        assert not isinstance(got, str), got
    exported = load(export(root / "sharded", root / "exported"), dtype=torch.float64)
    from perilune.train import Trainer

    trainer = Trainer(from_dict(values_of(root, "sharded", {})))
    assert trainer.step == 2
    save(trainer.model, root / "saved")
    trainer.close()
    saved = load(root / "saved", dtype=torch.float64)
    for (name, a), b in zip(exported.state_dict().items(), saved.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for name in ("config.json", "model.safetensors"):
        assert (root / "exported" / name).read_bytes() == (root / "saved" / name).read_bytes()
    with pytest.raises(Error, match="has no checkpoint of step 7; there are: 2"):
        export(root / "sharded", root / "no", 7)


def test_the_first_error_is_shown_once(root: Path) -> None:
    """By `perilune train` on two ranks: settings that all refuse, and a folder that only the first finds taken."""
    (root / "taken").write_text("a file where the folder should be")
    for values, message in (
        ({"parallel": {"cp": 3}}, "perilune: parallel.cp is 3; must divide the 2 processes of the run"),
        ({"out": str(root / "taken")}, "cannot be written"),
    ):
        config = settings(root, "unused", STEPS) | {"parallel": {"timeout": 20.0}} | values
        lines = [f"{k} = {json.dumps(v)}" for k, v in config.items() if not isinstance(v, dict)]
        for table in ("data", "optim", "parallel"):
            lines += [f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in config[table].items())]
        (root / "run.toml").write_text("\n".join(lines))
        script = root / "main.py"
        script.write_text("import sys\nfrom perilune.cli import main\nsys.exit(main(sys.argv[1:]))\n")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        done = subprocess.run(
            [*command, str(script), "train", str(root / "run.toml")], capture_output=True, text=True, timeout=90
        )
        assert done.returncode != 0
        assert [line for line in done.stderr.splitlines() if line.startswith("perilune:")] == [
            next(line for line in done.stderr.splitlines() if message in line)
        ]
