"""Every Triton kernel where its tensors have more than 2^31 elements: 1,000,000 tokens of 96 heads of 128 are 1.2e10.

Small calls in Triton's interpreter, each of whose launches runs a second time far away (`far`), to the same bits.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from triton_cpu import CUDA

pytestmark = [
    pytest.mark.skipif(CUDA, reason="runs in Triton's interpreter"),
    # Above the diagonal, where it is selected away.
    pytest.mark.filterwarnings("ignore:.*encountered in matmul"),
]

from far import everything_again, key, programs, stretch  # noqa: E402
from far_places import NEAR, PLACES  # noqa: E402
from kda_decode_world import Kernel as DecodeKernel  # noqa: E402
from kda_decode_world import World  # noqa: E402
from kda_kernels import SAFE, SOFTPLUS, make, run  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import perilune.ops  # noqa: E402
from perilune.config import Activation  # noqa: E402
from perilune.ops import activation_triton, few_triton  # noqa: E402
from perilune.ops.attnres import triton as attnres  # noqa: E402
from perilune.ops.attnres import triton_inference as attnres_inference  # noqa: E402
from perilune.ops.conv import triton as conv  # noqa: E402
from perilune.ops.kda import decode_triton  # noqa: E402
from perilune.ops.mla import triton_paged, triton_varlen  # noqa: E402
from perilune.ops.moe import triton_launch, triton_product, triton_routing  # noqa: E402
from perilune.ops.norm import triton as norm  # noqa: E402
from perilune.ops.sequences import Sequences  # noqa: E402

ACTIVATION = Activation("situ")
TRIED: set[str] = set()


def rand(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_(grad)


def norms() -> None:
    x, added, gate, w = rand(40, 32, grad=True), rand(40, 32), rand(40, 32), rand(32)
    norm.gated_rms_norm(x, w, gate.requires_grad_(), 1e-5).sum().backward()
    total, y = norm.add_rms_norm(x, added, w, 1e-5)
    (total * y).sum().backward()


def activations() -> None:
    gate, up = rand(3, 40), rand(3, 40)
    activation_triton.glu_forward(gate, up, ACTIVATION)
    activation_triton.glu_backward(rand(3, 40), gate, up, ACTIVATION)


def few_rows() -> None:
    few_triton.multiply_few(rand(2, 32), rand(8, 32))
    few_triton.glu_few(rand(2, 32), rand(8, 32), rand(8, 32), ACTIVATION)


def convolutions() -> None:
    """Of spans of eight tokens (see `short_spans`)."""
    u, window = rand(7, 32, grad=True), rand(3, 3, 32, grad=True)
    y, after = conv.short_conv(u, rand(32, 4, grad=True), Sequences.from_lengths([4, 1, 2]), window)
    (y.square().sum() + after.square().sum()).backward()


def mixtures() -> None:
    sources = [rand(2, 32, grad=True) for _ in range(2)]
    x, chained = attnres.mix_norm(sources, rand(32), rand(32), 1e-5, rand(32), 1e-5)
    (x.square().sum() + chained[0].sum() + chained[1].sum()).backward()


@torch.no_grad()
def mixtures_in_two_passes() -> None:
    weights = [rand(32) for _ in range(3)]
    partial = attnres_inference.mix_completed([rand(2, 32), rand(2, 32)], weights, weights[::-1], 1e-5)[1]
    attnres_inference.merge_norm(partial, rand(2, 32), rand(32), rand(32), 1e-5, rand(32), 1e-5)


def kda_chunks() -> None:
    inputs, sequences = make([2], [63], H=2, K=16, V=16)
    leaves = [x.requires_grad_() for x in inputs]
    o, final, states = run(leaves, SAFE, sequences, checkpoints=((64,),), save="all")
    (o.square().sum() + final.square().sum() + states.square().sum()).backward()


def kda_chunks_softplus_and_tiles() -> None:
    inputs, sequences = make([2], [1023], H=1, K=16, V=16)
    leaves = [x.requires_grad_() for x in inputs]
    run(leaves, SOFTPLUS, sequences, scan="segmented", save="all")[0].square().sum().backward()


def decoding() -> None:
    world = World(DecodeKernel("triton", "cpu", 16, decode_triton))
    slots = world.slots = world.slots[1:]  # padding, and one
    inputs = world.tokens(2)
    world.kernel.step(inputs, world.weights, world.matrix, world.window, slots, 2, world.lengths(0, 2))
    decode_triton.shift_window(inputs, world.window, slots, world.lengths(0, 1), 2)
    tail = world.tail()
    for ring in vars(tail).values():
        ring.normal_()
    lengths = world.lengths(0, 17)
    world.kernel.tail_step(world.tokens(), world.weights, world.matrix, world.window, tail, lengths, slots)
    decode_triton.fold(world.matrix, tail, world.lengths(0, 66), slots, None, slots, SAFE)


def varlen_attention() -> None:
    q, k, v = rand(5, 2, 32, grad=True), rand(9, 2, 32, grad=True), rand(9, 2, 16, grad=True)
    cut = Sequences.from_lengths([2, 3]), Sequences.from_lengths([2, 7])
    triton_varlen.attention(q, k, v, *cut, 0.2, True)[0].square().sum().backward()


def paged_attention() -> None:
    pages, table = rand(4, 16, 32), torch.tensor([[2, 0, 3, 1, 2], [1, -1, -1, -1, -1]], dtype=torch.int32)
    triton_paged.append_rows_inplace(pages, rand(3, 32), torch.tensor([17, -1, 40]), 1.0)
    lengths = torch.tensor([70, 9], dtype=torch.int32)
    triton_paged.paged_attention(rand(4, 2, 32), pages, table, lengths, 0.2, 2, 16, 1.0, 64)


def routing() -> None:
    logits = rand(3, 8, grad=True)
    routed = triton_routing.route(logits, rand(8), 2, 1.0, True)
    (routed.weights_TJ.square().sum() + routed.scores_TE.sum()).backward()
    order_R, _ = triton_routing.permute(routed.ids_TJ, 8)
    rows_RL = triton_routing.spread(rand(3, 32), order_R, 2)
    row_TJ = triton_routing.row_of_choice(order_R).view(3, 2)
    triton_routing.gather_sum(rows_RL, row_TJ, routed.weights_TJ.detach())
    triton_routing.gather_sum_backward(rand(3, 32), rows_RL, order_R, routed.weights_TJ.detach())


def sorting() -> None:
    """By blocks of 16 choices (see `small_blocks`)."""
    triton_routing.permute(torch.randint(0, 512, (20, 2)), 512)


def expert_activations() -> None:
    h, w, ends = rand(5, 64), rand(5), torch.tensor([2, 5], dtype=torch.int32)
    triton_launch.glu_forward(h, ends, ACTIVATION, w)
    triton_launch.glu_backward(rand(5, 32), h, ends, ACTIVATION, w, True)
    triton_launch.zero_tail(rand(7, 32), ends)


CASES = (
    *(norms, activations, few_rows, convolutions, mixtures, mixtures_in_two_passes),
    *(kda_chunks, kda_chunks_softplus_and_tiles, decoding, varlen_attention, paged_attention),
    *(routing, sorting, expert_activations),
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time over every token of a span."""
    for module, name, value in (
        (conv, "TOKENS", 8),
        (conv, "SPAN", 8),
        (triton_routing, "ONE_BLOCK", 0),
        (triton_routing, "BLOCK", 16),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_far_away(case) -> None:
    with everything_again(PLACES, TRIED):
        case()


@pytest.mark.parametrize("strides", [(1 << 26, 16, 1), (1, 1 << 10, 1 << 28)], ids=["tokens", "channels"])
def test_kda_of_numbers_that_lie_far_apart(strides: tuple[int, int, int]) -> None:
    """Tokens 2^26 numbers apart, or channels 2^28: offsets inside a chunk pass 2^31."""
    inputs, sequences = make([33], H=2, K=16, V=16)
    leaves = [x.requires_grad_() for x in inputs]
    o, _ = run(leaves, SAFE, sequences)
    grads = torch.autograd.grad(o.square().sum(), leaves)
    apart = []
    for x in leaves[:4]:
        reach = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) + 1
        y = stretch(torch.float32, reach).as_strided(x.shape, strides)
        with torch.no_grad():
            apart.append(y.copy_(x))
    again = [x.requires_grad_() for x in (*apart, *leaves[4:])]
    o_again, _ = run(again, SAFE, sequences)
    assert torch.equal(o_again, o)
    with torch.no_grad():
        d_o = stretch(torch.float32, (1 << 26) * 33).as_strided(o.shape, (1 << 26, 16, 1)).copy_(2 * o)
    for a, b in zip(torch.autograd.grad(o_again, again, d_o), grads, strict=True):
        assert torch.equal(a, b)


def test_products_of_far_rows_and_experts() -> None:
    """Rows of the second expert, behind 2^26 of the first; the last tile of a second expert of 2^32 weights."""
    ahead, rows, K, G = 1 << 26, 5, 32, 32
    x = stretch(torch.float32, (ahead + rows) * K)[: (ahead + rows) * K].view(-1, K)
    y = stretch(torch.float32, (ahead + rows) * G)[: (ahead + rows) * G].view(-1, G)
    x[ahead:], weight = rand(rows, K), rand(2 * G, K)
    ends = torch.tensor([ahead, ahead + rows], dtype=torch.int32)
    given = TensorDescriptor.from_tensor(x, [16, 32]), TensorDescriptor.from_tensor(weight, [32, 32])
    sizes = {"K": K, "BE": 2, "BM": 16, "BK": 32, "SWAP": False, "STAGES": 1}
    with programs((ahead // 16, 0, 0)):
        triton_product.product_kernel[(1,)](*given, None, y, ends, 2, G=G, BG=32, TURNED=False, BAND=16, **sizes)
    # Sums of 32 fp32 products in another order.
    torch.testing.assert_close(y[ahead:], x[ahead:] @ weight[G:].T, rtol=1e-5, atol=1e-5)

    a, h = (stretch(torch.float32, (ahead + rows) * n)[: (ahead + rows) * n].view(-1, n) for n in (16, 32))
    gate_up, w = TensorDescriptor.from_tensor(weight, [16, 32]), stretch(torch.float32, ahead + rows)
    w[ahead : ahead + rows] = rand(rows)
    with programs((ahead // 16, 0, 0)):
        triton_product.glu_product_kernel[(1,)](
            given[0], gate_up, w, h, a, ends, 2, 4.0, 25.0, F=16, BF=16, SITU=False, WEIGHTED=True, KEEP=True, **sizes
        )  # fmt: skip
    torch.testing.assert_close(h[ahead:], y[ahead:], rtol=1e-5, atol=1e-5)
    gate, up = h[ahead:].chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up * w[ahead : ahead + rows, None]
    torch.testing.assert_close(a[ahead:], expected, rtol=1e-5, atol=1e-5)

    wide = 1 << 16
    d, x = rand(16, wide), rand(16, wide)
    dw = stretch(torch.float32, 2 * wide * wide)[: 2 * wide * wide].view(2, wide, wide)
    given = TensorDescriptor.from_tensor(d, [16, 64]), TensorDescriptor.from_tensor(x, [16, 64])
    with programs((2 * (wide // 64) ** 2 - 1, 0, 0)):
        triton_product.weight_gradient_kernel[(1,)](
            *given, dw, torch.tensor([0, 3], dtype=torch.int32), 2,
            G=wide, K=wide, BE=2, BG=64, BK=64, BR=16, SKIP=False, STAGES=1,
        )  # fmt: skip
    torch.testing.assert_close(dw[1, -64:, -64:], d[:3, -64:].T @ x[:3, -64:], rtol=1e-5, atol=1e-5)


def test_every_kernel_is_tried_or_says_why_not() -> None:
    kernels = set()
    for module in pkgutil.walk_packages(perilune.ops.__path__, "perilune.ops."):
        if "triton" in module.name and "hopper" not in module.name and ".mx" not in module.name:
            functions = vars(importlib.import_module(module.name)).values()
            kernels |= {key(f.fn) for f in functions if isinstance(f, interpreter.InterpretedFunction)}
    kernels = {name for name in kernels if name.endswith("_kernel")}
    assert kernels == PLACES.keys() | NEAR.keys()
    assert not PLACES.keys() & NEAR.keys()
