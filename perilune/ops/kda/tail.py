"""A few tokens beyond a boundary state, without touching it: what decoding and draft verification do.

The state after token i, written from the last boundary matrix S and the writes since:
    S_i = diag(e^(g_1 + ... + g_i)) S + sum_{j <= i} (e^(g_{j+1} + ... + g_i) k_j) u_j^T
Every decay is one exponential of a sum of gates, never a quotient, so nothing overflows whatever the gates are.

Legend: R tokens in the ring since the boundary, n new tokens, H heads, K key dim, V value dim, S state.
"""

from __future__ import annotations

import torch


def tail_step(
    S_HKV: torch.Tensor,
    k_RHK: torch.Tensor,
    u_RHV: torch.Tensor,
    g_RHK: torch.Tensor,
    q_nHK: torch.Tensor,
    k_nHK: torch.Tensor,
    v_nHV: torch.Tensor,
    g_nHK: torch.Tensor,
    beta_nH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs o_nHV and writes u_nHV of n new tokens after R tokens since the boundary matrix S.

    All inputs are activated (see `prepare`) and in the dtype of S; R and n may be 0. g in nats, per token.
    Appending the new k, u, g to the ring gives the ring of the next call; dropping entries rolls back.
    Level: tolerance against the chunk form (5e-5 fp32, 1e-10 fp64).
    """
    R, n = k_RHK.shape[0], q_nHK.shape[0]
    k_mHK, g_mHK = torch.cat((k_RHK, k_nHK)), torch.cat((g_RHK, g_nHK))
    u_mHV = torch.cat((u_RHV, torch.zeros_like(v_nHV)))
    o_nHV = torch.empty_like(v_nHV)
    for i in range(n):
        m = R + i + 1
        to_start_HK, since_mHK = _decays(g_mHK[:m])
        keys_mHK = k_mHK[:m] * since_mHK
        # Reads with k and with q at once: two rows a head.
        qk_H2K = torch.stack((q_nHK[i], k_nHK[i]), dim=1)
        boundary_H2V = (qk_H2K * to_start_HK.unsqueeze(1)) @ S_HKV
        scores_H2m = qk_H2K @ keys_mHK.permute(1, 2, 0)
        read_H2V = boundary_H2V + scores_H2m @ u_mHV[:m].transpose(0, 1)
        u_mHV[m - 1] = beta_nH[i].unsqueeze(-1) * (v_nHV[i] - read_H2V[:, 1])
        o_nHV[i] = read_H2V[:, 0] + scores_H2m[:, 0, -1:] * u_mHV[m - 1]
    return o_nHV, u_mHV[R:]


def fold_tail(S_HKV: torch.Tensor, k_RHK: torch.Tensor, u_RHV: torch.Tensor, g_RHK: torch.Tensor) -> torch.Tensor:
    """The state after the R tokens of the ring: a new matrix, S is left as it was."""
    to_start_HK, since_RHK = _decays(g_RHK)
    written_HKV = (k_RHK * since_RHK).permute(1, 2, 0) @ u_RHV.transpose(0, 1)
    return to_start_HK.unsqueeze(-1) * S_HKV + written_HKV


def _decays(g_mHK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e^(sum of all gates) [H, K] and, for each token, e^(sum of the gates after it) [m, H, K]."""
    after_mHK = g_mHK.flip(0).cumsum(0).flip(0)
    since_mHK = torch.cat((after_mHK[1:], torch.zeros_like(g_mHK[:1])))
    return g_mHK.sum(0).exp(), since_mHK.exp()


__all__ = ["fold_tail", "tail_step"]
