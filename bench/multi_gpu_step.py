"""A training step over several GPUs under layouts, a part of bench/multi_gpu.py (through multi_gpu_parallel).

`mini` with its optimizers; `slice`, Kimi-K3's widths with 4 layers, forward, backward and the gradients added up,
without an optimizer's step, whose states would not fit. Without GPUs `nano` stands for both. Random tokens in documents
of 4096. Milliseconds of the slowest rank; `exposed` is of one more step, by the profiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_common import DRY, RUN, forget_peak, late, peak_GB, say, timed, uncovered
from parallel_layers import DEVICE, random_model, shape_of

from perilune.config import ModelConfig
from perilune.ops.sequences import Sequences
from perilune.train.config import DataConfig, OptimConfig, ParallelConfig, TrainConfig
from perilune.train.data import Batch
from perilune.train.masters import Masters
from perilune.train.optim import build_optimizers, clip_gradients
from perilune.train.plan import plan
from perilune.train.team import Team

# 0 stands for all ranks.
STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "mini": {
        "dp": {"ep": 1},
        "dp zero2": {"ep": 1, "zero": 2},
        "dp zero3": {"ep": 1, "zero": 3},
        "ep": {},
        "ep symmetric": {"transport": "symmetric"},
        "ep zero3": {"zero": 3},
        "cp": {"cp": 0, "ep": 1},
        "tp": {"tp": 0, "ep": 1},
        "pp": {"pp": 0},
    },
    "slice": {
        "ep": {},
        "ep symmetric": {"transport": "symmetric"},
        "dp": {"ep": 1},
        "tp ep": {"tp": 0},
        "cp ep": {"cp": 0},
        "ep zero3": {"zero": 3},
        "dp zero3": {"ep": 1, "zero": 3},
        "pp": {"pp": 0},
    },
}
# Of `slice` in all.
SLICE_EXPERTS = 112
# Micro-batches of a step with pipeline stages.
MICRO = 4


def steps(args: argparse.Namespace, deadline: float, keep: Callable[[dict[str, Any]], None]) -> None:
    found: list[dict[str, Any]] = []
    R = dist.get_world_size()
    for name in args.step_models:
        shape = ModelConfig.from_pretrained("nano") if DRY else shape_of(name)
        if name == "slice" and not DRY:
            shape = dataclasses.replace(shape, moe=dataclasses.replace(shape.moe, num_experts=SLICE_EXPERTS))
        for layout, parallel in STEPS[name].items():
            if args.step_layouts and layout not in args.step_layouts:
                continue
            if DRY and "symmetric" in layout:
                say(f"{layout} needs GPUs")
                continue
            if late(deadline):
                say(f"out of time before {layout}")
                return
            config = settings(
                name, {key: R if value == 0 else value for key, value in parallel.items()}, args.step_tokens, R
            )
            row: dict[str, Any] = {"run": RUN, "model": name, "layout": layout}
            try:
                row |= measure(config, shape, args.parallel_repeat, R)
            except Exception as error:
                # Of all ranks, or the next collective times out; what is measured already stays.
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            found.append(row)
            say(row)
            keep({"step": found})
            gc.collect()
            forget_peak()


def measure(config: TrainConfig, shape: ModelConfig, repeat: int, ranks: int) -> dict[str, Any]:
    """Of one layout; `planned` is what `perilune plan` counts for the fullest rank with its optimizer."""
    forget_peak()
    before = peak_GB()
    call = training_step(config, shape)
    # The states of the optimizers come with the first steps.
    row: dict[str, Any] = {"ms": timed(call, repeat, warm=3)}
    row["peak_GB"] = round(peak_GB() - before, 2)
    rank = plan(config, shape, ranks).fullest
    row["planned_activations_GB"] = round(rank.activations / 1e9, 2)
    if config.model == "mini":
        row["planned_GB"] = round(rank.total / 1e9, 2)
    tokens = config.data.batch_tokens * config.accumulate
    row |= {"tokens": tokens, "tokens_per_second": round(tokens / row["ms"]["median"] * 1000)}
    return row | {"exposed": uncovered(call)}


def settings(name: str, parallel: dict[str, Any], tokens: int, ranks: int) -> TrainConfig:
    """A run whose ranks have so many tokens each; with stages in MICRO pieces."""
    cp, tp, pp = (parallel.get(axis, 1) for axis in ("cp", "tp", "pp"))
    micro = MICRO if pp > 1 else 1
    data = DataConfig(batch_tokens=tokens * cp * tp * pp // micro, sequence_tokens=4096)
    parallel_config = ParallelConfig(**{"timeout": 100.0} | parallel)
    accumulate = micro * ranks // (cp * tp * pp)
    return TrainConfig(model=name, dtype="bfloat16", accumulate=accumulate, data=data, parallel=parallel_config)


def training_step(config: TrainConfig, shape: ModelConfig) -> Callable[[], None]:
    """One step on random tokens. The slice takes no optimizer step: its states would not fit."""
    team = Team(config.parallel, DEVICE)
    T = config.data.batch_tokens
    net = team.spread(random_model(shape), T)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    masters = None
    if config.model == "mini":
        masters = Masters(net)
        heads, spread = team.matrices(net, masters.params)
        optimizers = build_optimizers(masters.params, heads, OptimConfig(), spread)
    generator = torch.Generator(DEVICE).manual_seed(team.mesh.data[0])
    sequences = Sequences.from_lengths([min(T, 4096)] * max(T // 4096, 1), device=DEVICE)
    batches = []
    for _ in range(config.accumulate // team.mesh.data[1]):
        ids = torch.randint(shape.vocab_size, (T + 1,), device=DEVICE, generator=generator)
        batches.append(Batch(ids[:-1], ids[1:], torch.ones(T, dtype=torch.bool, device=DEVICE), sequences))

    def step() -> None:
        team.passes(net, batches, T * config.accumulate, 4096 * 8192, lambda stats: None)
        if masters is None:
            team.add_gradients(dict(net.named_parameters()))
            for p in net.parameters():
                p.grad = None
        else:
            masters.take_gradients()
            team.add_gradients(masters.params)
            clip_gradients(masters.params.values(), 1.0, team.copies(masters.params), team.add_squares)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            masters.write_back()
        team.expert_stats()

    return step
