"""KDA's Triton kernels against an independent float64 recurrence, in Triton's interpreter and on a GPU.

In the interpreter the kernels run in float32 without rounding of matrix operands, so the bound there (2e-5 forward,
5e-5 gradients, relative Frobenius) checks the mathematics. On the GPU operands are bfloat16 (7e-3 forward, gradients
1e-2, similar keys 3e-2 in dv and dbeta, where (I + L)^-1 amplifies rounding).
"""

import importlib.util
import os

import pytest
import torch

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops.sequences import Sequences

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

if not CUDA:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_scalars(tensor, scope):
        """Loop bounds are one-element arrays in the interpreter; NumPy 2.4 no longer turns those into ints."""
        _patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_scalars

from perilune.ops.kda import triton as kernels  # noqa: E402

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


def error(a, b):
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().norm().cpu()).item()


def check(inputs, sequences, gate, forward, backward, loose=0.0, **options):
    """Forward, states and every gradient against the recurrence."""
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().cpu().requires_grad_() for x in inputs]
    o, final = kernels.kda(*ours[:7], gate, ours[7], sequences, **options)
    o_exact, final_exact, _ = recurrence(*exact, gate, sequences)
    assert error(o, o_exact) < forward
    assert error(final, final_exact) < forward
    random = torch.Generator().manual_seed(5)
    do, df = torch.randn(o.shape, generator=random), 0.1 * torch.randn(final.shape, generator=random)
    ((o.float() * do.to(o.device)).sum() + (final * df.to(o.device)).sum()).backward()
    ((o_exact * do.double()).sum() + (final_exact * df.double()).sum()).backward()
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        # A_log's gradient is a sum over all tokens and channels that nearly cancels.
        bound = max(backward, {"v": loose, "beta": loose, "A_log": 3 * loose}.get(name, 0.0))
        assert error(a.grad, b.grad) < bound, name


@interpreted
@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
def test_one_sequence(gate):
    check(*make([70]), gate, 2e-5, 5e-5)


@interpreted
def test_lengths_zero_and_one_and_starts_off_the_grid():
    check(*make([1, 0, 66, 3], [0, 7, 100, 64], K=16), SAFE, 2e-5, 5e-5)


@interpreted
@pytest.mark.parametrize("kind", ["strong", "identical"])
def test_hard_inputs(kind):
    check(*make([66], kind=kind), SAFE, 2e-5, 1e-4, save="all")


@interpreted
def test_later_gates_do_not_change_earlier_outputs():
    (q, k, v, g, beta, A_log, dt_bias, initial), sequences = make([70], K=16)
    first = kernels.kda(q, k, v, g, beta, A_log, dt_bias, SAFE, initial, sequences)[0]
    for t in (20, 40, 65):
        changed = g.clone()
        changed[t:] = 3.0
        again = kernels.kda(q, k, v, changed, beta, A_log, dt_bias, SAFE, initial, sequences)[0]
        assert torch.equal(again[:t], first[:t])


@interpreted
def test_cut_on_the_grid_and_packing_give_the_same_bits():
    (q, k, v, g, beta, A_log, dt_bias, initial), whole = make([130], K=16)
    o, final, states = kernels.kda(q, k, v, g, beta, A_log, dt_bias, SAFE, initial, whole, checkpoints=((64, 128),))
    state, pieces = initial, []
    for a, b in ((0, 64), (64, 130)):
        part = Sequences.from_lengths([b - a], [a])
        x = (y[a:b] for y in (q, k, v, g, beta))
        piece, state = kernels.kda(*x, A_log, dt_bias, SAFE, state, part)
        pieces.append(piece)
        if b == 64:
            assert torch.equal(state[0], states[0])
    assert torch.equal(torch.cat(pieces), o)
    assert torch.equal(state, final)
    twice = [torch.cat((y[:10], y)) for y in (q, k, v, g, beta)]
    packed = kernels.kda(*twice, A_log, dt_bias, SAFE, torch.cat((initial, initial)), Sequences.from_lengths([10, 130]))
    assert torch.equal(packed[0][10:], o)
    assert torch.equal(packed[1][1], final[0])


@interpreted
def test_non_contiguous_inputs_and_poisoned_neighbours():
    inputs, sequences = make([65], H=2, K=16, V=16)
    plain = kernels.kda(*inputs[:7], SAFE, inputs[7], sequences)
    wide = torch.full((70, 2, 40), torch.nan)
    strided = []
    for x in inputs[:4]:
        y = wide.clone()
        y[3:68, :, 4:36:2] = x
        strided.append(y[3:68, :, 4:36:2])
    again = kernels.kda(*strided, *inputs[4:7], SAFE, inputs[7], sequences)
    assert torch.equal(again[0], plain[0])
    assert torch.equal(again[1], plain[1])


@interpreted
def test_segmented_scan_and_checkpoints():
    inputs, sequences = make([130], [960], K=16, V=16)
    o, final, states = kernels.kda(*inputs[:7], SAFE, inputs[7], sequences, checkpoints=((1024,),), scan="segmented")
    o_exact, final_exact, at = recurrence(*inputs, SAFE, sequences, at=(1024,))
    assert error(o, o_exact) < 2e-5
    assert error(final, final_exact) < 2e-5
    assert error(states[0], at[0]) < 2e-5


def test_errors_name_what_is_allowed():
    inputs, sequences = make([5], K=16)
    with pytest.raises(Error, match="allowed: 'inputs', 'all'"):
        kernels.kda(*inputs[:7], SAFE, inputs[7], sequences, save="nothing")
    with pytest.raises(Error, match="multiple of 64"):
        kernels.kda(*inputs[:7], SAFE, inputs[7], sequences, checkpoints=((5,),))


KINDS = ("random", "slow", "middle", "strong", "similar", "identical")


@gpu
@pytest.mark.parametrize("save", ["inputs", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_gradients(kind, save):
    inputs, sequences = make(
        [70, 0, 1, 129, 63], [0, 0, 5, 100, 64], H=3, K=128, V=128, kind=kind, dtype=torch.bfloat16
    )
    assert kernels.prepare_name(*inputs[:2], inputs[3], SAFE) == "hopper"
    check(inputs, sequences, SAFE, 7e-3, 1e-2, loose=3e-2, save=save)


@gpu
@pytest.mark.parametrize("K", [64, 128])
def test_gpu_plain_triton(K):
    inputs, sequences = make([70, 1, 129], H=2, K=K, V=64, dtype=torch.bfloat16)
    check(inputs, sequences, SOFTPLUS, 7e-3, 1e-2, loose=3e-2)


@gpu
@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 127, 1000])
def test_gpu_lengths(T):
    inputs, sequences = make([T], H=5, K=128, V=128, dtype=torch.bfloat16)
    o, final = kernels.kda(*inputs[:7], SAFE, inputs[7], sequences)
    o_exact, final_exact, _ = recurrence(*(x.cpu() for x in inputs), SAFE, sequences)
    assert error(o, o_exact) < 7e-3
    assert error(final, final_exact) < 7e-3


@gpu
def test_gpu_same_bits_cut_packed_repeated_and_replayed():
    inputs, whole = make([1000], H=3, K=128, V=128, dtype=torch.bfloat16)
    *x, A_log, dt_bias, initial = inputs
    o, final = kernels.kda(*x, A_log, dt_bias, SAFE, initial, whole)
    state, pieces = initial, []
    for a, b in ((0, 192), (192, 1000)):
        piece, state = kernels.kda(
            *(y[a:b] for y in x), A_log, dt_bias, SAFE, state, Sequences.from_lengths([b - a], [a], "cuda")
        )
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces), o)
    assert torch.equal(state, final)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_graph, final_graph = kernels.kda(*x, A_log, dt_bias, SAFE, initial, whole)
    for _ in range(2):
        graph.replay()
        assert torch.equal(o_graph, o)
        assert torch.equal(final_graph, final)

    def gradients():
        leaves = [y.clone().requires_grad_() for y in inputs]
        kernels.kda(*leaves[:7], SAFE, leaves[7], whole)[0].float().square().sum().backward()
        return [y.grad for y in leaves]

    first = gradients()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@gpu
def test_gpu_segmented_close_to_serial():
    inputs, sequences = make([3000, 100], [500, 0], H=2, K=128, V=128, kind="slow", dtype=torch.bfloat16)
    serial = kernels.kda(*inputs[:7], SAFE, inputs[7], sequences)
    tiled = kernels.kda(*inputs[:7], SAFE, inputs[7], sequences, scan="segmented")
    # Same operands, another order of bfloat16 roundings.
    assert error(tiled[0], serial[0]) < 7e-3
    assert error(tiled[1], serial[1]) < 7e-3


@gpu
def test_gpu_a_million_tokens():
    inputs, sequences = make([1 << 20], H=32, K=128, V=128, dtype=torch.bfloat16)
    o, final = kernels.kda(*inputs[:7], SAFE, None, sequences)
    tail = 512
    start = (1 << 20) - tail
    x = [y[-tail:] for y in inputs[:5]]
    short = kernels.kda(*x, *inputs[5:7], SAFE, None, Sequences.from_lengths([tail], [start], "cuda"))
    # With these decays nothing of the first million tokens is left after a few hundred.
    assert error(o[-64:], short[0][-64:]) < 1e-3
    assert error(final, short[1]) < 1e-3
