"""The pairwise part of a chunk: P and L from q, k and decays, and what their gradients pull back on rows and columns.

    P_ij = sum_c q_ic k_jc e^(g_{j+1} + ... + g_i)_c  (j <= i)       L_ij / beta_i: the same with k_i for q_i  (j < i)

q and k lie one behind the other in one tensor, since they share every row factor.

Legend: B chunk-heads, C rows of a chunk (64), K key dim, n pairs of a level, s rows of a block of a level, d rows of
the smallest block, r = C / d blocks.
"""

from __future__ import annotations

import torch

from perilune.ops.kda.decay import CHUNK, Decays


def both(x_2Bmk: torch.Tensor, y_Bkn: torch.Tensor) -> torch.Tensor:
    """[2, B, m, n]: two stacks of matrices times the same one."""
    out = x_2Bmk.new_empty(*x_2Bmk.shape[:3], y_Bkn.shape[2])
    for x, z in zip(x_2Bmk, out, strict=True):
        torch.bmm(x, y_Bkn, out=z)
    return out


def scores(qk_2BCK: torch.Tensor, f: Decays) -> torch.Tensor:
    """[2, B, C, C]: P, and L before its factor beta (its diagonal is not meaningful); zeros above the diagonal."""
    _, B, _, K = qk_2BCK.shape
    out_2BCC = qk_2BCK.new_zeros(2, B, CHUNK, CHUNK)
    for right, left in f.levels:
        n, s = right.shape[1:3]
        rows, columns = _pair_factors(qk_2BCK, right, left)
        block = both(rows, columns.mT).view(2, B, n, s, s)
        _pair_blocks(out_2BCC, s).copy_(block.permute(0, 1, 3, 4, 2))
    if f.up is None or f.down is None:
        out_2BCC[0].diagonal(dim1=1, dim2=2).copy_((qk_2BCK[0] * qk_2BCK[1]).sum(-1))
        return out_2BCC
    r, d = f.up.shape[1:3]
    rows = (qk_2BCK.view(2, B, r, d, K) * f.up).view(2, B * r, d, K)
    columns = (qk_2BCK[1].view(B, r, d, K) * f.down).view(B * r, d, K)
    # tril selects: whatever the anchored factors gave above the diagonal, even inf or NaN, is gone.
    block = both(rows, columns.mT).tril_()
    _diagonal_blocks(out_2BCC, d).copy_(block.view(2, B, r, d, d).permute(0, 1, 3, 4, 2))
    return out_2BCC


def scores_back(
    dscores_2BCC: torch.Tensor, qk_2BCK: torch.Tensor, f: Decays, rows_2BCK: torch.Tensor, columns_BCK: torch.Tensor
) -> None:
    """Adds what the pairs j < i pull on their row i to `rows` (of q and of k) and on their column j to `columns`.

    dscores: gradients of P and of L / beta; entries at j >= i are not used.
    """
    _, B, _, K = qk_2BCK.shape
    for right, left in f.levels:
        n, s = right.shape[1:3]
        rows, columns = _pair_factors(qk_2BCK, right, left)
        block = _pair_blocks(dscores_2BCC, s).permute(0, 1, 4, 2, 3).reshape(2, B * n, s, s)
        pairs = rows_2BCK.view(2, B, n, 2, s, K)
        pairs[:, :, :, 1].addcmul_(both(block, columns).view(2, B, n, s, K), right)
        pulled = torch.baddbmm(torch.bmm(block[0].mT, rows[0]), block[1].mT, rows[1])
        columns_BCK.view(B, n, 2, s, K)[:, :, 0].addcmul_(pulled.view(B, n, s, K), left)
    if f.up is None or f.down is None:
        return
    r, d = f.up.shape[1:3]
    block = _diagonal_blocks(dscores_2BCC, d).permute(0, 1, 4, 2, 3).reshape(2, B * r, d, d).tril_(-1)
    rows = (qk_2BCK.view(2, B, r, d, K) * f.up).view(2, B * r, d, K)
    columns = (qk_2BCK[1].view(B, r, d, K) * f.down).view(B * r, d, K)
    rows_2BCK.view(2, B, r, d, K).addcmul_(both(block, columns).view(2, B, r, d, K), f.up)
    pulled = torch.baddbmm(torch.bmm(block[0].mT, rows[0]), block[1].mT, rows[1])
    columns_BCK.view(B, r, d, K).addcmul_(pulled.view(B, r, d, K), f.down)


def _pair_factors(qk_2BCK: torch.Tensor, right: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [2, B n, s, K] (q and k of the right block, decayed) and columns [B n, s, K] (k of the left block)."""
    _, B, _, K = qk_2BCK.shape
    n, s = right.shape[1:3]
    pairs = qk_2BCK.view(2, B, n, 2, s, K)
    return (pairs[:, :, :, 1] * right).view(2, B * n, s, K), (pairs[1, :, :, 0] * left).view(B * n, s, K)


def _diagonal_blocks(x_2BCC: torch.Tensor, d: int) -> torch.Tensor:
    """View [2, B, d, d, r] of the d x d blocks on the diagonal."""
    r = CHUNK // d
    return x_2BCC.view(*x_2BCC.shape[:2], r, d, r, d).diagonal(dim1=2, dim2=4)


def _pair_blocks(x_2BCC: torch.Tensor, s: int) -> torch.Tensor:
    """View [2, B, s, s, n]: rows of each right block against the columns of its left neighbour."""
    n = CHUNK // s // 2
    return x_2BCC.view(*x_2BCC.shape[:2], n, 2, s, n, 2, s)[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4)
