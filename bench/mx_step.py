"""A training step with quantised experts against one without, on one GPU; a part of bench/mx.py.

Kimi-K3's widths, three layers (KDA, KDA, MLA; the first dense), 56 experts, vocabulary 8192: forward, backward, the
gradients' way to the masters, fused AdamW, and the masters' rounding to the weights. The modes take turns on one model
and differ in nothing else than what is rounded.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any, Literal

import torch

from perilune import ModelConfig, Transformer
from perilune.config import QuantConfig
from perilune.model import quantized_parameters
from perilune.ops.sequences import Sequences
from perilune.train.masters import Masters

MODES: dict[str, Literal["none", "inputs", "all"] | None] = {
    "bf16": None,
    "mxfp4 weights": "none",
    "and mxfp8 inputs": "inputs",
    "and inner activations": "all",
}
FP32 = ("A_log_H", "dt_bias_HK")


def add_arguments(group: Any) -> None:
    group.add_argument("--step-tokens", type=int, default=8192)
    group.add_argument("--step-rounds", type=int, default=7)
    group.add_argument("--step-experts", type=int, default=56)


def shape(experts: int) -> ModelConfig:
    k3 = ModelConfig.from_pretrained("kimi-k3")
    return dataclasses.replace(
        k3,
        vocab_size=8192,
        num_layers=3,
        kda=dataclasses.replace(k3.kda, layers=(0, 1)),
        mla=dataclasses.replace(k3.mla, layers=(2,)),
        moe=dataclasses.replace(k3.moe, num_experts=experts),
        attn_res=dataclasses.replace(k3.attn_res, block_size=2),
        quant=None,
        hf_extra={},
        hf_present=None,
    )


def build(config: ModelConfig) -> Transformer:
    """Random weights, made on the device in bfloat16."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(config)
    for module in model.modules():
        for key, p in list(module.named_parameters(recurse=False)):
            dtype = torch.float32 if key in FP32 else torch.bfloat16
            values = torch.empty(p.shape, dtype=dtype, device="cuda")
            values = values.normal_(0, 0.006) if p.dim() > 1 else values.fill_(0.0 if key == "A_log_H" else 1.0)
            setattr(module, key, torch.nn.Parameter(values))
        for key, b in list(module.named_buffers(recurse=False)):
            setattr(module, key, torch.zeros(b.shape, device="cuda"))
    return model


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each mode, and how much longer than bf16 its median is."""
    config = shape(args.step_experts)
    model = build(config)
    names = quantized_parameters(dataclasses.replace(config, quant=QuantConfig()))
    masters = Masters(model, names)
    # Masters of a run that rounds nothing are copies of everything in bfloat16, too: the modes share them.
    optimizer = torch.optim.AdamW(masters.params.values(), lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocab_size, (args.step_tokens,), device="cuda")
    sequences = Sequences.from_lengths([args.step_tokens], device="cuda")
    slope = torch.linspace(-1, 1, config.hidden_size, device="cuda")

    def step(mode: str) -> None:
        activations = MODES[mode]
        model.set_quant(None if activations is None else QuantConfig(activations=activations))
        masters.quantized = frozenset() if activations is None else names
        (model.hidden(tokens, sequences).x_TD.float() * slope).square().mean().backward()
        masters.take_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        masters.write_back()

    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(args.step_rounds + 2):
        for mode in MODES if turn % 2 else reversed(MODES):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step(mode)
            stop.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[mode].append(start.elapsed_time(stop))
    found = {mode: {"ms": statistics.median(t), "fastest": min(t), "slowest": max(t)} for mode, t in times.items()}
    return {
        "tokens": args.step_tokens,
        "experts": args.step_experts,
        "parameters": sum(p.numel() for p in model.parameters()),
        "quantized": sum(p.numel() for n, p in model.named_parameters() if n in names),
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "times": found,
        "slower": {mode: round(t["ms"] / found["bf16"]["ms"] - 1, 4) for mode, t in found.items()},
    }
