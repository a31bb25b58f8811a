"""KDA written token by token in float64 from its equations, sharing no code with perilune: the KDA tests' oracle.

Legend: T tokens, N sequences, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NAMES = ("q", "k", "v", "g_raw", "beta_logit", "A_log", "dt_bias", "state")


def activate(
    q: torch.Tensor,
    k: torch.Tensor,
    g_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
) -> tuple[torch.Tensor, ...]:
    """q (with the scale), k, g, beta; bound None is the softplus gate."""
    q, k, g_raw, beta_logit, A_log, dt_bias = (x.double() for x in (q, k, g_raw, beta_logit, A_log, dt_bias))
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / q.shape[-1] ** 0.5
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    z, rate = g_raw + dt_bias, A_log.exp()[:, None]
    g = -rate * torch.logaddexp(z, torch.zeros_like(z)) if bound is None else bound * torch.sigmoid(rate * z)
    return q, k, g, torch.sigmoid(beta_logit)


def recur(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_NHKV: torch.Tensor,
    lengths: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences step by step at once; a sequence that has ended gets steps that change nothing."""
    steps = torch.arange(max(lengths, default=0))
    alive_TN = steps[:, None] < torch.tensor(lengths)[None]
    begin_N = torch.tensor([sum(lengths[:n]) for n in range(len(lengths))])
    index_TN = torch.where(alive_TN, begin_N[None] + steps[:, None], 0)

    def spread(x: torch.Tensor) -> torch.Tensor:
        y = x.double()[index_TN]
        return torch.where(alive_TN.view(*alive_TN.shape, *[1] * (x.ndim - 1)), y, torch.zeros_like(y))

    q, k, v, g, beta = (spread(x) for x in (q, k, v, g, beta))
    S, outputs = state_NHKV.double(), []
    for t in range(len(steps)):
        S = g[t].exp()[..., None] * S
        r = beta[t][..., None] * (v[t] - (S * k[t][..., None]).sum(-2))
        S = S + k[t][..., None] * r[..., None, :]
        outputs.append((S * q[t][..., None]).sum(-2))
    o = torch.stack(outputs).transpose(0, 1)[alive_TN.T] if outputs else v.new_zeros(0, *v.shape[1:])
    return o, S


def kda_oracle(
    inputs: list[torch.Tensor], bound: float | None, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and final states from the eight raw inputs in the order of NAMES."""
    q, k, v, g_raw, beta_logit, A_log, dt_bias, state = inputs
    q, k, g, beta = activate(q, k, g_raw, beta_logit, A_log, dt_bias, bound)
    return recur(q, k, v, g, beta, state, lengths)


def draw(
    lengths: list[int], H: int = 2, K: int = 16, V: int = 24, seed: int = 0, level: float = 0.0
) -> list[torch.Tensor]:
    """Random float64 inputs; `level` shifts the raw gates."""
    rng = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    shapes = [(T, H, K), (T, H, K), (T, H, V), (T, H, K), (T, H), (H,), (H, K), (len(lengths), H, K, V)]
    scales = [1.0, 1.0, 1.0, 2.0, 2.0, 0.5, 0.5, 1.0]
    inputs = [
        s * torch.randn(shape, generator=rng, dtype=torch.float64) for s, shape in zip(scales, shapes, strict=True)
    ]
    inputs[3] += level
    return inputs


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative Frobenius error."""
    x, reference = x.detach().double(), reference.detach().double()
    return float((x - reference).norm() / reference.norm().clamp(min=1e-300))


def values_and_gradients(
    f: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]],
    inputs: list[torch.Tensor],
    dtype: torch.dtype,
    scale: float = 1.0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and the gradients of a fixed random linear function of them, inputs cast to `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    outputs = list(f(leaves))[:2]
    rng = torch.Generator().manual_seed(99)
    loss = sum(
        (y * (scale * torch.randn(y.shape, generator=rng, dtype=torch.float64)).to(y.dtype)).sum() for y in outputs
    )
    assert isinstance(loss, torch.Tensor)
    return outputs, list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
