"""Gradients through the softplus gate on Hopper, where the CUDA C++ kernel of B3 does them, steep or not."""

from itertools import pairwise

import pytest
import torch
from kda_kernels import NAMES, SOFTPLUS, error, gpu, kernels, recurrence, run
from kda_steep import KINDS, compare, softplus_inputs, steep_warps

from perilune.ops.kda import Raw, gradients_cuda
from perilune.ops.kda.triton_backward import entry_states, gradients_name, reverse_scan
from perilune.ops.kda.triton_forward import prepare

SIZES = {"H": 3, "K": 128, "V": 128, "dtype": torch.bfloat16}
LENGTHS, STARTS = [70, 0, 1, 129, 63], [0, 0, 5, 100, 64]  # documents that begin and end inside chunks

pytestmark = gpu


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("gradients.cu needs Hopper")


def as_inputs(tensors, sequences):
    x = kernels.inputs(Raw(*tensors[:7]), SOFTPLUS, sequences)
    assert gradients_name(x) == "cuda"
    return x


def backward(tensors, sequences, d_o):
    """K1, K2, B2 and B3 one after the other, as autograd does them."""
    x = as_inputs(tensors, sequences)
    p = prepare(x)
    S, U = entry_states(x, p, tensors[7])
    _, dS, dU = reverse_scan(x, p, d_o, None, None, None)
    return gradients_cuda.gradients(x, p.A, p.norms, S, U, dS, dU, d_o)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator(device="cuda").manual_seed(3), device="cuda")


@pytest.mark.parametrize("save", ["inputs", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_gradients(kind, save):
    """Against the float64 recurrence; the forward is not the same everywhere, so its error is asserted too."""
    inputs, sequences = softplus_inputs(kind, LENGTHS, STARTS, **SIZES)
    as_inputs(inputs, sequences)
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    o, final = run(ours, SOFTPLUS, sequences, save=save)
    o_exact, final_exact, _ = recurrence(*exact, SOFTPLUS, sequences)
    assert error(o, o_exact) < 2e-2
    d_o, d_final = draw(*o.shape), 0.1 * draw(*final.shape)
    ((o.float() * d_o).sum() + (final * d_final).sum()).backward()
    ((o_exact * d_o.double()).sum() + (final_exact * d_final.double()).sum()).backward()
    loose = {"v": 3e-2, "beta": 3e-2}
    if kind == "similar":  # (I + L)^-1 amplifies what bfloat16 loses
        loose |= {"q": 3e-2, "g": 3e-2, "dt_bias": 3e-2, "A_log": 3e-2}
    compare([x.grad for x in ours], exact, SOFTPLUS, loose)


def test_gpu_close_to_the_triton_form(monkeypatch):
    """More chunks than multiprocessors. The Triton form rounds dG before it sums it: dg and dt_bias are less exact."""
    inputs, sequences = softplus_inputs("jumps", [1500, 1], [0, 9], **{**SIZES, "H": 32})
    d_o = draw(*inputs[2].shape).bfloat16()

    def autograd():
        leaves = [x.clone().requires_grad_() for x in inputs]
        (run(leaves, SOFTPLUS, sequences)[0] * d_o).sum().backward()
        return dict(zip(NAMES, (x.grad for x in leaves), strict=True))

    cuda = autograd()
    monkeypatch.setattr(gradients_cuda, "why_not", lambda x: "for the test")
    triton = autograd()
    for name in ("q", "k", "v", "g", "beta", "dt_bias"):
        assert error(cuda[name], triton[name]) < {"g": 3e-2, "dt_bias": 0.15}.get(name, 1e-2), name


def test_gpu_packing_changes_no_bit():
    inputs, sequences = softplus_inputs("some channels", LENGTHS, STARTS, **SIZES)
    d_o = draw(*inputs[2].shape).bfloat16()
    together = backward(inputs, sequences, d_o)
    ends = sequences.offsets
    for n, (a, b) in enumerate(pairwise(ends)):
        if a == b:
            continue
        part = type(sequences).from_lengths([b - a], [sequences.starts[n]], "cuda")
        mine = [*(x[a:b] for x in inputs[:5]), *inputs[5:7], inputs[7][n : n + 1]]
        alone = backward(mine, part, d_o[a:b])
        assert all(torch.equal(x, y[a:b]) for x, y in zip(alone[:5], together[:5], strict=True))


@pytest.mark.parametrize("kind", ["random", "some channels", "jumps"])
def test_gpu_repeated(kind):
    inputs, sequences = softplus_inputs(kind, [3000, 500], [0, 100], **{**SIZES, "H": 8})
    d_o = draw(*inputs[2].shape).bfloat16()
    first = backward(inputs, sequences, d_o)
    for _ in range(20):
        again = backward(inputs, sequences, d_o)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gpu_replayed_on_inputs_that_are_steep_elsewhere():
    inputs, sequences = softplus_inputs("some channels", LENGTHS, STARTS, **SIZES)
    d_o = draw(*inputs[2].shape).bfloat16()
    backward(inputs, sequences, d_o)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(inputs, sequences, d_o)
    for seed, kind in enumerate(("random", "jumps", "one token")):
        for x, new in zip(inputs, softplus_inputs(kind, LENGTHS, STARTS, seed, **SIZES)[0], strict=True):
            x.copy_(new)
        graph.replay()
        eager = backward(inputs, sequences, d_o)
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True)), kind


def test_gpu_nothing_outside_is_touched():
    """q, k, g and beta inside larger tensors of NaN."""
    inputs, sequences = softplus_inputs("jumps", LENGTHS, STARTS, **SIZES)
    d_o = draw(*inputs[2].shape).bfloat16()

    def inside(x):
        wide = torch.full((x.shape[0] + 6, 5, *x.shape[2:]), torch.nan, device="cuda", dtype=x.dtype)
        wide[3:-3, 1:4] = x
        return wide[3:-3, 1:4]

    views = [inside(x) if i in (0, 1, 3, 4) else x for i, x in enumerate(inputs)]
    for a, b in zip(backward(views, sequences, d_o), backward(inputs, sequences, d_o), strict=True):
        assert torch.equal(a, b)


def test_gpu_all_of_a_long_document_steep():
    """Ordinary gates beside others that wipe their channel at every token."""
    inputs, sequences = softplus_inputs("random", [4096], [0], **SIZES)
    inputs[3][:, :, ::2] = 40.0
    assert steep_warps(inputs, sequences) == 1.0
    found = backward(inputs, sequences, draw(*inputs[2].shape).bfloat16())
    assert all(torch.isfinite(x.float()).all() for x in found)
