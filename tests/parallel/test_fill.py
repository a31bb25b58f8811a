"""A rank makes its own part of a model and nothing more, and the numbers are those of the whole.

What a rank allocates is counted by a dispatch mode, tensor by tensor as their memory comes and goes: its peak may pass
the part that stays by one box of numbers, twice that while a box is read from a file, and small things.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Transformer, initialize, load, outline, save
from perilune.parallel.collectives import local
from perilune.parallel.expert.model import cut_experts
from perilune.parallel.fill import drawn, fill, give_memory, stored
from perilune.parallel.layout import Layout
from perilune.parallel.mesh import Axes, without_groups
from perilune.parallel.stages import places_of, trim
from perilune.train.config import ParallelConfig
from perilune.train.team import Team

sys.path.insert(0, str(Path(__file__).parent))

from test_expert_training import spawn

CPU = torch.device("cpu")
SLACK = 64_000


class Bytes(TorchDispatchMode):
    """Bytes of storages that operations have made and that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            # What is made inside an operation on a sharded tensor is not seen, but its result is.
            value = getattr(value, "_local_tensor", value)
            if type(value) is torch.Tensor and value.device.type == "cpu":
                storage = value.untyped_storage()
                key = storage.data_ptr()
                if key and key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


def shape() -> ModelConfig:
    """Mostly experts and layers, as large models are."""
    nano = ModelConfig.from_pretrained("nano")
    return dataclasses.replace(nano, vocab_size=256, moe=dataclasses.replace(nano.moe, num_experts=64))


def part(axes: Axes, ranks: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Layout, Any]:
    """The outline of a rank's part with stages and experts cut, its layout, and the whole's shapes."""
    model = outline(shape())
    for p in model.parameters():
        p.data = p.data.to(dtype)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    mesh = without_groups(ranks, axes, rank)
    cut_experts(model, mesh.shard, mesh.shards)
    if axes.pp > 1:
        trim(model, [places_of(model.config, axes.pp, "1F1B", 1)[mesh.places[0]]])
    return model, Layout(model.config, mesh), shapes


@pytest.fixture(scope="module")
def whole() -> Transformer:
    return initialize(Transformer(shape()), 5)


@pytest.fixture(scope="module")
def folder(whole: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fill") / "checkpoint"
    save(whole, path)
    return path


def check(model: Transformer, layout: Layout, shapes: Any, whole: Transformer) -> None:
    want = dict(whole.named_parameters()) | dict(whole.named_buffers())
    for name, value in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
        for box in layout.boxes(name, shapes[name]) if name in shapes else []:
            at = tuple(slice(a, a + n) for a, n in zip(box.begin, box.size, strict=True))
            assert torch.equal(box.of_part(value.detach()), want[name].detach()[at].to(value.dtype)), name
        if name not in shapes:
            assert torch.equal(value, want[name])


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 3": {"zero": 3, "ep": 1},
    "ep2, zero 3": {"zero": 3},
    "tp2": {"tp": 2},
    "pp2, virtual 2": {"pp": 2, "virtual": 2, "schedule": "Interleaved1F1B"},
}


def spread(rank: int, folder: str) -> dict[str, Any]:
    """Of each layout and source: the peak and the part of this rank, and its numbers with their boxes."""
    found = {}
    for name, settings in LAYOUTS.items():
        for source, make in SOURCES.items():
            team = Team(ParallelConfig(timeout=60.0, **settings), CPU)
            model = outline(shape())
            values = make(model, Path(folder))
            with Bytes() as seen:
                team.spread(model, 64, values=values)
            parts = {n: local(p.detach()) for n, p in model.named_parameters()}
            assert team.layout is not None
            boxes = {
                n: [(b.begin, b.size, b.of_part(part).clone().numpy()) for b in team.layout.boxes(n, team.shapes[n])]
                for n, part in parts.items()
            }
            found[f"{name}, {source}"] = (seen.peak, sum(part.nbytes for part in parts.values()), boxes)
    return found


def test_ranks_of_every_kind_of_cut_make_their_part_alone(whole: Transformer, folder: Path) -> None:
    """With FSDP, experts, tensor parallel and stages, through `Team`; all ranks together have every number."""
    want = {name: p.detach() for name, p in whole.named_parameters()}
    largest = max(p[0].nbytes if p.dim() == 3 else p.nbytes for p in want.values())
    total = sum(p.nbytes for p in want.values())
    results = spawn(spread, 2, str(folder))
    assert not [result for result in results if isinstance(result, str)], results
    for key in results[0]:
        seen = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in want.items()}
        for peak, mine, boxes in (result[key] for result in results):
            # Experts are spread over a team of two, other parameters or layers over its ranks.
            assert mine < (0.6 if key.startswith(("zero", "pp2")) else 0.75) * total, key
            assert mine <= peak + SLACK, (key, peak, mine)
            assert peak <= mine + 3 * largest + SLACK, (key, peak, mine)
            for name, found in boxes.items():
                for begin, size, part in found:
                    at = tuple(slice(a, a + n) for a, n in zip(begin, size, strict=True))
                    assert torch.equal(torch.from_numpy(part), want[name][at]), (key, name)
                    seen[name][at] = True
        assert all(mask.all() for mask in seen.values()), key


SPREAD = {"alone": (Axes(), 1), "ep2": (Axes(), 2), "pp2 ep2": (Axes(pp=2), 4), "pp2": (Axes(pp=2), 2)}
SOURCES: dict[str, Callable[[Transformer, Path], Any]] = {
    "drawn": lambda model, folder: drawn(model, 5),
    "stored": lambda model, folder: stored(folder, model),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", SPREAD)
def test_a_part_is_that_of_the_whole_and_no_more_is_made(
    name: str, source: str, whole: Transformer, folder: Path
) -> None:
    axes, ranks = SPREAD[name]
    largest = max(p[0].nbytes if p.dim() == 3 else p.nbytes for p in whole.parameters())
    for rank in range(ranks):
        values = SOURCES[source](outline(shape()), folder)
        model, layout, shapes = part(axes, ranks, rank)
        with Bytes() as seen:
            give_memory([model], CPU)
            fill(model, layout, shapes, values)
        mine = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        assert mine <= seen.peak <= mine + 3 * largest + SLACK
        check(model, layout, shapes, whole)
        if name == "pp2 ep2":
            assert seen.peak < 0.4 * sum(p.nbytes for p in whole.parameters())


def test_the_count_sees_a_whole_model(whole: Transformer) -> None:
    with Bytes() as seen:
        Transformer(shape())
    assert seen.peak >= sum(p.nbytes for p in whole.parameters())


def draw_whole(model: Transformer, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Normal parameters drawn whole, as one call each, the others as the generator passes them."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        leaf, value = name.rsplit(".", 1)[-1], torch.empty(p.shape)
        if leaf in ("dt_bias_HK", "conv_CW") or (leaf == "A_log_H" and model.config.kda.gate.mode != "safe"):
            value.uniform_(generator=generator)
        elif leaf not in ("query_D", "A_log_H") and "norm" not in leaf:
            yield name, value.normal_(0.0, model.config.initializer_range, generator=generator)


def test_stacked_experts_are_drawn_one_by_one_with_the_numbers_of_one_draw(whole: Transformer) -> None:
    params, seen = dict(whole.named_parameters()), 0
    for name, value in draw_whole(whole, 5):
        assert torch.equal(params[name], value), name
        seen += value.dim() == 3
    assert seen


def test_a_checkpoint_read_by_a_part_is_what_load_reads(folder: Path) -> None:
    want = load(folder, dtype=torch.bfloat16)
    model, layout, shapes = part(Axes(pp=2), 4, 3)
    model = model.bfloat16()
    give_memory([model], CPU)
    fill(model, layout, shapes, stored(folder, outline(shape()).bfloat16()))
    read = dict(want.named_parameters())
    for name, value in model.named_parameters():
        (box,) = layout.boxes(name, shapes[name])
        at = tuple(slice(a, a + n) for a, n in zip(box.begin, box.size, strict=True))
        assert torch.equal(value, read[name][at].bfloat16()), name


def test_a_parameter_without_values_is_named() -> None:
    model, layout, shapes = part(Axes(), 1, 0)
    give_memory([model], CPU)
    with pytest.raises(Error, match=r"\d+ parameters have no values: embed.weight"):
        fill(model, layout, shapes, lambda wanted: iter(()))
