"""From raw projections to what the recurrence eats: L2 norm, decay gate, write strength, each with its own backward.

Only operations whose bits do not depend on a value's place in the tensor are used: torch's own sigmoid, softplus and
silu on CPU treat the last few elements of a tensor with other code than the rest.

Legend: T tokens, H heads, K key dim. Gates in nats. Source: Kimi Linear (arXiv:2510.26692), section 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from perilune.config import Gate

NORM_EPS = 1e-6
# The sigmoid's argument is cut here: e^-80 is still a normal fp32 number and no gradient becomes 0 * inf.
MAX_ARGUMENT = 80.0
# e^-MAX_DECAY is 0 in every dtype, so a softplus gate is cut here without changing a result.
MAX_DECAY = 1e4


class Raw(NamedTuple):
    """The tensors of one call of `kda`, before gate, L2 norm and sigmoid."""

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_THV: torch.Tensor
    g_raw_THK: torch.Tensor
    beta_logit_TH: torch.Tensor
    A_log_H: torch.Tensor
    dt_bias_HK: torch.Tensor


class Activated(NamedTuple):
    """Inputs of the recurrence in the compute dtype (fp32, or fp64 if any input is fp64).

    q: L2-normalised and multiplied by K^-0.5 (the scale is inside). k: L2-normalised. g: log decay, nats, <= 0.
    beta: write strength in (0, 1).
    """

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    g_THK: torch.Tensor
    beta_TH: torch.Tensor


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """fp64 if any of them is fp64, else fp32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def prepare(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    g_raw_THK: torch.Tensor,
    beta_logit_TH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    gate: Gate,
) -> Activated:
    """Activate the inputs of `kda` (v needs nothing but the dtype); level bitwise-batch on CPU.

    q and k are divided by sqrt(sum x^2 + 1e-6) (the epsilon is on the sum), q also carries K^-0.5; g follows `gate`;
    beta = sigmoid(logit).
    """
    dtype = compute_dtype(q_THK, k_THK, g_raw_THK)
    A_log_H, dt_bias_HK = A_log_H.to(dtype), dt_bias_HK.to(dtype)
    decay: Any = _SafeGate if gate.mode == "safe" else _SoftplusGate
    return Activated(
        _Normalise.apply(q_THK.to(dtype), q_THK.shape[-1] ** -0.5),  # type: ignore[no-untyped-call]
        _Normalise.apply(k_THK.to(dtype), 1.0),  # type: ignore[no-untyped-call]
        decay.apply(g_raw_THK.to(dtype), A_log_H, dt_bias_HK, gate.lower_bound),
        _Sigmoid.apply(beta_logit_TH.to(dtype)),  # type: ignore[no-untyped-call]
    )


def _logistic(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x); an overflowing e^-x gives exactly 0."""
    return torch.neg(x).exp_().add_(1).reciprocal_()


class _Normalise(torch.autograd.Function):
    """y = scale x / sqrt(sum x^2 + eps) over the last dim."""

    @staticmethod
    def forward(ctx: Any, x_THK: torch.Tensor, scale: float) -> torch.Tensor:
        r_TH1 = x_THK.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
        ctx.save_for_backward(x_THK, r_TH1)
        ctx.scale = scale
        return x_THK * (r_TH1 * scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (dy_THK,) = grads
        x_THK, r_TH1 = ctx.saved_tensors
        pull_TH1 = (x_THK * dy_THK).sum(-1, keepdim=True).mul_(r_TH1 * r_TH1 * r_TH1).mul_(-ctx.scale)
        return torch.addcmul(dy_THK * (r_TH1 * ctx.scale), x_THK, pull_TH1), None


class _Sigmoid(torch.autograd.Function):
    """beta = sigmoid(logit); 1 - beta is formed as sigmoid(-logit), not by a subtraction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _logistic(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * _logistic(x) * _logistic(-x)


class _SafeGate(torch.autograd.Function):
    """g = lb sigmoid(a), a = e^A (x + b) cut to +-80."""

    @staticmethod
    def forward(
        ctx: Any, x_THK: torch.Tensor, A_log_H: torch.Tensor, bias_HK: torch.Tensor, bound: float
    ) -> torch.Tensor:
        rate_H1 = A_log_H.clamp(max=MAX_ARGUMENT).exp().unsqueeze(-1)
        a_THK = (x_THK + bias_HK).mul_(rate_H1).clamp_(-MAX_ARGUMENT, MAX_ARGUMENT)
        ctx.save_for_backward(a_THK, rate_H1)
        ctx.bound = bound
        return _logistic(a_THK).mul_(bound)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        (dg_THK,) = grads
        a_THK, rate_H1 = ctx.saved_tensors
        e_THK = torch.exp(-a_THK)
        s_THK = (e_THK + 1).reciprocal_()
        # s (1 - s) = e s^2, without the cancellation of 1 - s.
        da_THK = e_THK.mul_(s_THK).mul_(s_THK).mul_(dg_THK).mul_(ctx.bound)
        dA_H = (da_THK * a_THK).sum((0, 2))
        dx_THK = da_THK.mul_(rate_H1)
        return dx_THK, dA_H, dx_THK.sum(0), None


class _SoftplusGate(torch.autograd.Function):
    """g = -e^A softplus(x + b), cut at -MAX_DECAY."""

    @staticmethod
    def forward(
        ctx: Any, x_THK: torch.Tensor, A_log_H: torch.Tensor, bias_HK: torch.Tensor, bound: None
    ) -> torch.Tensor:
        rate_H1 = A_log_H.clamp(max=MAX_ARGUMENT).exp().unsqueeze(-1)
        z_THK = x_THK + bias_HK
        softplus_THK = z_THK.abs().neg_().exp_().log1p_().add_(z_THK.clamp(min=0))
        g_THK = softplus_THK.mul_(rate_H1).clamp_(max=MAX_DECAY).neg_()
        ctx.save_for_backward(z_THK, g_THK, rate_H1)
        return g_THK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        z_THK, g_THK, rate_H1 = ctx.saved_tensors
        dg_THK = torch.where(g_THK > -MAX_DECAY, grads[0], 0.0)
        dx_THK = _logistic(z_THK).mul_(rate_H1).mul_(dg_THK).neg_()
        return dx_THK, (dg_THK * g_THK).sum((0, 2)), dx_THK.sum(0), None
