"""MLA at Kimi-K3 widths on one GPU: varlen attention (192-wide keys, 128-wide values) and paged latent decode.

Attention is counted on real FLOPs: 2 (192 + 128) a visible pair forward, 2 (3 x 192 + 2 x 128) backward. 65536 tokens
run with 16 heads of the 96 to save time. Decode moves 1152 bytes a cached token (576 in fp8) and multiplies
2 (576 + 512) a head and token: at 96 heads both floors meet. Peers: cuDNN and FlashAttention-2 inside torch, and
FlashMLA's dense decode for Hopper where it can be imported (the wheel sgl-flash-mla has it).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as nnf
from modules_timing import figures, rounds

from perilune.ops.mla import attention, choose_split, paged_attention
from perilune.ops.sequences import Sequences

HEADS, WIDTH, VALUES, ROW, RANK, PAGE = 96, 192, 128, 576, 512, 64
SCALE = WIDTH**-0.5
TRAINING = [([8192], 96), ([1024, 300, 2048, 17, 1800, 3003], 96), ([65536], 16)]
DECODE = [(n, context) for context in (8192, 131072, 1 << 20) for n in (1, 8, 64) if n * context <= 1 << 24]
aten = torch.ops.aten


def draw(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_()


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Sequences) -> torch.Tensor:
    """cuDNN through torch's SDPA, one document."""
    if cut.count != 1:
        raise ValueError("one document only")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        x = (y.transpose(0, 1)[None] for y in (q, k, v))
        return nnf.scaled_dot_product_attention(*x, is_causal=True, scale=SCALE)[0].transpose(0, 1)


def flash2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Sequences) -> torch.Tensor:
    """FlashAttention-2 through torch's varlen attention, values padded to 192."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(cut.lengths)
    padded = nnf.pad(v, (0, WIDTH - VALUES))
    o = varlen_attn(q, k, padded, cut.cu_seqlens, cut.cu_seqlens, longest, longest, window_size=(-1, 0), scale=SCALE)
    return o[..., :VALUES]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Sequences) -> torch.Tensor:
    return attention(q, k, v, cut, cut, SCALE)[0]


PEERS: dict[str, Callable[..., torch.Tensor]] = {
    "perilune": ours,
    "torch cuDNN": cudnn,
    "torch FlashAttention-2": flash2,
}


def attention_rows(lengths: Sequence[int], heads: int) -> list[dict[str, object]]:
    cut = Sequences.from_lengths(lengths, device="cuda")
    q, k, v = (draw(cut.total, heads, w).requires_grad_() for w in (WIDTH, WIDTH, VALUES))
    d_o = draw(cut.total, heads, VALUES)
    pairs = sum(n * (n + 1) // 2 for n in lengths) * heads

    def forward(peer: Callable[..., torch.Tensor]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                peer(q, k, v, cut)

        return run

    def step(peer: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(peer(q, k, v, cut), (q, k, v), d_o)

    case = f"documents {list(lengths)}, {heads} heads"
    once, both = 2 * (WIDTH + VALUES) * pairs, 2 * (4 * WIDTH + 3 * VALUES) * pairs
    out = figures("mla", f"attention forward, {case}", rounds({n: forward(p) for n, p in PEERS.items()}, 5), once)
    times = rounds({n: step(p) for n, p in PEERS.items()}, 5)
    return out + figures("mla", f"attention forward + backward, {case}", times, both)


def flash_mla(
    q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, drafts: int
) -> Callable[[], object]:
    """FlashMLA on the same tensors; its schedule is made in the first call and kept."""
    from flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_with_kvcache

    schedule = FlashMLASchedMeta()
    q = q.view(len(lengths), drafts, *q.shape[1:])
    options = {"softmax_scale": SCALE, "causal": drafts > 1, "use_legacy": True}
    return lambda: flash_mla_with_kvcache(q, pages[:, :, None], table, lengths, RANK, schedule, **options)


def decode_rows(count: int, context: int, heads: int, drafts: int, dtype: torch.dtype) -> list[dict[str, object]]:
    needed = context // PAGE
    pages = draw(count * needed, PAGE, ROW).to(dtype)
    table = torch.randperm(count * needed, device="cuda").to(torch.int32).view(count, needed)
    lengths = torch.full((count,), context, dtype=torch.int32, device="cuda")
    q = draw(count * drafts, heads, ROW)
    split = choose_split(count, context, drafts * heads)
    calls: dict[str, Callable[[], object]] = {
        "perilune": lambda: paged_attention(q, pages, table, lengths, SCALE, drafts, split=split)
    }
    if dtype == torch.bfloat16 and importlib.util.find_spec("flash_mla"):
        calls["FlashMLA"] = flash_mla(q, pages, table, lengths, drafts)
    flop = 2 * (ROW + RANK) * heads * drafts * count * context
    case = f"decode, {count} sequences of {context} tokens, {heads} heads, {drafts} drafts, {str(dtype)[6:]} rows"
    times = rounds(calls, 7, graph=True)
    return figures("mla", case, times, flop, count * context * ROW * pages.element_size(), note=f"split {split}")


def rows(device: torch.device) -> Iterator[dict[str, object]]:
    """Every figure, one dict an implementation and case."""
    with torch.cuda.device(device):
        for lengths, heads in TRAINING:
            yield from attention_rows(lengths, heads)
            torch.cuda.empty_cache()
        for count, context in DECODE:
            yield from decode_rows(count, context, HEADS, 1, torch.bfloat16)
        for heads, drafts, dtype in (
            (32, 1, torch.bfloat16),
            (HEADS, 2, torch.bfloat16),
            (HEADS, 1, torch.float8_e4m3fn),
        ):
            yield from decode_rows(64, 8192, heads, drafts, dtype)
