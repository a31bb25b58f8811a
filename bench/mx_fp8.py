"""What W4A8 on fp8 tensor cores would give: gate and up of a layer's experts in E4M3; a part of bench/mx.py.

A row's block scales are folded into its elements and one power of two remains, which torch's row-wise scaled grouped
product applies. For weights that is exact while a row's scales lie within 14 binades. An input's element loses bits
where its block's scale is smaller than the row's and it is small itself. Errors are against float64 sums of the exact
products; times do not include bringing weights and inputs into this form.
"""

from __future__ import annotations

from typing import Any

import torch
from modules_timing import rounds

from perilune.ops import moe, mx
from perilune.ops.moe import Dense, Packed

TOP_K = 16


def run(tokens: tuple[int, ...], packed: Packed, dense: Dense, count: int) -> dict[str, Any]:
    """Shares of inexact numbers, errors and times."""
    w, scales = dense.gate_up_E2FL, packed.gate_up_scales
    E, G, K = w.shape
    folded = torch.empty(E, G, K, dtype=torch.float8_e4m3fn, device="cuda")
    unit_EG = 2.0 ** (scales.amax(-1).float() - 127 - 6)  # 6 times the scale is 384 units
    inexact = 0
    for e in range(E):
        folded[e] = (w[e].float() / unit_EG[e, :, None]).to(torch.float8_e4m3fn)
        inexact += int((folded[e].float() * unit_EG[e, :, None] != w[e].float()).sum())
    found: dict[str, Any] = {"weights_inexact": inexact}
    for number in tokens:
        found[str(number)] = _case(number, packed, dense, folded.transpose(1, 2), unit_EG, count)
    return found


def _case(
    tokens: int, packed: Packed, dense: Dense, folded: torch.Tensor, unit_EG: torch.Tensor, count: int
) -> dict[str, Any]:
    w = dense.gate_up_E2FL
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.multinomial(torch.ones(tokens, w.shape[0]), TOP_K, generator=generator).flatten()
    offs = torch.bincount(ids, minlength=w.shape[0]).cumsum(0).int().cuda()
    x = mx.fake_quantize(torch.randn(tokens * TOP_K, w.shape[2], device="cuda").bfloat16(), "mxfp8")
    unit_R = 2.0 ** (mx.encode_mxfp8(x)[1].amax(-1).float() - 127)
    low = (x.float() / unit_R[:, None]).to(torch.float8_e4m3fn)
    lost = low.float() * unit_R[:, None] != x.float()
    calls = {
        "bf16": lambda: moe.gate_up_product(x, dense, offs),
        "packed": lambda: moe.gate_up_product(x, packed, offs),
    }
    for fast in (False, True):
        calls["fp8, fast sums" if fast else "fp8"] = lambda fast=fast: torch._scaled_grouped_mm(
            low, folded, unit_R, unit_EG, offs, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    first = int(offs[0])
    want = x[:first].double() @ w[0].double().t()
    error = {name: float((call()[:first].double() - want).norm() / want.norm()) for name, call in calls.items()}
    return {"inputs_inexact_share": float(lost.float().mean()), "error": error, "times": rounds(calls, count)}
