"""Replay of accepted drafts through all KDA layers in one launch (the in-place form of speculative decoding).

A verification runs layer by layer, as each layer needs the one below. What it leaves to do once the number of accepted
drafts is known, advancing every layer's matrix and window, has no order among layers: the projected inputs of all
layers are kept, and one launch does it. The tail form has no such pass: accepting is adding to a length.

Legend as in decode_call.py; L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perilune.errors import Error
from perilune.ops.kda import decode
from perilune.ops.kda.decode_call import Call, Projected, Weights


class Replay:
    """The replay of `drafts` drafts over fixed tensors, to be run again and again (also inside a CUDA graph).

    layers: for each layer its inputs of `verify` (recorded there; later ones are copied into the same tensors), its
        weights, matrix and window. Heads, dtypes and gate are the same in all layers.
    slots_N, accepted_N: int32 [N], read when it runs. Raises Error for tensors that do not fit.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Projected, Weights, torch.Tensor, torch.Tensor]],
        slots_N: torch.Tensor,
        accepted_N: torch.Tensor,
        drafts: int,
    ) -> None:
        if not layers:
            raise Error("Replay: layers is empty; at least one layer")
        self._calls = [Call(*layer, slots_N, drafts, counts_N=accepted_N) for layer in layers]
        for call in self._calls:
            call.check()
        self._table = None
        first = self._calls[0]
        if first.on_gpu:
            from perilune.ops.kda import decode_cuda

            if not any(decode_cuda.why_not(call) for call in self._calls):
                self._table = decode_cuda.table(self._calls)

    @property
    def one_launch(self) -> bool:
        """Whether one launch (CUDA, Hopper) runs all layers; otherwise each is a `replay_inplace` of its own."""
        return self._table is not None

    def run_inplace(self) -> None:
        """Advance the slots of every layer by accepted_N[n] tokens; bit for bit the state of as many decode steps."""
        if self._table is not None:
            from perilune.ops.kda import decode_cuda

            decode_cuda.step_layers(self._calls[0], self._table, len(self._calls))
            return
        for call in self._calls:
            decode.run(call)


__all__ = ["Replay"]
