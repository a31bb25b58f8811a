"""A run of tokens as an affine map of the state, S -> M S + B, and the scan that is built from such maps.

The maps of neighbouring runs compose, (M2, B2) after (M1, B1) = (M2 M1, M2 B1 + B2), so a long document can be cut
into tiles, all tiles be turned into maps at once, the maps be folded in order, and all tiles be run at once from their
entry states. The tiles hold 1024 tokens counted from the document's start and the fold goes from left to right, so
the result does not depend on how a document was split, as long as it was split between tiles.

Legend: T tokens, N sequences, H heads, K key dim, V value dim, S state.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, repeat

import torch

from perilune.ops.kda.chunk import chunk
from perilune.ops.kda.table import check_checkpoints
from perilune.ops.sequences import Sequences

TILE = 1024


def segment_maps(
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    sequences: Sequences,
    gate_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """M_NHKK and B_NHKV of each sequence (a segment), in the inputs' dtype (fp32 or fp64), on activated inputs.

    B is the state that the segment leaves when it starts from zero; M is what it leaves of an identity when all v are
    zero. An empty segment is the identity. ||M|| <= 1 for beta in [0, 1] and normalised k. Differentiable.
    """
    H, K, V = k_THK.shape[1], k_THK.shape[2], v_THV.shape[2]
    wide_THV = torch.cat((v_THV, v_THV.new_zeros(*v_THV.shape[:2], K)), dim=-1)
    initial_HKV = torch.cat((k_THK.new_zeros(K, V), torch.eye(K, dtype=k_THK.dtype, device=k_THK.device)), dim=-1)
    initial_NHKV = initial_HKV.expand(sequences.count, H, K, V + K)
    _, wide_NHKV, _ = chunk(k_THK, k_THK, wide_THV, g_THK, beta_TH, initial_NHKV, sequences, gate_bound)
    return wide_NHKV[..., V:], wide_NHKV[..., :V]


def compose(
    later: tuple[torch.Tensor, torch.Tensor], earlier: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The map of `earlier` followed by `later`; any equal leading dims."""
    return later[0] @ earlier[0], fold([later], earlier[1])


def fold(maps: Iterable[tuple[torch.Tensor, torch.Tensor]], S0: torch.Tensor) -> torch.Tensor:
    """The state after the maps, applied to S0 one after the other (first map first)."""
    S = S0
    for M, B in maps:
        S = torch.baddbmm(B.flatten(0, -3), M.flatten(0, -3), S.flatten(0, -3)).view(B.shape)
    return S


def chunk_segmented(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    initial_NHKV: torch.Tensor | None,
    sequences: Sequences,
    gate_bound: float | None,
    checkpoints: tuple[tuple[int, ...], ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What `chunk` returns, by the segmented scan.

    States at tile boundaries are those of the fold. Level: bitwise over splits when every cut lies on a multiple of
    1024, else tolerance.
    """
    if checkpoints is not None:
        check_checkpoints(sequences, checkpoints)
    if initial_NHKV is None:
        initial_NHKV = q_THK.new_zeros(sequences.count, *q_THK.shape[1:], v_THV.shape[2])
    owner, starts, lengths = _tiles(sequences)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    tiles = Sequences(tuple(lengths), tuple(starts), sequences.device)
    whole = [i for i, end in enumerate(ends) if end % TILE == 0]
    maps = dict(zip(whole, _maps((k_THK, v_THV, g_THK, beta_TH), tiles, whole, gate_bound), strict=True))

    state: list[torch.Tensor] = list(initial_NHKV.unbind(0))
    entry, folded = [], {}
    for i, n in enumerate(owner):
        entry.append(state[n])
        if i in maps:
            state[n] = folded[n, ends[i]] = fold([maps[i]], state[n])
    inside: list[list[int]] = [[] for _ in owner]
    wanted = [(n, p) for n, positions in enumerate(checkpoints or ()) for p in positions]
    for n, p in wanted:
        if (n, p) not in folded:
            inside[next(i for i, m in enumerate(owner) if m == n and starts[i] < p <= ends[i])].append(p)
    entry_NHKV = torch.stack(entry) if entry else initial_NHKV[:0]
    o_THV, last, states = chunk(
        q_THK, k_THK, v_THV, g_THK, beta_TH, entry_NHKV, tiles, gate_bound, tuple(tuple(p) for p in inside)
    )
    for i, n in enumerate(owner):
        if i not in maps:
            state[n] = last[i]
    final_NHKV = torch.stack(state) if state else initial_NHKV.clone()
    if checkpoints is None or states is None:
        return o_THV, final_NHKV, None
    for (n, p), S in zip(((n, p) for n, ps in zip(owner, inside, strict=True) for p in ps), states, strict=True):
        folded[n, p] = S
    kept = [folded[n, p] for n, p in wanted]
    return o_THV, final_NHKV, torch.stack(kept) if kept else initial_NHKV[:0]


def _tiles(sequences: Sequences) -> tuple[list[int], list[int], list[int]]:
    """Sequence, start and length of each tile; the tiles of a sequence follow each other."""
    owner, starts, lengths = [], [], []
    for n, (start, length) in enumerate(zip(sequences.starts, sequences.lengths, strict=True)):
        cuts = [start, *range((start // TILE + 1) * TILE, start + length, TILE), start + length] if length else []
        owner += list(repeat(n, max(len(cuts) - 1, 0)))
        starts += cuts[:-1]
        lengths += [b - a for a, b in pairwise(cuts)]
    return owner, starts, lengths


def _maps(
    inputs: tuple[torch.Tensor, ...], tiles: Sequences, whole: list[int], gate_bound: float | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The maps of the tiles in `whole`; the others are never folded, so their tokens are left out."""
    if not whole:
        return []
    some = Sequences(tuple(tiles.lengths[i] for i in whole), tuple(tiles.starts[i] for i in whole), tiles.device)
    k, v, g, beta = (torch.cat([t[tiles.offsets[i] : tiles.offsets[i + 1]] for i in whole]) for t in inputs)
    M_NHKK, B_NHKV = segment_maps(k, v, g, beta, some, gate_bound)
    return list(zip(M_NHKK.unbind(0), B_NHKV.unbind(0), strict=True))


__all__ = ["TILE", "chunk_segmented", "compose", "fold", "segment_maps"]
