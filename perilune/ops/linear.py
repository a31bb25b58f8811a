"""Matrix products whose bits do not depend on the other rows.

Legend: T tokens, D input width, F output width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf

from perilune.errors import Error
from perilune.ops import few

# A CPU gemm takes another path below 16 rows, and splits the inner dimension by a rule that looks at the row count
# when it is longer than 512; with full row tiles and short inner blocks every row sees one order of additions. On some
# processors the row count also matters at widths that do not fill whole vectors, so zeros fill the last one.
_ROW_TILE = 16
_WIDTH_TILE = 16
_INNER_BLOCK = 512


def linear(x_TD: torch.Tensor, w_FD: torch.Tensor) -> torch.Tensor:
    """y_TF = x_TD @ w_FD^T, in the input dtype, by whatever kernel is fastest (level: bitwise-layout)."""
    if few.fits(x_TD, w_FD):
        return few.multiply(x_TD, w_FD)
    return nnf.linear(x_TD, w_FD)


def linear_exact(x_TD: torch.Tensor, w_FD: torch.Tensor) -> torch.Tensor:
    """y_TF = x_TD @ w_FD^T where each row's bits depend on that row alone (level: bitwise-batch, CPU, fp32 and fp64).

    Rows and the inner dimension are padded to multiples of 16, and the latter is cut into blocks of 512 that are added
    in order.
    Differentiable. Leading dimensions of x may be several; they are flattened. Raises Error when the widths differ.
    """
    if x_TD.shape[-1] != w_FD.shape[-1]:
        raise Error(f"linear_exact: x has width {x_TD.shape[-1]} but w has {w_FD.shape[-1]}; they must be equal")
    missing = -w_FD.shape[-1] % _WIDTH_TILE
    if missing:
        x_TD, w_FD = nnf.pad(x_TD, (0, missing)), nnf.pad(w_FD, (0, missing))
    rows_TD = _whole_tiles(x_TD.flatten(0, -2))
    y_TF = nnf.linear(rows_TD[:, :_INNER_BLOCK], w_FD[:, :_INNER_BLOCK])
    for start in range(_INNER_BLOCK, w_FD.shape[-1], _INNER_BLOCK):
        block = slice(start, start + _INNER_BLOCK)
        y_TF = y_TF + nnf.linear(rows_TD[:, block], w_FD[:, block])
    return y_TF[: x_TD.shape[:-1].numel()].view(*x_TD.shape[:-1], w_FD.shape[0])


def dot_exact(x_TD: torch.Tensor, w_D: torch.Tensor) -> torch.Tensor:
    """x_TD @ w_D -> [T], each row's bits depending on that row alone (bitwise-batch, CPU, fp32 and fp64).

    Not differentiable by itself: a building block of hand-written backward passes.
    """
    whole = x_TD.shape[0] // _ROW_TILE * _ROW_TILE
    y_T = x_TD.new_empty(x_TD.shape[0])
    if whole:
        torch.mv(x_TD[:whole], w_D, out=y_T[:whole])
    if whole < x_TD.shape[0]:
        y_T[whole:] = torch.mv(_whole_tiles(x_TD[whole:]), w_D)[: x_TD.shape[0] - whole]
    return y_T


def _whole_tiles(x_TD: torch.Tensor) -> torch.Tensor:
    """Contiguous rows, zero rows added up to a multiple of the row tile."""
    missing = -x_TD.shape[0] % _ROW_TILE
    return nnf.pad(x_TD, (0, 0, 0, missing)) if missing else x_TD.contiguous()


__all__ = ["dot_exact", "linear", "linear_exact"]
