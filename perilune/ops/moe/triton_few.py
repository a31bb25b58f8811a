"""The way to expert rows for few tokens: everything that the experts need, in one launch.

`permute`, the routing weights in its order, `spread` and the inverse permutation are a launch each; for a handful of
tokens a launch takes longer than its work. Here every choice counts the choices that come before it, so none waits for
another.

Legend: T tokens, J choices a token, R = T J rows sorted by expert, E experts, L width.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from perilune.ops.moe.reference import Routing
from perilune.ops.moe.triton_routing import gather_sum

MOST = 2048  # choices; each one reads all
_PIECE = 1024  # numbers of a row that are copied at a time


@dataclass(frozen=True)
class Arranged:
    """rows_RL: each row's token. weights_R: its routing weight. offs_E: int32 ends of the experts' rows.
    row_TJ: int32, the row of each choice."""

    rows_RL: torch.Tensor
    weights_R: torch.Tensor
    offs_E: torch.Tensor
    row_TJ: torch.Tensor


def arrange(x_TL: torch.Tensor, routing: Routing) -> Arranged:
    """Rows grouped by expert, within an expert in the order of tokens: bit for bit those of `permute` and `spread`.

    At least one and at most `MOST` choices; no gradient.
    """
    (T, J), E, L = routing.ids_TJ.shape, routing.scores_TE.shape[1], x_TL.shape[1]
    weights_TJ = routing.weights_TJ
    found = Arranged(
        x_TL.new_empty(T * J, L),
        weights_TJ.new_empty(T * J),
        x_TL.new_empty(E, dtype=torch.int32),
        x_TL.new_empty(T, J, dtype=torch.int32),
    )
    arrange_kernel[(T * J,)](
        x_TL.contiguous(), routing.ids_TJ.contiguous(), weights_TJ.contiguous(),
        found.rows_RL, found.weights_R, found.row_TJ, found.offs_E, T * J, E,
        L=L, J=J, BR=max(16, triton.next_power_of_2(T * J)), BE=triton.next_power_of_2(E), BL=_PIECE, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def arrange_kernel(
    x, ids, weights, rows, row_weights, row_of_choice, offs, R, E,
    L: tl.constexpr, J: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0)
    r = tl.arange(0, BR)
    expert = tl.load(ids + choice)
    experts = tl.load(ids + r, mask=r < R, other=E)
    before = (experts < expert) | ((experts == expert) & (r < choice))
    row = tl.sum(before.to(tl.int32), 0)
    tl.store(row_of_choice + choice, row)
    tl.store(row_weights + row, tl.load(weights + choice))
    source = x + (choice // J).to(tl.int64) * L
    target = rows + row.to(tl.int64) * L
    for first in tl.static_range(0, L, BL):
        c = first + tl.arange(0, BL)
        tl.store(target + c, tl.load(source + c, mask=c < L), mask=c < L)
    if choice == 0:
        e = tl.arange(0, BE)
        found = tl.histogram(tl.where(r < R, experts, 0).to(tl.int32), BE, mask=r < R)
        tl.store(offs + e, tl.cumsum(found, 0), mask=e < E)


__all__ = ["MOST", "Arranged", "arrange", "gather_sum"]
