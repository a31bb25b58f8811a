"""How a step of few tokens computes its feed-forward layers: there a launch takes longer than most of the work.

The rows of the experts are arranged by one kernel instead of five, and the shared MLP runs beside the router and the
experts, on a stream of its own, while graphs are recorded. (Launched kernel by kernel, the host is what takes time.)

Legend: T tokens, L width of the experts.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from perilune.config import Activation
from perilune.model.parts import Parts, in_turn, mixture
from perilune.ops import moe


class Beside:
    """`Parts.beside`: the call on a second stream inside `with recording()`, in turn elsewhere."""

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None
        self._recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a capture and its warm-ups, which so set up what libraries keep for each stream."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def __call__(self, call: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
        if not self._recording or device.type != "cuda":
            return in_turn(call, device)
        main = torch.cuda.current_stream(device)
        side = self._side = self._side or torch.cuda.Stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = call()

        def wait() -> torch.Tensor:
            main.wait_stream(side)
            return y

        return wait


def few_tokens(parts: Parts, beside: Beside) -> Parts:
    """The parts of a model that serves on one process; those of ranks stay as they are."""
    if parts.mixture is not mixture or parts.beside is not in_turn:
        return parts
    return dataclasses.replace(parts, mixture=mixture_of_few, beside=beside)


def mixture_of_few(
    z_TL: torch.Tensor,
    routing: moe.Routing,
    weights: moe.Dense | moe.Packed,
    activation: Activation,
    experts: Callable[..., torch.Tensor] = moe.experts,
) -> torch.Tensor:
    """`model.parts.mixture`, the same bits, without gradient; arranged by one kernel where it can be."""
    if not z_TL.is_cuda or z_TL.dtype != torch.bfloat16:
        return mixture(z_TL, routing, weights, activation, experts)
    few = importlib.import_module("perilune.ops.moe.triton_few")
    if not 0 < routing.ids_TJ.numel() <= few.MOST:
        return mixture(z_TL, routing, weights, activation, experts)
    rows = few.arrange(z_TL, routing)
    y_RL = experts(rows.rows_RL, weights, rows.offs_E, activation, row_weights_R=rows.weights_R, clean=False)
    y_TL: torch.Tensor = few.gather_sum(y_RL, rows.row_TJ, None)
    return y_TL


__all__ = ["Beside", "few_tokens", "mixture_of_few"]
