"""Context parallelism: one stream of packed documents over several ranks, each with a slice of its tokens.

KDA exchanges states (`kcp`). The convolution gets its last three inputs from the ranks before, MLA the latent rows of
all tokens. Everything else is token by token.

`context_parts` gives a model the three; each reads the cut from the `Slice` that it is called with. In one process that
holds all spans nothing is communicated (segments).
Legend: T tokens here, N fragments here, C convolution channels, S key rows, L latent row width.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from perilune.errors import Error
from perilune.model.parts import Parts
from perilune.ops import kda as kda_ops
from perilune.ops.conv import WIDTH, short_conv
from perilune.ops.sequences import Sequences
from perilune.parallel.beside import Beside
from perilune.parallel.collectives import gather_rows, ranks_of, scatter_rows
from perilune.parallel.kcp import kcp
from perilune.parallel.slices import as_slice


def context_conv(
    u_TC: torch.Tensor,
    w_CW: torch.Tensor,
    sequences: Sequences,
    window_N3C: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.conv.short_conv` on a slice: a fragment that continues a document starts from that document's last inputs,
    which may lie on several ranks. `window_N3C` is not supported here and must be None."""
    cut = as_slice(sequences, group)
    if window_N3C is not None:
        raise Error("context_conv: window_N3C is given; a slice takes its windows from the ranks before")
    u_TC, window = _Halo.apply(u_TC, *cut.halo_rows, group)  # type: ignore[no-untyped-call]
    return short_conv(u_TC, w_CW, cut, window)


class _Halo(torch.autograd.Function):
    """u -> (u, the inputs before each fragment [N, 3, C]). tail, window: `Slice.halo_rows`."""

    @staticmethod
    def forward(
        ctx: Any, u_TC: torch.Tensor, tail: torch.Tensor, window: torch.Tensor, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(tail, window)
        window_NC = _rows(gather_rows(_rows(u_TC, tail), group), window)
        return u_TC.view_as(u_TC), window_NC.unflatten(0, (-1, WIDTH - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_u_TC: torch.Tensor, d_window_N3C: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tail, window = ctx.saved_tensors
        d_sent = d_u_TC.new_zeros(len(tail) * ranks_of(ctx.group), d_u_TC.shape[1])
        d_tails = scatter_rows(_add_rows(d_sent, d_window_N3C.flatten(0, 1), window), ctx.group)
        # In place: u goes to the convolution alone, whose gradient this tensor is, and it may be gigabytes.
        return _add_rows(d_u_TC, d_tails, tail), None, None, None


def _rows(x_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    """Some rows, zeros for -1."""
    if not x_TC.shape[0]:
        x_TC = x_TC.new_zeros(1, x_TC.shape[1])
    return torch.where(rows_R[:, None] >= 0, x_TC[rows_R.clamp(min=0)], 0)


def _add_rows(x_TC: torch.Tensor, rows_RC: torch.Tensor, at_R: torch.Tensor) -> torch.Tensor:
    """Add rows in place, in a fixed order; those for -1 are left out."""
    if x_TC.shape[0]:
        rows_RC = torch.where(at_R[:, None] >= 0, rows_RC, 0)
        x_TC.index_put_((at_R.clamp(min=0),), rows_RC.to(x_TC.dtype), accumulate=True)
    return x_TC


def context_latents(
    rows_TL: torch.Tensor, sequences: Sequences, *, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, Sequences]:
    """MLA's latent rows of this slice -> (rows_SL, keys): for each fragment those of its document up to its end."""
    cut = as_slice(sequences, group)
    if group is not None:
        short = cut.spans.most_rows - rows_TL.shape[0]
        rows_TL = gather_rows(torch.nn.functional.pad(rows_TL, (0, 0, 0, short)), group)
    rows_S, keys = cut.keys
    return rows_TL[rows_S], keys


def context_parts(parts: Parts, group: dist.ProcessGroup | None, scan: kda_ops.Scan = "serial") -> Parts:
    """`parts` for slices of a stream that is spread over the ranks of `group` (None: all spans are here).

    scan: see `kcp`.
    """
    return dataclasses.replace(
        parts,
        beside=parts.beside if group is None else Beside(),
        kda=partial(kcp, group=group, scan=scan),
        conv=partial(context_conv, group=group),
        latents=partial(context_latents, group=group),
    )


__all__ = ["context_conv", "context_latents", "context_parts", "kcp"]
