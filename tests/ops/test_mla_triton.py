"""MLA's Triton kernels against float64 references: in the interpreter (fp32), on a GPU in shipped dtypes and widths.

In the interpreter products are fp32, so 2e-6 (relative Frobenius) checks the mathematics. On the GPU weights and
outputs are rounded to bf16 (2^-9 each): 5e-3 forward, 1e-2 gradients; the log-sum-exp comes from fp32 sums of bf16
products: 2e-5 absolute.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

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

from perilune.ops.mla import append_rows_inplace, attention, gather_rows, paged_attention, prefix_attention  # noqa: E402
from perilune.ops.mla import paged_reference as paged_spec  # noqa: E402
from perilune.ops.mla import reference as spec  # noqa: E402
from perilune.ops.mla import triton_paged as paged  # noqa: E402
from perilune.ops.mla import triton_varlen as varlen  # noqa: E402
from perilune.ops.mla.paged import implementation as paged_implementation  # noqa: E402
from perilune.ops.mla.varlen import implementation  # noqa: E402

interpreted = pytest.mark.skipif(CUDA, reason="runs in Triton's interpreter")
gpu = pytest.mark.gpu
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN = float("nan")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def error(a, b):
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().norm().cpu()).item()


# Varlen attention


def make(queries, keys, H, Q, V, dtype, seed=0):
    """q, k, v as the model has them: v is a view of a wider tensor."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    q, k = (torch.randn(n, H, Q, generator=g, device=DEVICE) for n in (sum(queries), sum(keys)))
    v = torch.randn(sum(keys), H, 2 * V, generator=g, device=DEVICE)[..., V:]
    return [x.to(dtype) for x in (q, k)] + [v.to(dtype)], *(
        Sequences.from_lengths(n, device=DEVICE) for n in (queries, keys)
    )


def check(queries, keys, causal, H, Q, V, dtype, forward, backward, lse_bound, cuda=False):
    inputs, queries, keys = make(queries, keys, H, Q, V, dtype)
    scale = Q**-0.5
    assert varlen.supports(*inputs, scale)
    ours = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    o, lse, largest = varlen.attention(*ours, queries, keys, scale, causal, cuda)
    expected = spec.attention(*exact, queries, keys, scale, causal)
    assert (o.dtype, lse.dtype, largest.dtype) == (dtype, torch.float32, torch.float32)
    assert not lse.requires_grad
    assert not largest.requires_grad
    assert error(o, expected[0]) < forward
    seen = expected[1] > float("-inf")
    assert torch.equal(seen, lse > float("-inf"))
    assert (lse - expected[1])[seen].abs().max() < lse_bound
    assert (largest - expected[2]).abs().max() < lse_bound
    assert o[~seen].count_nonzero() == 0
    d_o = torch.randn(o.shape, generator=torch.Generator(device=DEVICE).manual_seed(1), device=DEVICE)
    got = torch.autograd.grad(o, ours, d_o.to(dtype))
    for name, a, b in zip("qkv", got, torch.autograd.grad(expected[0], exact, d_o.to(dtype).double()), strict=True):
        assert a.dtype == dtype
        assert error(a, b) < backward, name


CUTS = {
    "one": ([70], [70], True),
    "packed": ([5, 0, 64, 1, 66], [5, 0, 64, 1, 66], True),
    "continued": ([3, 0, 33, 1], [40, 9, 100, 67], True),
    "whole": ([66, 3, 4], [9, 0, 70], False),
}


@interpreted
@pytest.mark.parametrize("cut", CUTS)
def test_varlen(cut):
    check(*CUTS[cut], 2, 48, 32, torch.float32, 2e-6, 2e-6, 2e-6)


@interpreted
def test_varlen_width_of_one_part():
    check([33], [70], True, 1, 16, 16, torch.float32, 2e-6, 2e-6, 2e-6)


def poisoned(dtype, Q, V, H, cuda=False):
    """A sequence alone and between NaN neighbours: outputs and gradients must agree to the bit."""
    lengths = [7, 66, 3]
    inputs, cut, _ = make(lengths, lengths, H, Q, V, dtype)
    rows = slice(7, 73)
    alone = [x[rows].detach().clone().requires_grad_() for x in inputs]
    among = [torch.full_like(x, NAN) for x in inputs]
    for x, y in zip(inputs, among, strict=True):
        y[rows] = x[rows]
        y.requires_grad_()
    one = Sequences.from_lengths([66], device=DEVICE)
    first = varlen.attention(*alone, one, one, 0.2, True, cuda)
    second = varlen.attention(*among, cut, cut, 0.2, True, cuda)
    d_o = torch.randn(first[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    d_o_among = torch.full_like(second[0], NAN)
    d_o_among[rows] = d_o
    assert torch.equal(second[0][rows], first[0])
    assert torch.equal(second[1][rows], first[1])
    for a, b in zip(
        torch.autograd.grad(first[0], alone, d_o), torch.autograd.grad(second[0], among, d_o_among), strict=True
    ):
        assert torch.equal(b[rows], a)


@interpreted
def test_varlen_does_not_see_the_neighbours():
    poisoned(torch.float32, 16, 16, 1)


def test_varlen_without_tokens_and_what_it_refuses():
    inputs, cut, _ = make([], [], 2, 48, 32, torch.float32)
    o, lse, largest = varlen.attention(*inputs, cut, cut, 1.0, True)
    assert (o.shape, lse.shape, largest.tolist()) == ((0, 2, 32), (0, 2), [float("-inf")] * 2)
    q, k, v = inputs
    assert varlen.parts(192) == (128, 64)
    assert varlen.parts(200) is None
    assert not varlen.supports(q, k, v, -1.0)
    assert not varlen.supports(q, k.half(), v, 1.0)
    assert not varlen.supports(q.double(), k.double(), v.double(), 1.0)
    assert not varlen.supports(q[..., :40], k[..., :40], v, 1.0)


@gpu
@pytest.mark.parametrize(("kernel", "dtype"), [("triton", BF16), ("triton", torch.float16), ("cuda", BF16)], ids=str)
@pytest.mark.parametrize("cut", [*CUTS, "long"])
def test_gpu_varlen(cut, kernel, dtype):
    queries, keys, causal = CUTS.get(cut, ([300, 1, 1015, 129], [300, 1, 3000, 129], True))
    check(queries, keys, causal, 3, 192, 128, dtype, 5e-3, 1e-2, 2e-5, kernel == "cuda")


@gpu
def test_gpu_varlen_fp32_and_other_widths():
    check([70, 5], [70, 40], True, 2, 192, 128, torch.float32, 3e-6, 5e-6, 1e-5)
    check([300], [300], True, 2, 128, 128, BF16, 5e-3, 1e-2, 2e-5)


@gpu
@pytest.mark.parametrize("kernel", ["triton", "cuda"])
def test_gpu_varlen_does_not_see_the_neighbours(kernel):
    poisoned(BF16, 192, 128, 3, kernel == "cuda")


@gpu
@pytest.mark.parametrize("kernel", ["triton", "cuda"])
def test_gpu_varlen_repeats_and_is_replayed(kernel):
    cuda = kernel == "cuda"
    inputs, cut, _ = make([700, 30], [700, 30], 4, 192, 128, BF16)
    first = varlen.attention(*inputs, cut, cut, 0.07, True, cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = varlen.attention(*inputs, cut, cut, 0.07, True, cuda)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    def gradients():
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(
            varlen.attention(*leaves, cut, cut, 0.07, True, cuda)[0].float().square().sum(), leaves
        )

    expected = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(), strict=True))


# Paged rows


def pool(lengths, dtype, width, tokens, row_scale=1.0, seed=0):
    """Pages in scattered order with NaN wherever nothing may be read; -1 behind a sequence's last page."""
    g = torch.Generator().manual_seed(seed)
    needed = [-(-n // tokens) for n in lengths]
    order = torch.randperm(sum(needed) + 2, generator=g).tolist()
    table = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
    pages = torch.full((len(order), tokens, width), NAN).to(dtype)
    slots = []
    for n, length in enumerate(lengths):
        for m in range(needed[n]):
            table[n, m] = order.pop()
        at = torch.arange(length)
        slots.append(table[n, at // tokens].long() * tokens + at % tokens)
    rows = torch.randn(sum(lengths), width, generator=g)
    paged_spec.append_rows_inplace(pages, rows, torch.cat(slots), row_scale)
    return pages.to(DEVICE), table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def check_paged(
    lengths, dtype, H, drafts, split, bound, lse_bound, width=576, rank=512, tokens=64, row_scale=1.0, cuda=False
):
    pages, table, counts = pool(lengths, dtype, width, tokens, row_scale)
    g = torch.Generator().manual_seed(3)
    half = dtype != torch.float32
    q = torch.randn(len(lengths) * drafts, H, width, generator=g).to(BF16 if half else torch.float32).to(DEVICE)
    scale = width**-0.5
    assert paged.supports(q, pages, rank)
    o, lse = paged.paged_attention(q, pages, table, counts, scale, drafts, rank, row_scale, split, cuda)
    expected = paged_spec.paged_attention(
        q.double(), pages.float().double(), table, counts, scale, drafts, rank, row_scale
    )
    seen = expected[1] > float("-inf")
    assert (o.dtype, lse.dtype) == (q.dtype, torch.float32)
    assert torch.equal(seen, lse > float("-inf"))
    assert error(o, expected[0]) < bound
    assert (lse - expected[1])[seen].abs().max() < lse_bound
    assert o[~seen].count_nonzero() == 0


@interpreted
@pytest.mark.parametrize(("drafts", "split"), [(1, 1024), (1, 64), (3, 64), (16, 1024)])
def test_paged(drafts, split):
    check_paged([37, 0, 1, 16, 130, 3], torch.float32, 5, drafts, split, 1e-6, 2e-6, width=48, rank=32, tokens=16)


@interpreted
def test_paged_rows_without_a_key_part():
    check_paged([20, 1], torch.float32, 2, 1, 64, 1e-6, 2e-6, width=16, rank=16, tokens=32, row_scale=0.5)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_append_is_the_reference(index):
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 24, generator=g).to(DEVICE)
    rows[0, :4] = torch.tensor([1e4, -1e30, NAN, 449.0])
    slots = torch.tensor([9, -1, 31, 0, 8, -1], dtype=index, device=DEVICE)
    # The interpreter cuts bf16 and fp8 instead of rounding them.
    for dtype in (torch.float32, BF16, FP8) if CUDA else (torch.float32,):
        for row_scale in (1.0, 0.25):
            pages = torch.zeros(4, 16, 24, device=DEVICE).to(dtype)
            expected = pages.clone()
            paged.append_rows_inplace(pages, rows[:, :24], slots, row_scale)
            paged_spec.append_rows_inplace(expected, rows, slots, row_scale)
            assert torch.equal(pages.view(torch.uint8), expected.view(torch.uint8))


@gpu
@pytest.mark.parametrize(("H", "drafts"), [(96, 1), (96, 2), (96, 8), (32, 1), (64, 3), (12, 5), (1, 1)])
@pytest.mark.parametrize(
    ("kernel", "dtype", "tokens"),
    [("triton", BF16, 64), ("triton", FP8, 64), ("cuda", BF16, 64), ("cuda", BF16, 128), ("cuda", FP8, 64)],
    ids=str,
)
def test_gpu_paged(kernel, dtype, tokens, H, drafts):
    lengths, cuda = [1000, 1, 0, 64, 2049, 7], kernel == "cuda"
    for split in (4096, 256):
        check_paged(lengths, dtype, H, drafts, split, 6e-3, 3e-5, tokens=tokens, row_scale=0.5, cuda=cuda)


@gpu
def test_gpu_paged_fp32():
    check_paged([300, 0, 65], torch.float32, 12, 2, 64, 2e-6, 1e-5)


@gpu
def test_gpu_paged_does_not_see_the_batch_and_is_replayed():
    lengths = [5000, 1, 0, 300, 4096]
    pages, table, counts = pool(lengths, BF16, 576, 64)
    q = torch.randn(10, 96, 576, generator=torch.Generator().manual_seed(0)).to(DEVICE, BF16)
    o, lse = paged_attention(q, pages, table, counts, 0.05, 2, split=1024)
    for n in range(5):
        rows = slice(2 * n, 2 * n + 2)
        alone = paged_attention(q[rows], pages, table[n : n + 1], counts[n : n + 1], 0.05, 2, split=1024)
        assert torch.equal(alone[0], o[rows])
        assert torch.equal(alone[1], lse[rows])
    graph = torch.cuda.CUDAGraph()
    fresh = torch.randn(10, 576, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)
    slots = torch.full((10,), -1, dtype=torch.int64, device=DEVICE)
    with torch.cuda.graph(graph):
        append_rows_inplace(pages, fresh, slots)
        replayed = paged_attention(q, pages, table, counts, 0.05, 2, split=1024)
    graph.replay()
    assert torch.equal(replayed[0], o)
    # Another step of the same graph: sequence 0 grows shorter, sequence 2 comes to life with sequence 1's page.
    counts.copy_(torch.tensor([64, 1, 2, 300, 0], dtype=torch.int32))
    table[2, 0] = table[1, 0]
    slots[:2] = table[1, 0].long() * 64 + torch.arange(2, device=DEVICE)
    graph.replay()
    eager = paged_attention(q, pages, table, counts, 0.05, 2, split=1024)
    assert torch.equal(replayed[0], eager[0])
    assert replayed[0][8:].count_nonzero() == 0
    assert not replayed[0].isnan().any()


@gpu
def test_gpu_prefix_in_pieces():
    cached, new = [700, 0, 2000], [100, 64, 3]
    pages, table, _ = pool(cached, BF16, 576, 64)
    H = 4
    g = torch.Generator().manual_seed(0)
    kv_b = (torch.randn(H * 256, 512, generator=g) / 23).to(DEVICE, BF16)

    def expand(rows):
        kv = (rows[:, :512] @ kv_b.t()).view(-1, H, 256)
        return torch.cat([kv[..., :128], rows[:, None, 512:].expand(-1, H, -1)], dim=-1), kv[..., 128:]

    q = torch.randn(sum(new), H, 192, generator=g).to(DEVICE, BF16)
    fresh = torch.randn(sum(new), 576, generator=g).to(DEVICE, BF16)
    cut = Sequences.from_lengths(new, cached, device=DEVICE)
    o, lse = prefix_attention(q, *expand(fresh), cut, pages, table, expand, 192**-0.5, piece=512)
    stored = gather_rows(pages, table, Sequences.from_lengths(cached, device=DEVICE), BF16)
    rows = torch.cat([torch.cat(pair) for pair in zip(stored.split(cached), fresh.split(new), strict=True)])
    keys = Sequences.from_lengths([a + b for a, b in zip(cached, new, strict=True)], device=DEVICE)
    k, v = expand(rows)
    expected = spec.attention(q.double(), k.double(), v.double(), cut, keys, 192**-0.5)
    assert error(o, expected[0]) < 6e-3
    assert (lse - expected[1]).abs().max() < 3e-5


@gpu
def test_gpu_public_functions_take_the_kernels_and_refuse_mixed_devices():
    inputs, cut, _ = make([9], [9], 2, 192, 128, BF16)
    cuda = implementation(*inputs) == "cuda"
    assert cuda == (torch.cuda.get_device_capability() == (9, 0))
    assert torch.equal(attention(*inputs, cut, cut, 0.1)[0], varlen.attention(*inputs, cut, cut, 0.1, True, cuda)[0])
    pages, table, counts = pool([9], BF16, 576, 64)
    assert (paged_implementation(inputs[0].new_zeros(1, 2, 576), pages) == "cuda") == cuda
    with pytest.raises(Error, match="table_NM is on cpu; must be on cuda"):
        paged_attention(inputs[0].new_zeros(1, 2, 576), pages, table.cpu(), counts, 0.1)
