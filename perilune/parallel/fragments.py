"""The states between the spans of a cut stream: maps S -> M S + B exchanged and folded, and their gradients.

E_s is the state that enters span s, D_s the gradient of it:
    E_(s+1) = B_s (a document that began in s) or M_s E_s + B_s (one that passed through s)
    D_s     = d_s (the document ends in s)     or M_s^T D_(s+1) + d_s
with d_s the gradient that the span's own outputs give. A first fragment never multiplies what lies before it, so a NaN
of one document stays in it. The M of the backward pass is that of the forward pass, kept where it was folded.

Two ways to bring them together, with equal results bit for bit:
    gather:  all maps on all ranks, every rank folds for itself (one step);
    heads:   rank r gets the maps of its share of the heads from all, folds, and sends the states back (two steps).
With tiles the states go from span to span instead, folded over the maps of 1024-token tiles one after the other as the
segmented scan does: where every cut lies on a tile the result is the same bits for any number of ranks.
Legend: P spans of all ranks, L spans of this process, H heads, K key dim, V value dim, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from perilune.ops.kda import fold
from perilune.parallel.collectives import all_gather, ranks_of
from perilune.parallel.slices import Slice, Spans, indices

Way = Literal["gather", "heads"]


@dataclass(frozen=True)
class Folded:
    """entry_LHKV: E of this process's spans. M_PHKK: the transitions that this rank folded, for its heads."""

    entry_LHKV: torch.Tensor
    M_PHKK: torch.Tensor


def choose_way(ranks: int, heads: int) -> Way:
    """The fewest steps for two ranks, the fewest bytes for more."""
    return "gather" if ranks <= 2 or heads < ranks else "heads"


def fold_forward(
    M_LHKK: torch.Tensor, B_LHKV: torch.Tensor, cut: Slice, group: dist.ProcessGroup | None, way: Way | None = None
) -> Folded:
    """Maps of this process's spans -> the states that enter them. fp32 or fp64; every rank must call it."""
    K, H = M_LHKK.shape[-1], M_LHKK.shape[1]
    way = choose_way(cut.spans.ranks, H) if way is None else way
    map_PHKX = _collect(torch.cat((M_LHKK, B_LHKV), -1), cut, group, way)
    M_PHKK, B_PHKV = map_PHKX.split((K, B_LHKV.shape[-1]), -1)
    entry = torch.zeros_like(B_PHKV)
    for s, link in enumerate(cut.spans.links[:-1]):
        if link == "start":
            entry[s + 1] = B_PHKV[s]
        elif link == "middle":
            entry[s + 1] = torch.baddbmm(B_PHKV[s], M_PHKK[s], entry[s])
    return Folded(_give_back(entry, cut, group, way, H), M_PHKK)


def fold_backward(
    d_LHKV: torch.Tensor, M_PHKK: torch.Tensor, cut: Slice, group: dist.ProcessGroup | None, way: Way | None = None
) -> torch.Tensor:
    """d of this process's spans -> the gradient of the state that leaves each of them, [L, H, K, V].

    M_PHKK: as `fold_forward` kept it.
    """
    H = d_LHKV.shape[1]
    way = choose_way(cut.spans.ranks, H) if way is None else way
    total = _collect(d_LHKV, cut, group, way)
    leaving = torch.zeros_like(total)
    for s in reversed(range(cut.spans.count - 1)):
        if cut.spans.links[s] == "none":
            continue
        leaving[s] = total[s + 1]
        if cut.spans.links[s] == "middle":
            total[s] = torch.baddbmm(total[s], M_PHKK[s].mT, leaving[s])
    return _give_back(leaving, cut, group, way, H)


def hop_forward(
    tiles: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    like_HKV: torch.Tensor,
    cut: Slice,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """The states that enter this process's spans, [L, H, K, V], handed from span to span.

    tiles: of each of its spans that hands a state on, the maps of its last fragment's tiles in order, the first one
    with the document's initial state in its B where the document begins there (its M is not read).
    """
    entry = {0: torch.zeros_like(like_HKV)} if 0 in cut.mine else {}
    for s, link in enumerate(cut.spans.links[:-1]):
        state = None
        if s in cut.mine:
            maps = list(tiles[cut.mine.index(s)])
            if link == "start":
                state = fold(maps[1:], maps[0][1])
            else:
                state = fold(maps, entry[s]) if link == "middle" else torch.zeros_like(like_HKV)
        state = _pass_on(state, like_HKV, s, s + 1, cut, group)
        if state is not None:
            entry[s + 1] = state
    return torch.stack([entry[s] for s in cut.mine])


def hop_backward(
    d_LHKV: torch.Tensor, M_LHKK: torch.Tensor, cut: Slice, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """`fold_backward` from span to span; M of this process's spans."""
    total = {s: d_LHKV[i] for i, s in enumerate(cut.mine)}
    leaving = {s: torch.zeros_like(d_LHKV[i]) for i, s in enumerate(cut.mine)}
    for s in reversed(range(cut.spans.count - 1)):
        came = _pass_on(total.get(s + 1), d_LHKV[0], s + 1, s, cut, group)
        if came is not None and cut.spans.links[s] != "none":
            leaving[s] = came
            if cut.spans.links[s] == "middle":
                total[s] = torch.baddbmm(total[s], M_LHKK[cut.mine.index(s)].mT, came)
    return torch.stack([leaving[s] for s in cut.mine])


def _pass_on(
    state: torch.Tensor | None, like: torch.Tensor, here: int, there: int, cut: Slice, group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """The state on the rank of span `there`, from the rank of span `here`; None on the others."""
    owner, taker = cut.spans.owner(here), cut.spans.owner(there)
    if group is None or owner == taker:
        return state if there in cut.mine else None
    if owner == dist.get_rank(group):
        assert state is not None
        dist.send(state.contiguous(), group=group, group_dst=taker)
    elif taker == dist.get_rank(group):
        got = torch.empty_like(like)
        dist.recv(got, group=group, group_src=owner)
        return got
    return None


def exchange_bytes(
    spans: Spans, heads: int, key_dim: int, value_dim: int, size: int = 4, way: Way | None = None
) -> dict[str, int]:
    """Bytes that one rank receives from others for one layer, forward and backward; no length of anything in it.

    With `heads` a rank of the most heads receives them; it holds ceil(H / R).
    """
    ranks, mine = spans.ranks, spans.count // spans.ranks
    others = (ranks - 1) * mine
    whole, state = key_dim * (key_dim + value_dim) * size, key_dim * value_dim * size
    if (choose_way(ranks, heads) if way is None else way) == "gather":
        return {"forward": others * heads * whole, "backward": others * heads * state}
    share = -(-heads // ranks)
    return {
        "forward": others * share * whole + mine * (heads - share) * state,
        "backward": others * share * state + mine * (heads - share) * state,
    }


def _collect(x_LHKX: torch.Tensor, cut: Slice, group: dist.ProcessGroup | None, way: Way) -> torch.Tensor:
    """[P, H or this rank's share of H, K, X], spans in the order of the stream."""
    if group is None:
        return x_LHKX.clone()
    R, L = ranks_of(group), x_LHKX.shape[0]
    if way == "gather":
        got = x_LHKX.new_empty(R * L, *x_LHKX.shape[1:])
        all_gather(got, x_LHKX.contiguous(), group=group)
    else:
        # Heads first, so that a rank's share is one run of rows.
        sizes = _shares(x_LHKX.shape[1], R)
        mine = sizes[dist.get_rank(group)]
        rows = x_LHKX.transpose(0, 1).contiguous()
        out = rows.new_empty(R * mine, *rows.shape[1:])
        dist.all_to_all_single(out, rows, [mine] * R, sizes, group=group)
        got = out.view(R, mine, *rows.shape[1:]).transpose(1, 2).flatten(0, 1)
    order = tuple(rank * L + cut.spans.of(rank).index(s) for s, rank in _owners(cut.spans))
    return got[indices(order, got.device)]


def _give_back(x_PHKV: torch.Tensor, cut: Slice, group: dist.ProcessGroup | None, way: Way, heads: int) -> torch.Tensor:
    """[L, H, K, V] of this process's spans, from [P, ...] as `_collect` laid it out."""
    if group is None or way == "gather":
        return x_PHKV[indices(cut.mine, x_PHKV.device)]
    R, L = ranks_of(group), len(cut.mine)
    sizes = _shares(heads, R)
    mine = x_PHKV.shape[1]
    order = tuple(span for rank in range(R) for span in cut.spans.of(rank))
    # To each rank its spans, heads first.
    rows = x_PHKV[indices(order, x_PHKV.device)].unflatten(0, (R, L)).transpose(1, 2).flatten(0, 1).contiguous()
    out = rows.new_empty(heads, *rows.shape[1:])
    dist.all_to_all_single(out, rows, sizes, [mine] * R, group=group)
    mine_LHKV: torch.Tensor = out.transpose(0, 1)
    return mine_LHKV


def _owners(spans: Spans) -> list[tuple[int, int]]:
    """(span, the rank that has it) in the order of the stream."""
    return [(span, spans.owner(span)) for span in range(spans.count)]


def _shares(heads: int, ranks: int) -> list[int]:
    return [heads // ranks + (i < heads % ranks) for i in range(ranks)]


__all__ = [
    "Folded",
    "Way",
    "choose_way",
    "exchange_bytes",
    "fold_backward",
    "fold_forward",
    "hop_backward",
    "hop_forward",
]
