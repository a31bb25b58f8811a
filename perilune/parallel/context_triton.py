"""KDA on a slice by the GPU kernels, with what K1 prepares made once a pass.

The map of a slice and its outputs need the same prepared chunks; between the two lies the exchange of states. So the
chunks stay in memory for that long (1 KB a token and head), which is worth it while they are few.
"""

from __future__ import annotations

from typing import Any

import torch

from perilune.config import Gate
from perilune.ops.kda import gradients_cuda
from perilune.ops.kda.prepare import Raw
from perilune.ops.kda.triton import inputs
from perilune.ops.kda.triton_backward import entry_states, gradients, gradients_name, reverse_scan
from perilune.ops.kda.triton_forward import Inputs, Prepared, maps, prepare, scan
from perilune.parallel.slices import Slice

# Token-heads whose prepared chunks are held at once: 4 GB.
MOST = 4 << 20


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
    M_NHKK, B_NHKV = maps(x, p, x.layout)
    return M_NHKK[list(cut.leaving)], B_NHKV[list(cut.leaving)]


def outputs(x: Inputs, p: Prepared, entry_NHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(o_THV, final_NHKV)."""
    out = scan(x, p, entry_NHKV.contiguous())
    assert out.o is not None
    return out.o, out.final


def entry_gradient(x: Inputs, p: Prepared, d_o_THV: torch.Tensor, d_final_NHKV: torch.Tensor) -> torch.Tensor:
    """Of the states before the fragments, from their own outputs and final states."""
    return reverse_scan(x, p, d_o_THV, d_final_NHKV.contiguous(), None, None)[0]


def all_gradients(
    x: Inputs, p: Prepared, entry_NHKV: torch.Tensor, d_o_THV: torch.Tensor, d_final_NHKV: torch.Tensor
) -> tuple[Any, ...]:
    """(of the entry states, of the seven raw inputs). `p` is used up."""
    S, U = entry_states(x, p, entry_NHKV.contiguous())
    d_entry, dS, dU = reverse_scan(x, p, d_o_THV, d_final_NHKV.contiguous(), None, None)
    if gradients_name(x) == "cuda":
        return d_entry, *gradients_cuda.gradients(x, p.A, p.norms, S, U, dS, dU, d_o_THV)
    return d_entry, *gradients(x, p, S, U, dS, dU, d_o_THV)


__all__ = ["MOST", "all_gradients", "entry_gradient", "leaving_maps", "outputs", "prepared"]
