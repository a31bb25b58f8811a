"""`perilune train --memory-report`: one step of a run under its memory plan, predicted and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from perilune.memory.census import Census
from perilune.memory.fit import resident, working_set
from perilune.memory.flops import recompute_flops
from perilune.memory.manager import Memory
from perilune.memory.plan import Plan
from perilune.memory.profile import predict, profile
from perilune.memory.report import Seen, render
from perilune.memory.rows import Row
from perilune.memory.waits import Waits
from perilune.model import Stats
from perilune.train.config import TrainConfig
from perilune.train.loss import cross_entropy
from perilune.train.memory_picture import draw_memory
from perilune.train.report import require_plots
from perilune.train.trainer import Trainer


def memory_report(config: TrainConfig) -> str:
    """The table of `perilune.memory.report.render` for the run's first micro-batch, and where its picture lies.

    The picture, memory.png in the run's folder, shows the step's bytes by name over time. Nothing is trained. Takes the
    memory of a step without a plan, once, for the prediction. Raises Error as `Trainer`, and without matplotlib.
    """
    require_plots()
    trainer = Trainer(config)
    try:
        model, device = trainer.model, trainer.device
        batch = next(trainer.data).to(device)
        inputs = [batch.tokens_T, batch.targets_T, batch.mask_T, batch.sequences.cu_seqlens]
        weights = [*model.parameters(), *model.buffers(), *inputs]

        def forward() -> Tensor:
            x_TD = model.hidden(batch.tokens_T, batch.sequences, stats=Stats()).x_TD
            return cross_entropy(x_TD, model.lm_head.weight, batch.targets_T, batch.mask_T, config.loss_chunk)[0]

        model.train()
        # Twice: the first one also builds kernels and caches.
        forward()
        noted = profile(forward, weights, device)
        plan = trainer.activations.plan(forward) if config.memory.plan != "none" else Plan()
        predicted = predict(noted, plan)
        memory = trainer.activations.manager(plan, inputs)
        alive = _census(memory, forward, predicted, device)
        waits, peak = _waits(memory, forward, device)
        if peak is not None:
            expected = resident(noted, plan) + working_set(forward, weights, noted, device)
            both = (expected, peak)
        seen = Seen(memory.rows, alive, recompute_flops(forward), waits, None if peak is None else both)
        samples, backward = _samples(memory, forward)
        picture = Path(config.out) / "memory.png"
        draw_memory(samples, backward, picture)
        return f"{render(predicted, seen, noted)}\npicture: {picture}"
    finally:
        trainer.close()


def _census(memory: Memory, forward: Callable[[], Tensor], predicted: dict[str, Row], device: torch.device) -> int:
    """Bytes of the device that are alive between the passes."""
    with memory.step():
        with Census(device) as census:
            loss = forward()
            alive: int = census.alive() - loss.nbytes
        loss.backward()
    # The host store of a CPU lies on the same device.
    return alive - sum(row.stored for row in predicted.values() if device.type == "cpu" and "host" in row.placement)


def _waits(memory: Memory, forward: Callable[[], Tensor], device: torch.device) -> tuple[dict[str, float], int | None]:
    """Of a step: seconds waited by name, and the allocator's peak above what was there before."""
    memory.waits = Waits(device)
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with memory.step():
        forward().backward()
    waits, memory.waits = memory.waits.seconds(), None
    return waits, torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def _samples(memory: Memory, forward: Callable[[], Tensor]) -> tuple[Sequence[dict[str, int]], int]:
    """Bytes by name at each moment of a step, and the first of the backward pass."""
    samples: list[dict[str, int]] = []
    begins: list[int] = []

    def note(backward: bool) -> None:
        if backward and not begins:
            begins.append(len(samples))
        samples.append(memory.alive())

    memory.watch = note
    with memory.step():
        forward().backward()
        samples.append(memory.alive())
    memory.watch = None
    return samples, begins[0] if begins else len(samples)


__all__ = ["memory_report"]
