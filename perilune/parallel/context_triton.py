"""KDA on a slice by the GPU kernels, with what K1 prepares made once a pass.

The map of a slice and its outputs need the same prepared chunks; between the two lies the exchange of states. So the
chunks stay in memory for that long (1 KB a token and head), which is worth it while they are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from perilune.config import Gate
from perilune.ops.kda import gradients_cuda
from perilune.ops.kda.prepare import Raw
from perilune.ops.kda.triton import inputs
from perilune.ops.kda.triton_backward import entry_states, gradients, gradients_name, initial_gradient, reverse_scan
from perilune.ops.kda.triton_forward import Inputs, Prepared, Scanned, maps, outputs, prepare, scan
from perilune.ops.kda.triton_layout import Layout
from perilune.parallel.slices import Slice

# Token-heads whose prepared chunks are held at once: 17 GB, as the backward pass holds them anyway.
MOST = 16 << 20


def prepared(raw: tuple[torch.Tensor, ...], gate: Gate, cut: Slice) -> tuple[Inputs, Prepared] | None:
    """Inputs and prepared chunks of a slice, or None where holding them does not pay: too many, or most of the slice
    is in documents that stay in it."""
    tokens, heads = raw[0].shape[:2]
    moving = sum(cut.lengths[i] for i in {*cut.entering, *cut.leaving})
    if not 0 < tokens * heads <= MOST or 2 * moving < tokens:
        return None
    x = inputs(Raw(*raw), gate, cut)
    return x, prepare(x)


def leaving_maps(x: Inputs, p: Prepared, cut: Slice) -> tuple[torch.Tensor, torch.Tensor]:
    """M and B of the fragments that hand a state on, in their order."""
    found = [maps(x, p, _some(x.layout, run)) for run in runs(cut.leaving)]
    M, B = zip(*found, strict=True)
    return torch.cat(M), torch.cat(B)


def room(x: Inputs, cut: Slice) -> Scanned:
    """Memory for the outputs and final states of all fragments."""
    return outputs(x, cut.count, x.v.shape[2], True, None, False)


def run_into(out: Scanned, x: Inputs, p: Prepared, fragments: Sequence[int], before: torch.Tensor | None) -> None:
    """Run some fragments. before: the states of all fragments before their first tokens, or None for zeros."""
    for run in runs(fragments):
        initial = None if before is None else before[run].contiguous()
        scan(x, p, initial, lay=_some(x.layout, run), out=replace(out, final=out.final[run]))


def entry_gradients(
    x: Inputs, p: Prepared, cut: Slice, d_o_THV: torch.Tensor, d_final_NHKV: torch.Tensor
) -> torch.Tensor:
    """Of the states before the fragments that continue a document, from their own outputs and final states."""
    found = [initial_gradient(x, p, d_o_THV, d_final_NHKV[run], _some(x.layout, run)) for run in runs(cut.entering)]
    return torch.cat(found)


def runs(fragments: Sequence[int]) -> list[slice]:
    """Neighbours together."""
    found: list[slice] = []
    for i in fragments:
        if found and found[-1].stop == i:
            found[-1] = slice(found[-1].start, i + 1)
        else:
            found.append(slice(i, i + 1))
    return found


def _some(lay: Layout, run: slice) -> Layout:
    """The chunks of some neighbours, where they are; `table` stays that of all."""
    ends = slice(run.start, run.stop + 1)
    return replace(
        lay,
        lengths=lay.lengths[run],
        starts=lay.starts[run],
        cu=lay.cu[ends],
        first_chunk=lay.first_chunk[ends],
        shift=lay.shift[run],
    )


def chunk_states(x: Inputs, p: Prepared, entry_NHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gradients need of the forward pass again: each chunk's entry state and U."""
    return entry_states(x, p, entry_NHKV.contiguous())


def all_gradients(
    x: Inputs,
    p: Prepared,
    states: tuple[torch.Tensor, torch.Tensor],
    d_o_THV: torch.Tensor,
    d_final_NHKV: torch.Tensor,
) -> tuple[Any, ...]:
    """(of the entry states, of the seven raw inputs). `p` is used up."""
    S, U = states
    d_entry, dS, dU = reverse_scan(x, p, d_o_THV, d_final_NHKV.contiguous(), None, None)
    if gradients_name(x) == "cuda":
        return d_entry, *gradients_cuda.gradients(x, p.A, p.norms, S, U, dS, dU, d_o_THV)
    return d_entry, *gradients(x, p, S, U, dS, dU, d_o_THV)


__all__ = [
    "MOST",
    "all_gradients",
    "chunk_states",
    "entry_gradients",
    "leaving_maps",
    "prepared",
    "room",
    "run_into",
    "runs",
]
