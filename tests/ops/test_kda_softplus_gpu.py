"""KDA with the softplus gate on Hopper: K1 with windows of decays, against a float64 recurrence and plain Triton.

Operands are bfloat16: 7e-3 forward (relative Frobenius), gradients as in `test_kda_triton`. A block of 32 rows has a
second window of decays where some channel falls by more than 208 powers of two (144 nats), see `triton_decay_hopper`.
"""

import math

import pytest
import torch
from kda_gates import KINDS, gates
from kda_kernels import SOFTPLUS, check, error, gpu, kernels, make, recurrence, run

from perilune.ops.kda import Raw
from perilune.ops.kda import triton_forward as forward
from perilune.ops.sequences import Sequences


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_forward(kind):
    inputs, sequences = gates(kind)
    assert kernels.prepare_name(*inputs[:2], inputs[3]) == "hopper"
    o, final, states = run(inputs, SOFTPLUS, sequences, checkpoints=((64,), (), (), (128, 192), ()))
    o_exact, final_exact, at = recurrence(*inputs, SOFTPLUS, sequences, at=(64,))
    assert error(o, o_exact) < 7e-3
    assert error(final, final_exact) < 7e-3
    assert error(states[0], at[0]) < 7e-3


@gpu
@pytest.mark.parametrize("kind", ["mild", "slow", "channels", "mixed"])
@pytest.mark.parametrize("save", ["inputs", "all"])
def test_gradients(kind, save):
    check(*gates(kind), SOFTPLUS, 7e-3, 1e-2, loose=3e-2, sums=5e-2, save=save)


@gpu
@pytest.mark.parametrize("T", [1, 15, 31, 32, 33, 63, 64, 65, 1000])
def test_lengths(T):
    inputs, sequences = gates("mixed", [T], [0], H=5)
    o, final = run(inputs, SOFTPLUS, sequences)
    o_exact, final_exact, _ = recurrence(*inputs, SOFTPLUS, sequences)
    assert error(o, o_exact) < 7e-3
    assert error(final, final_exact) < 7e-3


@gpu
@pytest.mark.parametrize("kind", ["mild", "slow", "fast", "mixed", "alternating"])
def test_close_to_plain_triton(kind, monkeypatch):
    """Both round their results to bfloat16; plain Triton also rounds the operands of P: 2^-8 at most, 1e-2 in norm."""
    inputs, sequences = gates(kind)
    x = kernels.inputs(Raw(*inputs[:7]), SOFTPLUS, sequences)
    ours = forward.prepare(x)
    monkeypatch.setattr(forward, "prepare_name", lambda *_: "triton")
    other = forward.prepare(x)
    for name in ("w", "q", "k", "A", "P", "decay", "norms"):
        assert error(getattr(ours, name), getattr(other, name)) < 1e-2, name


@gpu
def test_small_decays_keep_their_digits():
    """Tokens of 1e-7 to 0.5 nats. 2e-5 is twice the gate's own error; 5e-7 is ex2.approx next to 1."""
    inputs, sequences = make([512], H=4, K=128, V=128, dtype=torch.bfloat16)
    g, A_log, dt_bias = inputs[3], inputs[5], inputs[6]
    g.mul_(0.25).add_(torch.linspace(-13.0, -3.5, 128, device=g.device))
    decay = forward.prepare(kernels.inputs(Raw(*inputs[:7]), SOFTPLUS, sequences)).decay
    x = g.double() + dt_bias.double()
    logs = -A_log.double().exp()[:, None] * torch.nn.functional.softplus(x)
    exact = logs.reshape(8, 64, 4, 128).sum(1)
    assert ((decay.double().log() - exact).abs() < 2e-5 * exact.abs() + 5e-7).all()


@gpu
@pytest.mark.parametrize("kind", ["mild", "slow", "channels", "mixed", "alternating"])
def test_later_gates_change_no_earlier_bit(kind):
    """Also where they add windows to the same block of 32 rows."""
    inputs, sequences = gates(kind, [200], [0], H=2)
    first = run(inputs, SOFTPLUS, sequences)[0]
    for t in (1, 8, 20, 31, 33, 40, 63, 64, 90, 127, 150, 199):
        for value in (50.0, 1e4, -40.0, math.inf):
            changed = inputs[3].clone()
            changed[t:] = value
            again = run((*inputs[:3], changed, *inputs[4:]), SOFTPLUS, sequences)[0]
            assert torch.equal(again[:t], first[:t]), (t, value)


@gpu
@pytest.mark.parametrize("kind", ["mild", "mixed", "steep"])
def test_same_bits_repeated_cut_and_strided(kind):
    inputs, whole = gates(kind, [1000], [0])
    *x, A_log, dt_bias, initial = inputs
    o, final = run(inputs, SOFTPLUS, whole)
    for _ in range(20):
        again = run(inputs, SOFTPLUS, whole)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], final)
    state, pieces = initial, []
    for a, b in ((0, 192), (192, 1000)):
        part = Sequences.from_lengths([b - a], [a], "cuda")
        piece, state = run((*(y[a:b] for y in x), A_log, dt_bias, state), SOFTPLUS, part)
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces), o)
    assert torch.equal(state, final)
    strided = []
    for i, y in enumerate(x[:4]):  # k lies otherwise than q and g; v as it was, or another scan would read it
        wide = torch.full((1000, 3, 256 if i == 1 else 384), torch.nan, dtype=y.dtype, device=y.device)
        wide[:, :, 128:256] = y
        strided.append(y if i == 2 else wide[:, :, 128:256])
    assert kernels.prepare_name(*strided[:2], strided[3]) == "hopper"
    again = run((*strided, *inputs[4:]), SOFTPLUS, whole)
    assert torch.equal(again[0], o)
    assert torch.equal(again[1], final)


@gpu
def test_documents_never_see_each_other():
    """Next to a document of NaN gates, steep ones, and alone: the same bits, in a shared chunk grid or not."""
    (*x, A_log, dt_bias, initial), alone = gates("mild", [75], [20])
    o, final = run((*x, A_log, dt_bias, initial), SOFTPLUS, alone)
    packed = Sequences.from_lengths([10, 75, 7], [0, 20, 50], "cuda")
    for value in (math.nan, 1e4):
        q, k, v, g, beta = (torch.cat((y[:10], y, y[:7])) for y in x)
        g[:10] = value
        g[85:] = value
        again = run((q, k, v, g, beta, A_log, dt_bias, initial.expand(3, -1, -1, -1)), SOFTPLUS, packed)
        assert torch.equal(again[0][10:85], o)
        assert torch.equal(again[1][1], final[0])
        assert bool(again[0][:10].isnan().any()) == math.isnan(value)


@gpu
def test_replayed_on_gates_that_became_steep():
    inputs, sequences = gates("mild", [1000], [0])
    steep = gates("mixed", [1000], [0])[0]
    run(inputs, SOFTPLUS, sequences)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final = run(inputs, SOFTPLUS, sequences)
    for x, new in zip(inputs, steep, strict=True):
        x.copy_(new)
    graph.replay()
    again = run(steep, SOFTPLUS, sequences)
    assert torch.equal(o, again[0])
    assert torch.equal(final, again[1])
