"""Shared by the tests of KDA's Triton kernels: inputs, a float64 recurrence, Triton's interpreter without a GPU."""

import pytest
import torch
from triton_cpu import CUDA

from perilune.config import Gate
from perilune.ops.kda import Raw, implementation, kda
from perilune.ops.kda import triton as kernels
from perilune.ops.sequences import Sequences

SAFE = Gate("safe", -5.0)
SOFTPLUS = Gate("softplus")
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial")
interpreted = pytest.mark.skipif(CUDA, reason="runs in Triton's interpreter")
gpu = pytest.mark.gpu


def recurrence(q, k, v, g, beta, A_log, dt_bias, initial, gate, sequences, at=()):
    """Token by token in float64; also the states after the absolute positions `at` of the first sequence."""
    q, k, v, g, beta, A_log, dt_bias, initial = (x.double() for x in (q, k, v, g, beta, A_log, dt_bias, initial))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    rate = A_log.exp()[:, None]
    if gate.mode == "safe":
        g = gate.lower_bound * torch.sigmoid(rate * (g + dt_bias))
    else:
        g = -rate * torch.nn.functional.softplus(g + dt_bias)
    beta = torch.sigmoid(beta)
    outputs, finals, states = [], [], []
    for n in range(sequences.count):
        S = initial[n]
        for t in range(sequences.offsets[n], sequences.offsets[n + 1]):
            S = S * g[t].exp()[:, :, None]
            r = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
            S = S + k[t][:, :, None] * r[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", S, q[t]))
            if n == 0 and sequences.starts[0] + t + 1 in at:
                states.append(S)
        finals.append(S)
    return torch.stack(outputs), torch.stack(finals), states


def make(lengths, starts=None, H=1, K=32, V=32, kind="random", dtype=torch.float32, seed=0):
    """Random inputs of one kind, on the GPU if there is one."""
    device = torch.device("cuda" if CUDA else "cpu")
    sequences = Sequences.from_lengths(lengths, starts, device)
    random = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=random, device=device)

    T = sequences.total
    q, k, v, g, beta = draw(T, H, K), draw(T, H, K), draw(T, H, V), 2 * draw(T, H, K), draw(T, H)
    if kind == "slow":
        g = g - 8
    elif kind == "middle":
        g = g * 0.25 - 3
    elif kind == "strong":
        g = torch.full_like(g, 20.0)
    elif kind == "similar":
        k, g, beta = 0.1 * k + draw(1, H, K), g - 8, beta + 2
    elif kind == "identical":
        k, g, beta = torch.zeros_like(k) + draw(1, H, K), g - 12, torch.full_like(beta, 8.0)
    A_log, dt_bias, initial = 0.3 * draw(H), draw(H, K), draw(len(lengths), H, K, V)
    return [x.to(dtype) for x in (q, k, v, g, beta)] + [A_log, dt_bias, initial], sequences


def run(inputs, gate, sequences, **options):
    """The kernels on the eight tensors of `make` (the last may be None), in the interpreter too."""
    raw = Raw(*inputs[:7])
    if CUDA:
        assert implementation(raw.q_THK, raw.v_THV) == "triton"
        return kda(*raw, gate, inputs[7], sequences, **options)
    assert kernels.supports(raw.q_THK, raw.v_THV)
    return kernels.kda(raw, gate, inputs[7], sequences, **options)


def error(a, b):
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().norm().cpu()).item()


def check(inputs, sequences, gate, forward, backward, loose=0.0, sums=0.0, **options):
    """Forward, states and every gradient against the recurrence; `loose` for dv and dbeta, `sums` for dt_bias."""
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    o, final = run(ours, gate, sequences, **options)
    o_exact, final_exact, _ = recurrence(*exact, gate, sequences)
    assert error(o, o_exact) < forward
    assert error(final, final_exact) < forward
    random = torch.Generator().manual_seed(5)
    do, df = torch.randn(o.shape, generator=random), 0.1 * torch.randn(final.shape, generator=random)
    do, df = do.to(o.device), df.to(o.device)
    ((o.float() * do).sum() + (final * df).sum()).backward()
    ((o_exact * do.double()).sum() + (final_exact * df.double()).sum()).backward()
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        # A_log's gradient is a sum over all tokens and channels that nearly cancels.
        bound = max(backward, {"v": loose, "beta": loose, "dt_bias": sums, "A_log": 3 * loose}.get(name, 0.0))
        assert error(a.grad, b.grad) < bound, name
