"""Memory and speed of a K3-shaped slice, forward and backward, under several activation plans.

    python bench/memory.py [--slice full] [--layers 6] [--tokens 8192] [--rounds 3] [--out bench/results/memory.json]

One CUDA device. `full` has K3's widths with 56 experts (every fourth layer MLA), `reduced` about a quarter of the width
with 64 experts. Vocabulary 8192, bf16 gradients, no optimizer. The plans take turns; a figure is the median over the
rounds. Bytes are of the allocator, weights and gradients taken off. Loss bits and gradients are compared with no plan.
"""

import argparse
import collections
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from memory_selective import Selective

from perilune import ModelConfig, Transformer
from perilune.memory import PRESETS, Memory, Plan
from perilune.memory.codec import decode, encode
from perilune.memory.fit import fit, resident, working_set
from perilune.memory.manager import AHEAD
from perilune.memory.pinned import PinnedStore
from perilune.memory.plan import short
from perilune.memory.profile import Profile, device_bytes, predict, profile
from perilune.memory.waits import Waits
from perilune.ops.sequences import Sequences

GB = 1e9
QKV = ("q_proj", "k_proj", "v_proj", "conv_CW", "q_b_proj", "kv_b_proj")
FP32 = ("A_log_H", "dt_bias_HK")
LINK = 50e9
# Most bytes that `longest` pins.
HOST = 40 * GB


def slice_config(full: bool, layers: int, experts: int) -> ModelConfig:
    k3 = ModelConfig.from_pretrained("kimi-k3")
    d, heads, latent, width = (7168, 96, 3584, 3072) if full else (2048, 28, 1024, 896)
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
    """Random weights and zero gradients, made on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Transformer(config)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name.endswith(FP32) else torch.bfloat16)
        if parameter.dim() > 1:
            parameter.data.normal_(0, config.initializer_range)
        else:
            parameter.data.fill_(0.0 if name.endswith("A_log_H") else 1.0)
        parameter.grad = torch.zeros_like(parameter)
    for name, buffer in model.named_buffers():
        assert name.endswith("bias_E")
        buffer.data = torch.zeros_like(buffer, dtype=torch.float32)
    return model


class Bench:
    """The model with one batch; `step` runs it under a plan and notes time and memory."""

    def __init__(self, model: Transformer, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model, self.device = model, torch.device("cuda")
        self.tokens = torch.randint(0, 8192, (tokens,), generator=generator).to(self.device)
        lengths = [tokens // 2, tokens - tokens // 2]
        self.sequences = Sequences.from_lengths(lengths, device=self.device)
        self.weights = [*model.parameters(), *model.buffers(), self.tokens, self.sequences.cu_seqlens]
        self.host, self.ahead = PinnedStore(self.device), AHEAD

    def loss(self) -> torch.Tensor:
        x_TD = self.model.hidden(self.tokens, self.sequences).x_TD
        # Weighted, as the norm's own mean square has no gradient.
        return (x_TD.float() * torch.linspace(-1, 1, x_TD.shape[1], device=self.device)).square().mean()

    def profile(self) -> Profile:
        return profile(self.loss, self.weights, self.device)

    def manager(self, plan: Plan | Selective) -> Any:
        if isinstance(plan, Selective):
            return plan
        memory = Memory(plan, self.weights, host=self.host)
        memory.ahead = self.ahead
        return memory

    def step(
        self, plan: Plan | Selective, scale: float = 1.0, waits: Waits | None = None
    ) -> tuple[dict[str, float], torch.Tensor, Any]:
        """({"ms", "peak", "kept"}, loss, the manager); scale: of the loss in the backward pass."""
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        memory = self.manager(plan)
        memory.waits = waits
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with memory.step():
            value = self.loss()
            # Tensors whose copy out is under way are still allocated here.
            kept = torch.cuda.memory_allocated() - base
            (scale * value).backward()
        torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() - base
        return {"ms": ms, "peak": peak, "kept": kept}, value.detach(), memory

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies; of the experts', which are most of the bytes, sums over their bits."""
        found = {}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            if parameter.dim() > 2:
                found[name] = parameter.grad.view(torch.int16).sum(dtype=torch.int64)
            else:
                found[name] = parameter.grad.clone()
        return found


def compare(got: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, Any]:
    """How many gradients differ in a bit, and the worst relative error (Frobenius) with its weight."""
    different = sum(not torch.equal(g, reference[n]) for n, g in got.items())
    errors = {}
    for n, g in got.items():
        if g.is_floating_point():
            exact = reference[n].float()
            errors[n] = float((g.float() - exact).norm() / (exact.norm() + 1e-30))
    worst = dict(sorted(errors.items(), key=lambda e: -e[1])[:3])
    for kind, parts in (("qkv", QKV), ("o", ("o_proj",))):
        worst |= {kind: max(e for n, e in errors.items() if any(part in n for part in parts))}
    return {"gradients_different": different, "worst_gradients": worst, "median_gradient": _median(errors)}


def _median(errors: dict[str, float]) -> float:
    return statistics.median(errors.values())


def pareto(bench: Bench, plans: dict[str, Plan | Selective], noted: Profile, working: int, rounds: int) -> list[dict]:
    """A row a plan, in turns. working: of `working_set`."""
    tokens = bench.tokens.numel()
    results: dict[str, dict[str, Any]] = {}
    reference: dict[str, torch.Tensor] = {}
    first_loss = torch.zeros(())
    for name, plan in plans.items():
        # The first of two builds buffers and kernels.
        bench.step(plan)
        row, value, memory = bench.step(plan)
        if not reference:
            reference, first_loss = bench.gradients(), value
            # Another rounding of every number of the backward pass shows what bf16 leaves of the gradients.
            bench.step(plan, scale=3.0)
            thirds = {n: g / 3 if g.is_floating_point() else g for n, g in bench.gradients().items()}
            noise = compare(thirds, reference)["worst_gradients"]
            results["noise"] = noise
            print("noise of bf16", noise, flush=True)
            bench.step(plan)
        results[name] = {"plan": name, "loss_equal": bool(torch.equal(value, first_loss))}
        results[name] |= compare(bench.gradients(), reference)
        by_name: dict[str, list[float]] = {}
        for full, one in memory.rows.items():
            entry = by_name.setdefault(short(full), [0, 0.0, 0.0, 0.0])
            for i, part in enumerate((one.count, one.before / GB, one.device / GB, one.stored / GB)):
                entry[i] += part
        results[name] |= {"rules": _rules(plan), "by_name": by_name}
        print(name, {k: round(v / (1 if k == "ms" else GB), 3) for k, v in row.items()}, flush=True)
    taken: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    for _ in range(rounds):
        for name, plan in plans.items():
            taken[name].append(bench.step(plan)[0])
    for name, plan in plans.items():
        row = results[name]
        ms = [one["ms"] for one in taken[name]]
        row |= {"ms": statistics.median(ms), "ms_range": [min(ms), max(ms)]}
        row |= {"tokens_per_s": tokens / statistics.median(ms) * 1e3}
        row |= {"peak_gb": max(one["peak"] for one in taken[name]) / GB}
        row |= {"kept_gb": statistics.median(one["kept"] for one in taken[name]) / GB}
        if isinstance(plan, Plan):
            rows = predict(noted, plan)
            row |= {"exposed_ms": exposed(bench, plan), "predicted_peak_gb": (resident(rows) + working) / GB}
            row |= {"predicted_device_gb": device_bytes(rows) / GB}
            row |= {"predicted_host_gb": sum(r.stored for r in rows.values()) / GB}
        print(json.dumps({k: v for k, v in row.items() if k not in ("by_name", "rules")}), flush=True)
    noise = results.pop("noise")
    return [row | {"noise": noise} if row["plan"] == "none" else row for row in results.values()]


def longest(bench: Bench, plans: dict[str, Plan], noted: Profile, working: int) -> list[dict]:
    """The longest batch that a plan is predicted to train with, from two lengths, and whether one step of it ran."""
    tokens, device = bench.tokens.numel(), bench.device
    half = Bench(bench.model, tokens // 2)
    slope = 2 * (working - working_set(half.loss, half.weights, half.profile(), device)) / tokens
    constant = working - slope * tokens + torch.cuda.memory_allocated()
    free = 0.97 * torch.cuda.get_device_properties(device).total_memory - constant
    found = []
    for name, plan in plans.items():
        rows = predict(noted, plan)
        stored = sum(row.stored for row in rows.values()) / tokens
        most = int(free / (slope + resident(rows) / tokens)) // 1024 * 1024
        row: dict[str, Any] = {"plan": name, "predicted_tokens": most, "host_gb": stored * most / GB, "ran": None}
        if stored * most < HOST:
            torch.cuda.empty_cache()
            try:
                step = Bench(bench.model, most).step(plan)[0]
                row |= {"ran": True, "ms": step["ms"], "peak_gb": step["peak"] / GB}
            except torch.OutOfMemoryError:
                row |= {"ran": False}
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def exposed(bench: Bench, plan: Plan) -> float:
    """ms in which the computing stream waits for copies."""
    waits = Waits(bench.device)
    bench.step(plan, waits=waits)
    return 1e3 * sum(waits.seconds().values())


def _rules(plan: Plan | Selective) -> dict[str, str]:
    return {rule.pattern: str(rule.placement) for rule in plan.rules} if isinstance(plan, Plan) else {}


def link(bench: Bench) -> dict[str, float]:
    """GB/s to the host and back, alone."""
    device, host = torch.empty(1 << 29, dtype=torch.uint8, device="cuda"), torch.empty(1 << 29, dtype=torch.uint8)
    host = host.pin_memory()
    found = {}
    for name, copy in (("out", lambda: host.copy_(device, non_blocking=True)),
                       ("back", lambda: device.copy_(host, non_blocking=True))):  # fmt: skip
        found[name] = _rate(copy, 1 << 29)
    return found


def codec() -> dict[str, float]:
    """GB/s of device memory (read and written) that the codec's kernels reach."""
    x = torch.randn(1 << 28, dtype=torch.bfloat16, device="cuda")
    codes = encode(x)
    moved = x.nbytes + codes.nbytes
    return {
        "encode": _rate(lambda: encode(x), moved),
        "decode": _rate(lambda: decode(codes, x.numel(), x.dtype), moved),
    }


def _rate(copy: Callable[[], object], size: int) -> float:
    copy()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(4):
        copy()
    torch.cuda.synchronize()
    return 4 * size / (time.perf_counter() - begin) / GB


def _plan(name: str) -> Plan:
    """A preset, or the preset k3 with other placements: "k3,kda.u=fp8+host"."""
    preset, *changes = name.split(",")
    return Plan.of(PRESETS[preset] | dict(change.split("=") for change in changes), required=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slice", choices=["reduced", "full"], default="reduced")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=56)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead", type=float, default=AHEAD, help="of what the plans move, see Memory.ahead")
    parser.add_argument("--plans", nargs="*", default=["none", "full-recompute", "selective", "k3"])
    parser.add_argument("--longest", action="store_true", help="instead of the table: the longest batch of each plan")
    parser.add_argument("--fit", type=float, nargs="*", default=[], help="budgets in GB of everything on the device")
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory.json"))
    args = parser.parse_args()
    begin = time.perf_counter()
    model = build(slice_config(args.slice == "full", args.layers, args.experts))
    bench = Bench(model, args.tokens)
    bench.ahead = args.ahead
    rates = link(bench) | codec()
    print(f"built in {time.perf_counter() - begin:.1f} s, {rates}", flush=True)
    for _ in range(2):
        bench.loss().backward()
    torch.cuda.synchronize()
    print(f"warm after {time.perf_counter() - begin:.1f} s", flush=True)
    noted = bench.profile()
    working = working_set(bench.loss, bench.weights, noted, bench.device)
    print(f"working set {working / GB:.3f} GB, forward {1e3 * noted.forward:.1f} ms")
    unnamed = collections.Counter(
        noted.sizes[s] for s, _ in noted.saves if s not in noted.names and noted.sizes[s] > 1 << 16
    )
    print("unnamed", unnamed.most_common(12), flush=True)
    print({n: round(1e3 * s, 2) for n, s in noted.seconds.items() if n.startswith(("layers.1.", "layers.3."))})
    plans: dict[str, Plan | Selective] = {}
    for name in args.plans:
        plans[name] = Selective() if name == "selective" else _plan(name)
    around = torch.cuda.memory_allocated() + working
    for budget in args.fit:
        plans[f"fit({budget:.0f} GB)"] = fit(noted, int(budget * GB), LINK, around=around)
        print(f"fit({budget:.0f} GB)", _rules(plans[f"fit({budget:.0f} GB)"]), flush=True)
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        **{key: getattr(args, key) for key in ("slice", "layers", "experts", "tokens")},
        "working_set_gb": working / GB,
        "around_gb": around / GB,
        "ahead": args.ahead,
        "forward_ms": 1e3 * noted.forward,
        "weights_gb": sum(p.nbytes for p in model.parameters()) / GB,
        "gb_per_s": rates,
        "plans": [],
    }
    if args.longest:
        found["longest"] = longest(bench, {n: p for n, p in plans.items() if isinstance(p, Plan)}, noted, working)
    else:
        found["plans"] = pareto(bench, plans, noted, working, args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
