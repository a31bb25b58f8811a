"""KDA over several ranks, each with a slice of the tokens of one stream of packed documents.

A span of tokens acts on the state as S -> M S + B. Each rank makes the map of what it hands on, the maps are exchanged
(`fragments`: a fixed number of bytes, whatever the length) and folded to the state that enters its slice; the backward
pass does the same with the gradient of the state, from the other end. In one process that holds all spans nothing is
communicated and the same algebra runs (segments).
Source: Kimi K3 report, section 5 (KCP). Legend: T tokens here, N fragments here, H heads, K key dim, V value dim,
L spans here, P spans of all ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from perilune.config import Gate
from perilune.ops import kda as kda_ops
from perilune.ops.kda import fold
from perilune.ops.kda.prepare import Raw, compute_dtype
from perilune.ops.kda.segments import TILE
from perilune.ops.sequences import Sequences
from perilune.parallel.beside import Beside
from perilune.parallel.fragments import Way, fold_backward, fold_forward, hop_backward, hop_forward
from perilune.parallel.slices import Slice, as_slice, indices

Tensors = tuple[torch.Tensor, ...]
# Called with the seven raw inputs as one tuple, which their types cannot say.
_kda: Callable[..., Any] = kda_ops.kda
_kda_maps: Callable[..., Any] = kda_ops.kda_maps
# Exchanges run on a stream of their own.
_beside = Beside()


def kcp(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_raw_THK: torch.Tensor,
    beta_logit_TH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    gate: Gate,
    initial_state_NHKV: torch.Tensor | None,
    sequences: Sequences,
    *,
    group: dist.ProcessGroup | None = None,
    way: Way | None = None,
    scan: kda_ops.Scan = "serial",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.kda.kda` on this rank's slice of the stream: (o_THV, final_NHKV), as if all tokens were in one call.

    sequences: a `Slice`. initial_state: of the documents that begin here; rows of fragments that continue one are not
    read and get no gradient. final: the state after each fragment, for the last one of a document its final state.
    Every rank of the group must call the forward and the backward pass, also with no tokens. Level: tolerance against
    one call (fp64: 1e-14 in o, 1e-13 in gradients); both `way`s are the same bits. With scan "segmented" states are
    folded over tiles and go from rank to rank: o and final are those of `kda(scan="segmented")`, bit for bit on CPU,
    where all cuts lie on tiles (`slices.even_cuts`). Raises Error as `kda` does, and when the slice is not one of the
    group's size.
    """
    cut = as_slice(sequences, group)
    raw = (q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, A_log_H, dt_bias_HK)
    result: tuple[torch.Tensor, torch.Tensor]
    result = _Kcp.apply((gate, cut, group, way, scan), initial_state_NHKV, *raw)  # type: ignore[no-untyped-call]
    return result


class _Kcp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, initial_NHKV: torch.Tensor | None, *raw: torch.Tensor) -> Tensors:
        gate, cut, group, way, scan = run
        ctx.run, ctx.initial, ctx.graph = run, initial_NHKV is not None, None
        held = _prepared(raw, gate, cut, scan)
        if held is not None:
            M, entry_NHKV, *results = _run_beside(held, raw, run, initial_NHKV)
            ctx.save_for_backward(M, entry_NHKV, *raw)
            return tuple(results)
        if scan == "segmented":
            tiles, M = _tile_maps(raw, gate, cut, initial_NHKV)
            entry_LHKV = hop_forward(tiles, M.new_zeros(*M.shape[1:3], raw[2].shape[2]), cut, group)
        else:
            folded = fold_forward(*_leaving_maps(raw, gate, cut, initial_NHKV, None), cut, group, way)
            M, entry_LHKV = folded.M_PHKK, folded.entry_LHKV
        entry_NHKV = _enter(initial_NHKV, entry_LHKV, cut)
        ctx.save_for_backward(M, entry_NHKV, *raw)
        # A graph of its own, so that the backward pass does not compute the outputs again.
        inputs = [x.detach().requires_grad_() for x in (entry_NHKV, *raw)]
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            outputs = _kda(*inputs[1:], gate, inputs[0], cut, scan=scan)
        ctx.graph = (inputs, outputs)
        o_THV, final_NHKV = outputs
        return o_THV.detach(), final_NHKV.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o_THV: torch.Tensor, d_final_NHKV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, cut, group, way, scan = ctx.run
        M, entry_NHKV, *raw = ctx.saved_tensors
        held = kernels().prepared(tuple(raw), gate, cut) if ctx.graph is None else None
        d_LHKV = _entry_gradients(raw, gate, cut, d_o_THV, d_final_NHKV, held)
        if held is not None:
            # The states of the forward pass are computed again while gradients go round.
            join = _beside(lambda: fold_backward(d_LHKV, M, cut, group, way), d_o_THV.device)
            states = kernels().chunk_states(*held, entry_NHKV)
            leaving_LHKV = join()
        elif scan == "segmented":
            leaving_LHKV = hop_backward(d_LHKV, M, cut, group)
        else:
            leaving_LHKV = fold_backward(d_LHKV, M, cut, group, way)
        device = d_o_THV.device
        left = leaving_LHKV[indices(cut.spans_of(cut.leaving), device)]
        d_final_NHKV = d_final_NHKV.index_add(0, indices(cut.leaving, device), left)
        if held is not None:
            d_entry_NHKV, *d_raw = kernels().all_gradients(*held, states, d_o_THV, d_final_NHKV)
            d_raw = [d.to(x.dtype) for d, x in zip(d_raw, raw, strict=True)]
        else:
            inputs, outputs = ctx.graph
            ctx.graph = None
            d_entry_NHKV, *d_raw = torch.autograd.grad(outputs, inputs, (d_o_THV, d_final_NHKV))
        d_initial = d_entry_NHKV.index_fill(0, indices(cut.entering, device), 0) if ctx.initial else None
        return None, d_initial, *d_raw


def _run_beside(held: Any, raw: Tensors, run: Any, initial_NHKV: torch.Tensor | None) -> Tensors:
    """(M_PHKK, entry_NHKV, o_THV, final_NHKV) by the kernels: fragments that begin a document run while the states of
    those that continue one are exchanged."""
    gate, cut, group, way, _ = run
    maps = _leaving_maps(raw, gate, cut, initial_NHKV, held)
    out = kernels().room(held[0], cut)

    def enter() -> Tensors:
        folded = fold_forward(*maps, cut, group, way)
        entry_NHKV = _enter(initial_NHKV, folded.entry_LHKV, cut)
        kernels().run_into(out, *held, cut.entering, entry_NHKV)
        return folded.M_PHKK, entry_NHKV

    join = _beside(enter, raw[0].device)
    begin = [i for i, fragment in enumerate(cut.fragments) if not fragment.continues]
    kernels().run_into(out, *held, begin, initial_NHKV)
    return *join(), out.o, out.final


def kernels() -> ModuleType:
    """Imported late: Triton is an optional dependency."""
    return importlib.import_module("perilune.parallel.context_triton")


def _prepared(raw: Tensors, gate: Gate, cut: Slice, scan: kda_ops.Scan) -> Any:
    """What the kernels prepare for a whole slice, where they run and it pays; else None."""
    if scan != "serial" or kda_ops.implementation(raw[0], raw[2]) != "triton":
        return None
    return kernels().prepared(raw, gate, cut)


def _leaving_maps(
    raw: Tensors, gate: Gate, cut: Slice, initial_NHKV: torch.Tensor | None, held: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """M_LHKK and B_LHKV of what the spans here hand on; zeros for those that hand on nothing."""
    (_, H, K), V = raw[1].shape, raw[2].shape[2]
    wide = compute_dtype(*raw[:4])
    M_LHKK, B_LHKV = (raw[0].new_zeros(len(cut.mine), H, K, n, dtype=wide) for n in (K, V))
    if cut.leaving:
        spans = cut.spans_of(cut.leaving)
        if held is not None:
            found = kernels().leaving_maps(*held, cut)
        else:
            some, tokens = _part(raw[:5], cut, cut.leaving)
            found = _kda_maps(*tokens, *raw[5:], gate, some)
        for maps, value in zip((M_LHKK, B_LHKV), found, strict=True):
            maps.index_copy_(0, indices(spans, maps.device), value)
        for i, span in zip(cut.leaving, spans, strict=True):
            if initial_NHKV is not None and not cut.fragments[i].continues:
                B_LHKV[span] += M_LHKK[span] @ initial_NHKV[i]
    return M_LHKK, B_LHKV


def _tile_maps(
    raw: Tensors, gate: Gate, cut: Slice, initial_NHKV: torch.Tensor | None
) -> tuple[list[list[tuple[torch.Tensor, torch.Tensor]]], torch.Tensor]:
    """(the tiles' maps of what each span here hands on, the transition M_LHKK of all of them together)."""
    (_, H, K), tiles = raw[1].shape, [[] for _ in cut.mine]  # type: ignore[var-annotated]
    M_LHKK = raw[0].new_zeros(len(cut.mine), H, K, K, dtype=compute_dtype(*raw[:4]))
    for i, span in zip(cut.leaving, cut.spans_of(cut.leaving), strict=True):
        some, tokens = _part(raw[:5], cut, (i,))
        start, end = some.starts[0], some.starts[0] + some.lengths[0]
        cuts = [start, *range((start // TILE + 1) * TILE, end, TILE), end]
        lengths = [b - a for a, b in pairwise(cuts)]
        M, B = _kda_maps(*tokens, *raw[5:], gate, Sequences(tuple(lengths), tuple(cuts[:-1]), some.device))
        if initial_NHKV is not None and not cut.fragments[i].continues:
            B[0] = fold([(M[0], B[0])], initial_NHKV[i])
        tiles[span] = list(zip(M, B, strict=True))
        M_LHKK[span] = torch.eye(K, dtype=M.dtype, device=M.device)
        for later in M:
            M_LHKK[span] = later @ M_LHKK[span]
    return tiles, M_LHKK


def _enter(initial_NHKV: torch.Tensor | None, entry_LHKV: torch.Tensor, cut: Slice) -> torch.Tensor:
    """Every fragment's state before its first token."""
    if initial_NHKV is None:
        initial_NHKV = entry_LHKV.new_zeros(cut.count, *entry_LHKV.shape[1:])
    device = entry_LHKV.device
    came = entry_LHKV[indices(cut.spans_of(cut.entering), device)]
    return initial_NHKV.index_copy(0, indices(cut.entering, device), came)


def _entry_gradients(
    raw: Sequence[torch.Tensor],
    gate: Gate,
    cut: Slice,
    d_o_THV: torch.Tensor,
    d_final_NHKV: torch.Tensor,
    held: Any,
) -> torch.Tensor:
    """d_LHKV: what this process's outputs give to the state that enters each of its spans; zeros where none does."""
    d_LHKV = d_final_NHKV.new_zeros(len(cut.mine), *d_final_NHKV.shape[1:])
    if not cut.entering:
        return d_LHKV
    if held is not None:
        found = kernels().entry_gradients(*held, cut, d_o_THV, d_final_NHKV.contiguous())
    else:
        some, (*tokens, d_o) = _part((*raw[:5], d_o_THV), cut, cut.entering)
        d_final = d_final_NHKV[indices(cut.entering, d_o.device)]
        found = _state_gradient((*tokens, *raw[5:]), gate, some, d_o, d_final)
    return d_LHKV.index_copy_(0, indices(cut.spans_of(cut.entering), d_LHKV.device), found)


def _state_gradient(
    raw: Tensors, gate: Gate, sequences: Sequences, d_o_THV: torch.Tensor, d_final_NHKV: torch.Tensor
) -> torch.Tensor:
    """The gradient of the initial states of `kda`; it does not depend on them."""
    if kda_ops.implementation(raw[0], raw[2]) == "triton":
        from perilune.ops.kda.triton import inputs
        from perilune.ops.kda.triton_backward import initial_gradient
        from perilune.ops.kda.triton_forward import prepare

        x = inputs(Raw(*raw), gate, sequences)
        return initial_gradient(x, prepare(x), d_o_THV, d_final_NHKV, x.layout)
    initial_NHKV = torch.zeros_like(d_final_NHKV).requires_grad_()
    with torch.enable_grad():
        outputs = _kda(*(x.detach() for x in raw), gate, initial_NHKV, sequences)
    return torch.autograd.grad(outputs, initial_NHKV, (d_o_THV, d_final_NHKV))[0]


def _part(tensors: Sequence[torch.Tensor], cut: Slice, fragments: Sequence[int]) -> tuple[Sequences, Tensors]:
    """The tokens of some fragments as a packed stream of their own."""
    some = Sequences(tuple(cut.lengths[i] for i in fragments), tuple(cut.starts[i] for i in fragments), cut.device)
    if some.total == cut.total:
        return some, tuple(tensors)
    runs = [slice(cut.offsets[i], cut.offsets[i + 1]) for i in fragments]
    if len(runs) == 1:
        return some, tuple(x[runs[0]] for x in tensors)
    return some, tuple(torch.cat([x[run] for run in runs]) for x in tensors)


__all__ = ["kcp"]
