"""Context parallelism, sharding and expert parallelism over several GPUs, a part of bench/multi_gpu.py.

kcp: a KDA layer of Kimi-K3's shape (width 7168, --kcp-heads heads of 128, bfloat16) over R ranks against one rank. Weak
scaling: T tokens a rank against T tokens on one; strong: T in all. `exchange` is the time of a layer's maps and states
going round alone, with the bytes that a rank receives. step: forward and backward, for mini with the optimizer, under
layouts. Times are those of the slowest rank, in milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_common import everywhere, say, seconds, timed
from parallel import DEVICE, relative
from parallel import run as run_kda

from perilune.config import ModelConfig
from perilune.model import Transformer
from perilune.model.parts import DEFAULT
from perilune.ops import kda as kda_ops
from perilune.ops.sequences import Sequences
from perilune.parallel.context import context_parts, kcp
from perilune.parallel.fragments import exchange_bytes, fold_backward, fold_forward
from perilune.parallel.layout import KEPT
from perilune.parallel.slices import cut_stream, take_slice
from perilune.train.config import DataConfig, OptimConfig, ParallelConfig, TrainConfig
from perilune.train.data import Batch
from perilune.train.masters import Masters
from perilune.train.optim import build_optimizers, clip_gradients
from perilune.train.plan import plan
from perilune.train.team import Team

# 0 stands for all ranks.
STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "mini": {
        "dp": {"ep": 1},
        "dp zero2": {"ep": 1, "zero": 2},
        "dp zero3": {"ep": 1, "zero": 3},
        "ep": {},
        "ep zero3": {"zero": 3},
        "cp": {"cp": 0, "ep": 1},
        "tp": {"tp": 0, "ep": 1},
        "pp": {"pp": 0},
    },
    "slice": {
        "dp zero3": {"ep": 1, "zero": 3},
        "ep zero3": {"zero": 3},
        "cp ep zero3": {"cp": 0, "zero": 3},
        "tp ep": {"tp": 0},
    },
}
# Micro-batches of a step with pipeline stages.
MICRO = 4


def add_arguments(group: Any) -> None:
    group.add_argument("--kcp-tokens", type=int, nargs="*", default=[32768, 131072])
    group.add_argument("--kcp-heads", type=int, default=96)
    group.add_argument("--step-tokens", type=int, default=16384, help="a rank has of its own in a step")
    group.add_argument("--step-models", nargs="*", choices=list(STEPS), default=list(STEPS))
    group.add_argument("--parallel-repeat", type=int, default=5)
    group.add_argument("--parallel-seconds", type=float, default=200.0, help="after which no more is measured")
    group.add_argument("--parallel-only", nargs="*", choices=["check", "kcp", "step"], default=["check", "kcp", "step"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """What was found right, and the times."""
    deadline = seconds() + args.parallel_seconds
    found: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {
        "check": check,
        "kcp": lambda: kcp_layers(args, deadline),
        "step": lambda: steps(args, deadline),
    }
    for name, call in calls.items():
        if name in args.parallel_only:
            found[name] = call()
            torch.cuda.empty_cache()
    return found


def check() -> dict[str, float]:
    """KDA on slices against one call: float64 by the reference, bfloat16 by the kernels; packed documents."""
    R, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    gate = ModelConfig.from_pretrained("kimi-k3").kda.gate
    found = {}
    for dtype, H, lengths in (
        (torch.float64, 3, [37, 51, 40]),
        (torch.bfloat16, 8, [3700, 51, 1, 4000, 440]),
    ):
        T, K = sum(lengths), 128
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(*shape: int, g: Any = generator, d: Any = dtype) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, generator=g, dtype=torch.float64).to(d)

        wide = torch.promote_types(dtype, torch.float32)
        raw = [draw(T, H, K) for _ in range(4)] + [draw(T, H), draw(H).to(wide) / 4, draw(H, K).to(wide) / 4]
        d_o = draw(T, H, K)
        whole = Sequences.from_lengths(lengths, device=DEVICE)
        want = run_kda(kda_ops.kda, raw, gate, whole, d_o)
        for order in ("contiguous", "zigzag"):
            cut = take_slice(cut_stream(whole, R, order), (rank,), DEVICE)
            rows = cut.rows_T.to(DEVICE)
            mine = [t[rows] for t in raw[:5]] + raw[5:]
            got = run_kda(lambda *a, c=cut: kcp(*a[:-1], c, group=group), mine, gate, cut, d_o[rows])
            weights = got[6:]
            for w in weights:
                dist.all_reduce(w)
            errors = [relative(a, b[rows]) for a, b in zip(got[:6], want[:6], strict=True)]
            errors += [relative(a, b) for a, b in zip(weights, want[6:], strict=True)]
            name = f"kcp {order} {dtype}".replace("torch.", "")
            found[name] = everywhere(max(errors))
    assert all(v <= (1e-12 if "64" in n else 2e-2) for n, v in found.items()), found
    say(found)
    return found


def kcp_layers(args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    R, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    config = ModelConfig.from_pretrained("kimi-k3")
    config = dataclasses.replace(
        config,
        num_layers=1,
        dense_layers=1,
        kda=dataclasses.replace(config.kda, layers=(0,), num_heads=args.kcp_heads),
        mla=dataclasses.replace(config.mla, layers=()),
        hf_extra={},
        hf_present=None,
    )
    with torch.device("meta"):
        attn = Transformer(config).layers[0].attn
    attn = attn.to_empty(device=DEVICE).bfloat16()
    for name, p in attn.named_parameters():
        p.data.normal_(0, 0.02)
        p.data = p.data.float() + (1 if name == "o_norm_K" else 0) if name in KEPT else p.data
    parts = context_parts(DEFAULT, group)
    found = []
    for tokens in args.kcp_tokens:
        if everywhere(seconds() - deadline) > 0:
            break
        one = Sequences.from_lengths([tokens], device=DEVICE)
        cuts = {
            "one": (one, DEFAULT),
            "weak": (take_slice(cut_stream(Sequences.from_lengths([tokens * R]), R), (rank,), DEVICE), parts),
            "strong": (take_slice(cut_stream(one, R), (rank,), DEVICE), parts),
        }
        row: dict[str, Any] = {"tokens": tokens, "heads": args.kcp_heads, "ranks": R}
        for name, (sequences, chosen) in cuts.items():
            x = torch.randn(sequences.total, config.hidden_size, device=DEVICE).bfloat16()
            d_y = torch.randn_like(x)

            def forward(x: Any = x, s: Any = sequences, c: Any = chosen) -> None:
                with torch.no_grad():
                    attn(x, s, c)

            def both(x: Any = x, s: Any = sequences, c: Any = chosen, d_y: Any = d_y) -> None:
                leaf = x.detach().requires_grad_()
                attn(leaf, s, c)[0].backward(d_y)
                for p in attn.parameters():
                    p.grad = None

            for kind, call in (("forward", forward), ("both", both)):
                row[f"{name} {kind}"] = timed(call, args.parallel_repeat)
            del x, d_y
            torch.cuda.empty_cache()
        for kind in ("forward", "both"):
            base = row[f"one {kind}"]["median"]
            row[f"weak efficiency {kind}"] = round(base / row[f"weak {kind}"]["median"], 4)
            row[f"strong efficiency {kind}"] = round(base / row[f"strong {kind}"]["median"] / R, 4)
        found.append(row | exchange(cuts["weak"][0], args))
        say(found[-1])
    return found


def exchange(cut: Any, args: argparse.Namespace) -> dict[str, Any]:
    H, K, group = args.kcp_heads, 128, dist.group.WORLD
    M, B = (torch.randn(len(cut.mine), H, K, K, device=DEVICE) / 12 for _ in range(2))
    kept = fold_forward(M, B, cut, group).M_PHKK
    return {
        "exchange forward": timed(lambda: fold_forward(M, B, cut, group), args.parallel_repeat),
        "exchange backward": timed(lambda: fold_backward(B, kept, cut, group), args.parallel_repeat),
        "exchange bytes": exchange_bytes(cut.spans, H, K, K),
    }


def steps(args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    found = []
    R = dist.get_world_size()
    for name in args.step_models:
        for layout, parallel in STEPS[name].items():
            if everywhere(seconds() - deadline) > 0:
                return found
            chosen = {key: R if value == 0 else value for key, value in parallel.items()}
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            config = settings(name, chosen, args.step_tokens, R)
            call = training_step(config, shape_of(name))
            row = {"model": name, "layout": layout, "ms": timed(call, args.parallel_repeat)}
            row["peak_GB"] = round(everywhere((torch.cuda.max_memory_allocated() - before) / 1e9), 2)
            rank = plan(config, shape_of(name), R).fullest
            predicted = rank.total - (rank.optimizer if name == "slice" else 0)
            row["planned_GB"] = round(predicted / 1e9, 2)
            row["planned_activations_GB"] = round(rank.activations / 1e9, 2)
            tokens = config.data.batch_tokens * config.accumulate
            row |= {"tokens": tokens, "tokens_per_second": round(tokens / row["ms"]["median"] * 1000)}
            found.append(row)
            say(row)
            del call
    return found


def settings(name: str, parallel: dict[str, Any], tokens: int, ranks: int) -> TrainConfig:
    """A run whose ranks have so many tokens each; with stages in MICRO pieces."""
    cp, tp, pp = (parallel.get(axis, 1) for axis in ("cp", "tp", "pp"))
    micro = MICRO if pp > 1 else 1
    data = DataConfig(batch_tokens=tokens * cp * tp * pp // micro, sequence_tokens=4096)
    parallel_config = ParallelConfig(policy="tolerant", timeout=100.0, **parallel)
    accumulate = micro * ranks // (cp * tp * pp)
    return TrainConfig(model=name, dtype="bfloat16", accumulate=accumulate, data=data, parallel=parallel_config)


def shape_of(name: str) -> ModelConfig:
    """`mini`, or Kimi-K3's widths with 4 layers, 56 experts and a vocabulary of 8192."""
    if name == "mini":
        return ModelConfig.from_pretrained("mini")
    config = ModelConfig.from_pretrained("kimi-k3")
    return dataclasses.replace(
        config,
        num_layers=4,
        vocab_size=8192,
        kda=dataclasses.replace(config.kda, layers=(0, 1, 2)),
        mla=dataclasses.replace(config.mla, layers=(3,)),
        moe=dataclasses.replace(config.moe, num_experts=56),
        quant=None,
        hf_extra={},
        hf_present=None,
    )


def training_step(config: TrainConfig, shape: ModelConfig) -> Callable[[], None]:
    """One step on random tokens. The slice takes no optimizer step: its states would not fit."""
    team = Team(config.parallel, DEVICE)
    with torch.device("meta"):
        net = Transformer(shape)
    torch.manual_seed(0)
    for module in net.modules():
        for key, p in list(module.named_parameters(recurse=False)):
            dtype = torch.float32 if key in KEPT else torch.bfloat16
            whole = torch.empty(p.shape, dtype=dtype, device=DEVICE).normal_(0, 0.02)
            setattr(module, key, torch.nn.Parameter(whole + 1 if "norm" in key else whole))
        for key, b in list(module.named_buffers(recurse=False)):
            setattr(module, key, torch.zeros(b.shape, device=DEVICE))
    T = config.data.batch_tokens
    net = team.spread(net, T)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    masters = None
    if config.model == "mini":
        masters = Masters(net)
        heads, spread = team.matrices(net, masters.params)
        optimizers = build_optimizers(masters.params, heads, OptimConfig(), spread)
    generator = torch.Generator(DEVICE).manual_seed(team.mesh.data[0])
    sequences = Sequences.from_lengths([min(T, 4096)] * max(T // 4096, 1), device=DEVICE)
    batches = []
    for _ in range(config.accumulate // team.mesh.data[1]):
        ids = torch.randint(shape.vocab_size, (T + 1,), device=DEVICE, generator=generator)
        batches.append(Batch(ids[:-1], ids[1:], torch.ones(T, dtype=torch.bool, device=DEVICE), sequences))

    def step() -> None:
        team.passes(net, batches, T * config.accumulate, 4096 * 8192, lambda stats: None)
        if masters is None:
            for p in net.parameters():
                p.grad = None
        else:
            masters.take_gradients()
            team.add_gradients(masters.params)
            clip_gradients(masters.params.values(), 1.0, team.copies(masters.params), team.add_squares)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            masters.write_back()
        team.expert_stats()

    return step


def plot(result: dict[str, Any], file: Path) -> None:
    """Time of a KDA layer over its tokens: one rank, weak and strong scaling."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    rows = result["kcp"]
    tokens = [row["tokens"] for row in rows]
    for name, label in (("one", "T on one rank"), ("weak", "T on each rank"), ("strong", "T over all ranks")):
        axes.plot(tokens, [row[f"{name} both"]["median"] for row in rows], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel="ms", title="KDA layer, forward and backward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
