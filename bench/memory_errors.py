"""What FP8 costs at a width: relative errors of weights' gradients, one tensor in FP8 at a time, and of whole plans.

    python bench/memory_errors.py [--width 1024] [--layers 4] [--tokens 512] [--dtype float32] [--each]
        [--as-wide 7168] [--plans k3 "k3,moe.y=fp8"] [--out FILE]

On a CPU. The proportions are those of bench/memory.py's slice (16 experts, 4 a token), and so are its weights and its
loss. Errors are Frobenius norms against no plan; for bfloat16 also that of another rounding of the whole backward pass.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from statistics import median
from typing import Any

import torch
from memory import plan_of
from memory_device import write
from memory_slice import FP32, QKV

from perilune import ModelConfig, Transformer
from perilune.memory import Memory, MemoryStore, Plan
from perilune.ops.sequences import Sequences

NAMES: tuple[str, ...] = (
    "kda.qkv",
    "kda.o",
    "kda.gate",
    "kda.normed",
    "mla.q",
    "mla.kv",
    "mla.k",
    "mla.o",
    "mlp.gate",
    "mlp.up",
)
NAMES += ("mlp.a", "moe.z", "moe.y", "norm", "stream")


def shape(width: int, layers: int) -> ModelConfig:
    k3 = ModelConfig.from_pretrained("kimi-k3")
    heads = max(1, round(width * 96 / 7168))
    return dataclasses.replace(
        k3,
        vocab_size=1024,
        hidden_size=width,
        num_layers=layers,
        intermediate_size=round(width * 33792 / 7168 / 32) * 32,
        kda=dataclasses.replace(k3.kda, layers=tuple(i for i in range(layers) if i % 4 != 3), num_heads=heads),
        mla=dataclasses.replace(k3.mla, layers=tuple(range(3, layers, 4)), num_heads=heads),
        moe=dataclasses.replace(
            k3.moe, num_experts=16, top_k=4, latent_size=width // 2, expert_size=round(width * 3072 / 7168 / 32) * 32
        ),
        attn_res=dataclasses.replace(k3.attn_res, block_size=2),
        quant=None,
    )


class World:
    """A model with its batch."""

    def __init__(self, width: int, layers: int, tokens: int, dtype: torch.dtype, as_wide: int) -> None:
        config, generator = shape(width, layers), torch.Generator().manual_seed(0)
        std = config.initializer_range * (as_wide / width) ** 0.5
        self.model = Transformer(config)
        for name, parameter in self.model.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if name.endswith(FP32) else dtype)
            if parameter.dim() > 1:
                parameter.data.normal_(0, std, generator=generator)
            else:
                parameter.data.fill_(0.0 if name.endswith("A_log_H") else 1.0)
        for buffer in self.model.buffers():
            buffer.data = torch.zeros_like(buffer, dtype=torch.float32)
        self.tokens = torch.randint(0, config.vocab_size, (tokens,), generator=generator)
        self.sequences = Sequences.from_lengths([tokens // 2, tokens - tokens // 2])
        self.fixed = [*self.model.parameters(), *self.model.buffers(), self.tokens, self.sequences.cu_seqlens]

    def gradients(self, plan: Plan, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.model.zero_grad(set_to_none=True)
        with Memory(plan, self.fixed, MemoryStore()).step():
            x_TD = self.model.hidden(self.tokens, self.sequences).x_TD
            (scale * (x_TD.float() * torch.linspace(-1, 1, x_TD.shape[1])).square().mean()).backward()
        return {n: p.grad.float() / scale for n, p in self.model.named_parameters() if p.grad is not None}


def errors(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The worst of q, k and v, of attention outputs, and of all, each with its weight, and the median."""
    found = {n: float((got[n] - g).norm() / g.norm()) for n, g in exact.items() if float(g.norm()) > 0}
    parts = {"qkv": QKV, "o": ("o_proj",), "any": ("",)}
    row: dict[str, Any] = {
        k: max((e, n) for n, e in found.items() if any(p in n for p in of)) for k, of in parts.items()
    }
    return row | {"median": median(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--as-wide", type=int, help="weights so large that products are as large as at this width")
    parser.add_argument("--each", action="store_true", help="every tensor alone as FP8")
    parser.add_argument("--plans", nargs="*", default=["k3"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    as_wide = args.as_wide or args.width
    world = World(args.width, args.layers, args.tokens, getattr(torch, args.dtype), as_wide)
    exact = world.gradients(Plan())
    found: dict[str, Any] = {key: getattr(args, key) for key in ("width", "layers", "tokens", "dtype")} | {"rows": {}}

    def note(name: str, got: dict[str, torch.Tensor]) -> None:
        row = found["rows"][name] = errors(got, exact)
        print(
            name, *(f"{row[k][0]:.1e} ({row[k][1]})" for k in ("qkv", "o", "any")), f"{row['median']:.1e}", flush=True
        )
        if args.out is not None:
            write(args.out, found)

    if args.dtype == "bfloat16":
        note("another rounding", world.gradients(Plan(), 3.0))
    for name in NAMES if args.each else ():
        note(name, world.gradients(Plan.of({name: "fp8"}, required=False)))
    for name in args.plans:
        plan = plan_of(name)
        assert isinstance(plan, Plan)
        note(name, world.gradients(plan))


if __name__ == "__main__":
    main()
