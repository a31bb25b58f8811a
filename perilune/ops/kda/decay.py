"""Decays inside a chunk: products of e^g over rows, formed so that nothing overflows and no row sees a later gate.

Two rows i > j of a chunk are coupled by e^(g_{j+1} + ... + g_i). A matrix product needs that number split into a row
factor and a column factor, and the split decides whether it overflows:
- a pair of neighbouring blocks of s rows (right, left): row factor = decay from the right block's start to i, column
  factor = decay from j to the left block's end. Both are <= 1 for any g <= 0 (the hierarchical anchor);
- inside a smallest block of d rows under a bounded gate: e^(P_i + c) and e^-(P_j + c), P the running sum in the block
  and c a constant that centres the range (the fixed-offset anchor). c does not depend on data, so causality is bitwise.
With a bound of -5, d = 16 rows and c = 40 nats keep both factors within e^+-40. 32 rows and 80 nats would also fit
fp32 in a forward pass, but a gradient of 1e-6 times e^-80 is subnormal: slow, and short of digits.
Without a bound d = 1, and all 64 rows are paired off in six levels.

Legend: B chunk-heads (chunks * heads), C rows of a chunk (64), K key dim, n pairs of a level, s rows of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

CHUNK = 64
ANCHORED_BLOCK = 16


def smallest_block(gate_bound: float | None) -> int:
    """d: rows of the blocks that are anchored by a constant; 1 without a bound."""
    return 1 if gate_bound is None else ANCHORED_BLOCK


@dataclass(frozen=True)
class Decays:
    """up: inside d-row blocks, e^(P + c) [B, C/d, d, K], and down = e^-(P + c); None when d = 1.

    levels: for s = d, 2d, ... 32: (right_BnsK, left_BnsK), the row and column factors of each pair of s-row blocks.
    start_BCK: decay from the chunk's start to each row, inclusive. rest_BCK: decay from each row to the chunk's end.
    """

    up: torch.Tensor | None
    down: torch.Tensor | None
    levels: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    start_BCK: torch.Tensor
    rest_BCK: torch.Tensor

    @property
    def whole_BK(self) -> torch.Tensor:
        """Decay over the whole chunk."""
        return self.start_BCK[:, -1]


@lru_cache(maxsize=32)
def ones_below(rows: int, diagonal: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, rows] with ones on and below `diagonal`: multiplying by it is a running sum."""
    return torch.ones(rows, rows, dtype=dtype, device=device).tril_(diagonal)


def running_sum(matrix_cc: torch.Tensor, x_Bcn: torch.Tensor) -> torch.Tensor:
    """Sum over rows by a 0/1 matrix, one product of fixed shape a block (a folded product would depend on B)."""
    return torch.bmm(matrix_cc.expand(x_Bcn.shape[0], -1, -1), x_Bcn)


def decays(g_BCK: torch.Tensor, gate_bound: float | None) -> Decays:
    """All decays of a batch of chunks from their gates (nats, <= 0)."""
    B, _, K = g_BCK.shape
    d = smallest_block(gate_bound)
    up = down = None
    if gate_bound is None:
        start = torch.exp(g_BCK)
        rest = torch.ones_like(g_BCK)
    else:
        blocks = g_BCK.reshape(B * CHUNK // d, d, K)
        lower = ones_below(d, 0, g_BCK.dtype, g_BCK.device)
        start = running_sum(lower, blocks).exp_().view(B, CHUNK, K)
        # e^P e^c, not e^(P + c): next to c = 40 a small P would lose its last digits.
        up = (start * math.exp(-gate_bound * d / 2)).view(B, CHUNK // d, d, K)
        down = up.reciprocal()
        rest = torch.exp(running_sum(ones_below(d, -1, g_BCK.dtype, g_BCK.device).mT, blocks)).view(B, CHUNK, K)
    levels = []
    s = d
    while s < CHUNK:
        start_pair, rest_pair = start.view(B, CHUNK // s // 2, 2, s, K), rest.view(B, CHUNK // s // 2, 2, s, K)
        right, left = start_pair[:, :, 1].clone(), rest_pair[:, :, 0].clone()
        levels.append((right, left))
        start_pair[:, :, 1] *= start_pair[:, :, 0, -1:]
        rest_pair[:, :, 0] *= right[:, :, -1:]
        s *= 2
    return Decays(up, down, tuple(levels), start, rest)
