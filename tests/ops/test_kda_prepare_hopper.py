"""K1 for Hopper, the Gluon source itself run on the CPU (`gluon_on_cpu`), against the float64 recurrence.

What it hands over is walked in float64. It is bfloat16, at most 2^-9 off a number: 3e-3 in norm for what comes
out of the walk.
"""

import math

import pytest
import torch
from gluon_on_cpu import launch, sources
from kda_gates import KINDS, gates
from kda_kernels import SAFE, SOFTPLUS, error, kernels, make, recurrence
from triton_cpu import CUDA

from perilune.ops.kda import Raw
from perilune.ops.kda.triton_forward import EPS, room

pytestmark = pytest.mark.skipif(CUDA, reason="runs on the CPU")


def prepared(inputs, gate, sequences):
    """K1 into memory full of NaN."""
    x = kernels.inputs(Raw(*inputs[:7]), gate, sequences)
    _, X, _, H, K, _ = x.sizes
    out = room(x, X)
    results = (out.w, out.q, out.k, out.A, out.P, out.decay, out.norms)
    for y in results:
        y.fill_(torch.nan)
    tensors = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.layout.table, *results)
    strides = [n for y in (x.q, x.k, x.g, x.beta) for n in y.stride()[:2]]
    same = x.q.stride() == x.k.stride() == x.g.stride()
    kernel = ("triton_prepare_hopper", "prepare_hopper_kernel")
    scalars = (K**-0.5, x.lower_bound, EPS, H)
    launch(kernel, X * H, *tensors, *strides, *scalars, SAME=same, SAFE=gate.mode == "safe")
    return x.layout, out


def walk(layout, p, v, initial):
    """K2 in float64: U = (A beta) v - w S, o = q~ S + P U, S <- e^(G_C) S + k-^T U."""
    w, q, k, A, P, decay = (y.double() for y in (p.w, p.q, p.k, p.A, p.P, p.decay))
    o, finals = torch.zeros(v.shape, dtype=torch.float64), []
    for n, S in enumerate(initial.double()):
        for c in range(layout.first_chunk[n], layout.first_chunk[n + 1]):
            base, first, end = layout.table[c].tolist()
            tokens = slice(max(first, base), min(end, base + 64))
            rows = slice(tokens.start - base, tokens.stop - base)
            U = A[c][:, :, rows] @ v[tokens].double().transpose(0, 1) + w[c] @ S
            o[tokens] = (q[c] @ S + P[c] @ U)[:, rows].transpose(0, 1)
            S = decay[c].unsqueeze(-1) * S + k[c].mT @ U
        finals.append(S)
    return o, torch.stack(finals)


@pytest.mark.parametrize(
    ("gate", "kind"), [(SAFE, "mild"), (SAFE, "slow"), (SAFE, "steep"), *((SOFTPLUS, kind) for kind in KINDS)]
)
def test_outputs_and_states(gate, kind):
    inputs, sequences = gates(kind, H=2, V=32)
    layout, p = prepared(inputs, gate, sequences)
    o, final = walk(layout, p, inputs[2], inputs[7])
    o_exact, final_exact, _ = recurrence(*inputs, gate, sequences)
    assert error(o, o_exact) < 3e-3
    assert error(final, final_exact) < 3e-3


@pytest.mark.parametrize("kind", ["mild", "channels", "mixed", "alternating"])
def test_later_gates_change_no_earlier_bit(kind):
    inputs, sequences = gates(kind, [64], [0], H=1, V=16)
    _, first = prepared(inputs, SOFTPLUS, sequences)
    for t in (1, 20, 31, 45):
        for value in (50.0, -40.0, math.inf):
            changed = inputs[3].clone()
            changed[t:] = value
            _, again = prepared((*inputs[:3], changed, *inputs[4:]), SOFTPLUS, sequences)
            for name in ("w", "q", "A", "P"):
                a, b = getattr(again, name)[0, 0, :t], getattr(first, name)[0, 0, :t]
                assert torch.equal(a, b), (name, t, value)


def test_the_real_gluon_may_be_there_before():
    """Whatever order tests run in: the emulator's words are used, and afterwards the real ones are where they were."""
    from triton.experimental import gluon

    sources.cache_clear()
    try:
        module = sources()["triton_decay_hopper"]
        assert module.exp2.__class__.__name__ == "function"
        import triton.experimental

        assert triton.experimental.gluon is gluon
    finally:
        sources.cache_clear()


def test_small_decays_keep_their_digits():
    """Tokens of 1e-7 to 0.5 nats. 2e-5 is twice the gate's own error; 1e-7 is float32 next to 1."""
    inputs, sequences = make([64], H=2, K=128, V=16, dtype=torch.bfloat16)
    g, A_log, dt_bias = inputs[3], inputs[5], inputs[6]
    g.mul_(0.25).add_(torch.linspace(-13.0, -3.5, 128))
    _, p = prepared(inputs, SOFTPLUS, sequences)
    softplus = torch.nn.functional.softplus(g.double() + dt_bias.double())
    exact = -A_log.double().exp()[:, None] * softplus.sum(0)
    assert ((p.decay[0].double().log() - exact).abs() < 2e-5 * exact.abs() + 1e-7).all()


def test_gates_that_are_no_number_reach_the_outputs_from_there_on():
    inputs, sequences = gates("mild", [64], [0], H=1, V=16)
    clean = prepared(inputs, SOFTPLUS, sequences)[1]
    inputs[3][40, 0, 5] = torch.nan
    _, p = prepared(inputs, SOFTPLUS, sequences)
    assert torch.equal(p.P[0, 0, :40], clean.P[0, 0, :40])
    assert p.q[0, 0, 40:, 5].isnan().all()
    assert p.decay[0, 0, 5].isnan()
