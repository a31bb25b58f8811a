"""MXFP4 weights on one GPU: products through packed experts, the passes that round and decode, and a training step.

    python bench/mx.py [--only gemm rates fp8 step] [--rounds 15] [--out bench/results/mx.json] [--plot docs/img/mx.png]

gemm: 112 experts of Kimi-K3 (latent 3584, width 3072, 16 choices a token), gate, up, activation and down, packed
against bfloat16 and against torch's `grouped_mm`. Up to 64 tokens calls are replayed from a CUDA graph, so that
launches do not count. The floor is the larger of bytes over the bandwidth and operations over the rate that a copy
and a large product reach in the same run. fp8, step: see mx_fp8.py, mx_step.py. All take turns; medians, fastest and
slowest in ms.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import mx_fp8
import mx_step
import torch
import torch.nn.functional as nnf
import triton
from modules_timing import rounds

from perilune.config import Activation
from perilune.ops import moe, mx
from perilune.ops.activation import glu
from perilune.ops.moe import Dense, Packed

EXPERTS, LATENT, WIDTH, TOP_K = 112, 3584, 3072, 16
SITU = Activation("situ", 4.0, 25.0)
PARTS = ("gemm", "rates", "fp8", "step")


def weights() -> tuple[Packed, Dense]:
    """The same experts as codes and as bfloat16 numbers."""

    def made(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return mx.encode_mxfp4(torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02))

    packed = Packed(*made(EXPERTS, 2 * WIDTH, LATENT), *made(EXPERTS, LATENT, WIDTH))
    gate_up = mx.decode_mxfp4(packed.gate_up_codes, packed.gate_up_scales, torch.bfloat16)
    return packed, Dense(gate_up, mx.decode_mxfp4(packed.down_codes, packed.down_scales, torch.bfloat16))


def peak() -> dict[str, float]:
    """TB/s of a copy and TFLOP/s of a product of bfloat16 matrices."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    big = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(big)
    times = rounds({"copy": lambda: other.copy_(big), "product": lambda: a @ a}, 11)
    found = {name: float(t["ms"]) for name, t in times.items()}
    return {"TB/s": 2 * 2**31 / found["copy"] / 1e9, "TFLOP/s": 2 * 8192**3 / found["product"] / 1e9}


def gemm(tokens: int, packed: Packed, dense: Dense, count: int, rates: dict[str, float]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.multinomial(torch.ones(tokens, EXPERTS), TOP_K, generator=generator).flatten()
    per_expert = torch.bincount(ids, minlength=EXPERTS)
    offs, rows, used = per_expert.cumsum(0).int().cuda(), tokens * TOP_K, int((per_expert > 0).sum())
    x = torch.randn(rows, LATENT, device="cuda").bfloat16()

    def peer() -> torch.Tensor:
        gate, up = nnf.grouped_mm(x, dense.gate_up_E2FL.transpose(1, 2), offs=offs).chunk(2, -1)
        return nnf.grouped_mm(glu(gate.contiguous(), up.contiguous(), SITU), dense.down_ELF.transpose(1, 2), offs=offs)

    def only_up() -> torch.Tensor:
        return nnf.grouped_mm(x, dense.gate_up_E2FL.transpose(1, 2), offs=offs)

    calls = {
        "packed": lambda: moe.experts(x, packed, offs, SITU, clean=False),
        "bf16": lambda: moe.experts(x, dense, offs, SITU, clean=False),
        "grouped_mm": peer,
        "packed gate and up": lambda: moe.gate_up_product(x, packed, offs),
        "bf16 gate and up": lambda: moe.gate_up_product(x, dense, offs),
        "grouped_mm gate and up": only_up,
    }
    with torch.no_grad():
        a, b = calls["packed"]().float(), calls["bf16"]().float()
        times = rounds(calls, count, graph=tokens <= 64)
    number = used * 3 * LATENT * WIDTH
    moved = rows * 2 * (2 * LATENT + 2 * WIDTH)
    flop = 2 * rows * 3 * LATENT * WIDTH
    floors = {
        name: max((number * bits / 8 + moved) / rates["TB/s"], flop / rates["TFLOP/s"]) / 1e9
        for name, bits in (("packed", 4.25), ("bf16", 16))
    }
    return {
        "tokens": tokens,
        "rows": rows,
        "experts_used": used,
        "rows_an_expert": [int(per_expert[per_expert > 0].min()), int(per_expert.max())],
        "times": times,
        "floor_ms": floors,
        "weight_bytes": {"packed": number * 4.25 / 8, "bf16": 2 * number},
        "difference": float((a - b).norm() / b.norm()),
    }


def passes(packed: Packed, dense: Dense, count: int) -> dict[str, Any]:
    """TB/s of the passes over a layer's gate and up weights, each byte counted once read and once written."""
    w, n = dense.gate_up_E2FL, dense.gate_up_E2FL.numel()
    codes = (packed.gate_up_codes, packed.gate_up_scales)
    out = torch.empty_like(w)
    calls = {
        "fake_quantize": lambda: mx.fake_quantize(w, "mxfp4", out=out),
        "encode": lambda: mx.encode_mxfp4(w),
        "decode": lambda: mx.decode_mxfp4(*codes, torch.bfloat16),
    }
    moved = {"fake_quantize": 4 * n, "encode": 2.53125 * n, "decode": 2.53125 * n}
    return {name: t | {"TB/s": moved[name] / float(t["ms"]) / 1e9} for name, t in rounds(calls, count).items()}


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Times over tokens, and what bytes and operations alone would take."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4.2))
    rows = sorted(rows, key=lambda row: int(row["tokens"]))
    tokens = [row["tokens"] for row in rows]
    for name, color in (("packed", "C0"), ("bf16", "C1"), ("grouped_mm", "C2")):
        axes.plot(tokens, [row["times"][name].get("ms") for row in rows], marker="o", color=color, label=name)
    for name, color in (("packed", "C0"), ("bf16", "C1")):
        floors = [row["floor_ms"][name] for row in rows]
        axes.plot(tokens, floors, linestyle=":", color=color, label=f"floor of {name}: bytes or operations")
    title = "112 experts of Kimi-K3: gate, up, activation, down"
    axes.set(xscale="log", yscale="log", xlabel="tokens, 16 choices each", ylabel="ms", title=title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("bench/results/mx.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/img/mx.png"))
    mx_step.add_arguments(parser)
    args = parser.parse_args()
    facts: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    facts |= {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "date": datetime.date.today().isoformat(),
        "shapes": {"experts": EXPERTS, "latent": LATENT, "expert_width": WIDTH, "top_k": TOP_K},
        "peak": peak(),
    }
    print(facts["peak"], flush=True)

    def keep(name: str, found: object) -> None:
        facts[name] = found
        args.out.write_text(json.dumps(facts, indent=1) + "\n")

    if {"gemm", "rates", "fp8"} & set(args.only):
        packed, dense = weights()
        if "rates" in args.only:
            keep("rates", passes(packed, dense, args.rounds))
            print(facts["rates"], flush=True)
        rows: list[dict[str, Any]] = []
        for tokens in args.tokens if "gemm" in args.only else ():
            rows.append(gemm(tokens, packed, dense, args.rounds, facts["peak"]))
            print(json.dumps(rows[-1]), flush=True)
            keep("gemm", rows)
        if "fp8" in args.only:
            keep("fp8", mx_fp8.run((1024, 8192), packed, dense, args.rounds))
            print(json.dumps(facts["fp8"]), flush=True)
        del packed, dense
        torch.cuda.empty_cache()
        if rows:
            plot(rows, args.plot)
    if "step" in args.only:
        keep("step", mx_step.run(args))
        print(facts["step"], flush=True)


if __name__ == "__main__":
    main()
