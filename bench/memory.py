"""Memory and speed of a K3-shaped slice, forward and backward, under several activation plans.

    python bench/memory.py [--slice reduced|full] [--tokens 8192] [--rounds 5] [--out bench/results/memory.json]

One CUDA device. `full` has K3's widths with 56 experts and 4 layers (three KDA, one MLA), `reduced` about a quarter of
the width with 8 layers. Vocabulary 8192, no optimizer. The plans take turns; a figure is the median over the rounds.
Bytes are of the allocator, weights and gradients taken off. Forward and gradient bits are compared with no plan.
"""

import argparse
import dataclasses
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from perilune import ModelConfig, Transformer
from perilune.memory import Memory, Plan, load_plan
from perilune.memory.pinned import PinnedStore
from perilune.memory.plan import short
from perilune.memory.profile import device_bytes, fit, predict, profile
from perilune.ops.sequences import Sequences

GB = 1e9
FP32 = ("A_log_H", "dt_bias_HK")


def slice_config(full: bool) -> ModelConfig:
    k3 = ModelConfig.from_pretrained("kimi-k3")
    layers, d, heads, experts = (4, 7168, 96, 56) if full else (8, 2048, 28, 64)
    latent, width = (3584, 3072) if full else (1024, 896)
    return dataclasses.replace(
        k3,
        vocab_size=8192,
        hidden_size=d,
        num_layers=layers,
        intermediate_size=33792 if full else 8192,
        kda=dataclasses.replace(k3.kda, layers=tuple(i for i in range(layers) if i % 4 != 3), num_heads=heads),
        mla=dataclasses.replace(k3.mla, layers=tuple(range(3, layers, 4)), num_heads=heads),
        moe=dataclasses.replace(k3.moe, num_experts=experts, latent_size=latent, expert_size=width),
        attn_res=dataclasses.replace(k3.attn_res, block_size=2),
        quant=None,
    )


def build(config: ModelConfig) -> Transformer:
    """Random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name.endswith(FP32) else torch.bfloat16)
        if parameter.dim() > 1:
            parameter.data.normal_(0, config.initializer_range)
        else:
            parameter.data.fill_(0.0 if name.endswith("A_log_H") else 1.0)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slice", choices=["reduced", "full"], default="reduced")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fit", type=float, nargs="*", default=[0.5], help="budgets, as fractions of no plan's bytes")
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory.json"))
    args = parser.parse_args()
    device = torch.device("cuda")
    model = build(slice_config(args.slice == "full"))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 8192, (args.tokens,), generator=generator).to(device)
    sequences = Sequences.from_lengths([args.tokens // 2, args.tokens - args.tokens // 2], device=device)
    weights = [*model.parameters(), *model.buffers(), tokens, sequences.cu_seqlens]

    def loss() -> torch.Tensor:
        x_TD = model.hidden(tokens, sequences).x_TD
        return (x_TD.float() * torch.linspace(-1, 1, x_TD.shape[1], device=device)).square().mean()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        loss().backward()
    noted = profile(loss, weights, device)
    whole = device_bytes(predict(noted, Plan()))
    plans = {name: load_plan(name) for name in ("none", "full-recompute", "k3")}
    plans["recompute elements"] = Plan(tuple(r for r in plans["k3"].rules if r.placement.where == "recompute"))
    plans |= {f"fit({f:.2f} of none)": fit(noted, int(f * whole), 40 * GB) for f in args.fit}
    host = PinnedStore(device)
    rows: dict[str, dict] = {name: {"ms": [], "peak": [], "kept": []} for name in plans}
    tables: dict[str, dict] = {}
    reference: dict[str, torch.Tensor] = {}

    def step(name: str) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad.zero_()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        memory = Memory(plans[name], weights, host=host)
        with memory.step():
            value = loss()
            # Tensors whose copy out is under way are still allocated here.
            rows[name]["kept"].append(torch.cuda.memory_allocated() - base)
            value.backward()
        torch.cuda.synchronize()
        rows[name]["ms"].append(1e3 * (time.perf_counter() - begin))
        rows[name]["peak"].append(torch.cuda.max_memory_allocated() - base)
        tables[name] = memory.rows
        return value.detach()

    def gradients_of() -> dict[str, torch.Tensor]:
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    for name in plans:
        first = step(name)
        if not reference:
            # Of the first pass: what differs from it in the second one under no plan is the kernels' own noise.
            reference = {**gradients_of(), "loss": first}
        value = step(name)
        gradients = gradients_of()
        worst = max((g.float() - reference[n].float()).norm() / (reference[n].float().norm() + 1e-30)
                    for n, g in gradients.items())  # fmt: skip
        different = sum(not torch.equal(g, reference[n]) for n, g in gradients.items())
        rows[name] |= {"forward_equal": bool(torch.equal(value, reference["loss"])), "gradients_different": different}
        ms, peak, kept = (rows[name][key][-1] for key in ("ms", "peak", "kept"))
        print(f"{name}: {ms:.1f} ms, peak {peak / GB:.3f} GB, kept {kept / GB:.3f} GB, {rows[name]}"[:300], flush=True)
        rows[name] |= {"worst_gradient_error": float(worst), "ms": [], "peak": [], "kept": []}
        del gradients
    for _ in range(args.rounds):
        for name in plans:
            step(name)
    results = []
    for name, row in rows.items():
        predicted = predict(noted, plans[name])
        by_name: dict[str, list[float]] = {}
        for full, one in tables[name].items():
            entry = by_name.setdefault(short(full), [0, 0.0, 0.0, 0.0])
            for i, part in enumerate((one.count, one.before / GB, one.device / GB, one.stored / GB)):
                entry[i] += part
        result = {
            "plan": name,
            "rules": {rule.pattern: str(rule.placement) for rule in plans[name].rules},
            "ms": statistics.median(row["ms"]),
            "ms_range": [min(row["ms"]), max(row["ms"])],
            "tokens_per_s": args.tokens / statistics.median(row["ms"]) * 1e3,
            "peak_gb": max(row["peak"]) / GB,
            "kept_gb": statistics.median(row["kept"]) / GB,
            "predicted_device_gb": device_bytes(predicted) / GB,
            "predicted_host_gb": sum(r.stored for r in predicted.values()) / GB,
            "by_name": by_name,
        } | {key: row[key] for key in ("forward_equal", "gradients_different", "worst_gradient_error")}
        results.append(result)
        short_line = {k: v for k, v in result.items() if k not in ("by_name", "rules")}
        print(json.dumps(short_line), flush=True)
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "slice": args.slice,
        "tokens": args.tokens,
        "plans": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
