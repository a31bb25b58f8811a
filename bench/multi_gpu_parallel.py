"""KDA context parallelism over several GPUs, a part of bench/multi_gpu.py; `step` is in multi_gpu_step.

check: KDA on slices of packed documents against one call, by both ways of exchanging states. kcp: a KDA layer of
Kimi-K3's shape (width 7168, --kcp-heads heads of 128, bfloat16), one document, over R ranks against one rank. Weak
scaling: T tokens a rank against T tokens on one; strong: T in all. `exchange` is the time of a layer's maps and states
going round alone, with the bytes that a rank receives. Times are those of the slowest rank, in milliseconds. What
would not fit in memory, by the peak of a shorter run, is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_common import DRY, RUN, everywhere, forget_peak, late, peak_GB, say, seconds, timed, uncovered
from multi_gpu_step import STEPS, steps
from parallel import relative
from parallel import run as run_kda
from parallel_layers import DEVICE, kda_layer

from perilune.config import ModelConfig
from perilune.model.parts import DEFAULT
from perilune.ops import kda as kda_ops
from perilune.ops.sequences import Sequences
from perilune.parallel.context import context_parts, kcp
from perilune.parallel.fragments import exchange_bytes, fold_backward, fold_forward
from perilune.parallel.slices import cut_stream, take_slice

# Up to so many tokens a rank everything is measured; longer runs get fewer repeats and nothing beside.
SHORT = 131072
PARTS = ("check", "kcp", "step")


def add_arguments(group: Any) -> None:
    group.add_argument(
        "--kcp-tokens", type=int, nargs="*", default=[64, 128] if DRY else [32768, 131072, 262144, 524288]
    )
    group.add_argument("--kcp-heads", type=int, default=2 if DRY else 96)
    group.add_argument("--step-tokens", type=int, default=64 if DRY else 16384, help="a rank has of its own in a step")
    group.add_argument("--step-models", nargs="*", choices=list(STEPS), default=list(STEPS))
    group.add_argument("--step-layouts", nargs="*", help="all of a model's by default")
    group.add_argument("--parallel-repeat", type=int, default=5)
    group.add_argument("--parallel-seconds", type=float, default=190.0, help="after which no more is measured")
    group.add_argument("--parallel-only", nargs="*", choices=PARTS, default=PARTS)


def run(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Hand over what was found right, and the times, each with its share of what is left of the part's time."""
    end, parts = seconds() + args.parallel_seconds, [part for part in PARTS if part in args.parallel_only]
    for i, part in enumerate(parts):
        deadline = seconds() + (end - seconds()) / (len(parts) - i)
        if part == "check":
            keep({"check": check()})
        elif part == "kcp":
            kcp_layers(args, deadline, keep)
        else:
            steps(args, deadline, keep)
        forget_peak()


def check() -> dict[str, float]:
    """KDA on slices against one call: float64 by the reference, bfloat16 by the kernels; packed documents."""
    R, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    gate = ModelConfig.from_pretrained("kimi-k3").kda.gate
    found = {}
    for dtype, H, lengths in (
        (torch.float64, 3, [37, 51, 40]),
        (torch.bfloat16, 8, [37, 5, 1, 40, 44] if DRY else [3700, 51, 1, 4000, 440]),
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
            got, other = (
                run_kda(lambda *a, c=cut, w=way: kcp(*a[:-1], c, group=group, way=w), mine, gate, cut, d_o[rows])
                for way in ("gather", "heads")
            )
            assert all(torch.equal(a, b) for a, b in zip(got, other, strict=True)), f"ways differ, {dtype}, {order}"
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


def kcp_layers(args: argparse.Namespace, deadline: float, keep: Callable[[dict[str, Any]], None]) -> None:
    R, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    attn = kda_layer(args.kcp_heads)
    parts = context_parts(DEFAULT, group)
    ways = {
        "one": DEFAULT,
        "two": parts,
        "heads": dataclasses.replace(parts, kda=partial(kcp, group=group, way="heads")),
    }
    measured: dict[tuple[str, int], dict[str, Any]] = {}

    def measure(name: str, tokens: int) -> dict[str, Any]:
        """Of `tokens` on every rank, alone or as a slice."""
        if (name, tokens) not in measured:
            sequences = Sequences.from_lengths([tokens], device=DEVICE)
            if name != "one":
                sequences = take_slice(cut_stream(Sequences.from_lengths([tokens * R]), R), (rank,), DEVICE)
            peaks = {n: cell["peak_GB"] for (other, n), cell in measured.items() if (other == "one") == (name == "one")}
            measured[name, tokens] = layer(attn, sequences, ways[name], peaks, args.parallel_repeat)
            say({name: tokens} | measured[name, tokens])
        return measured[name, tokens]

    found: list[dict[str, Any]] = []
    for tokens in args.kcp_tokens:
        wanted = [("one", "one", tokens), ("strong", "two", tokens // R), ("weak", "two", tokens)]
        if tokens <= SHORT:
            wanted.append(("weak heads", "heads", tokens))
        cells = {name: measure(way, n) for name, way, n in wanted if not late(deadline)}
        if not cells:
            break
        row: dict[str, Any] = {"run": RUN, "tokens": tokens, "heads": args.kcp_heads, "ranks": R}
        for name, cell in cells.items():
            row |= {f"{name} {key}": value for key, value in cell.items()}
        for kind in ("forward", "both"):
            for name, share in (("weak", 1), ("strong", R)):
                if f"one {kind}" in row and f"{name} {kind}" in row:
                    ratio = row[f"one {kind}"]["median"] / row[f"{name} {kind}"]["median"]
                    row[f"{name} efficiency {kind}"] = round(ratio / share, 4)
        found.append(row)
        say(row)
        keep({"kcp": {"layers": found}})
    if late(deadline):
        say("out of time before exchange")
        return
    cut = take_slice(cut_stream(Sequences.from_lengths([128 * R]), R), (rank,), DEVICE)
    keep({"kcp": {"exchange": {way: exchange(cut, args, way) for way in ("gather", "heads")}}})


def layer(attn: Any, sequences: Any, parts: Any, peaks: dict[int, dict[str, float]], repeat: int) -> dict[str, Any]:
    """Times of a layer over these tokens, forward and with the backward pass, their peaks of memory, and by the
    profiler what of the latter was exposed. peaks: of other lengths."""
    tokens = sequences.total
    x = torch.randn(tokens, attn.q_proj.in_features, device=DEVICE).bfloat16()

    def forward() -> None:
        with torch.no_grad():
            attn(x, sequences, parts)

    def both() -> None:
        leaf = x.detach().requires_grad_()
        # Any gradient does, and this one takes no time to draw.
        attn(leaf, sequences, parts)[0].backward(x)
        for p in attn.parameters():
            p.grad = None

    row: dict[str, Any] = {"peak_GB": {}}
    memory = 0.0 if DRY else torch.cuda.get_device_properties(DEVICE).total_memory / 1e9
    longest = max(peaks, default=0)
    short = tokens <= SHORT
    for kind, call in (("forward", forward), ("both", both)):
        known = peaks.get(longest, {}).get(kind)
        if not short and (known is None or known * tokens / longest > 0.97 * memory):
            continue
        forget_peak()
        try:
            row[kind] = timed(call, repeat if short else 2, 2 if short else 1)
        except torch.OutOfMemoryError:
            # On all ranks: they do the same.
            continue
        row["peak_GB"][kind] = round(peak_GB(), 2)
    if short and parts is not DEFAULT:
        row["exposed"] = uncovered(both)
    return row


def exchange(cut: Any, args: argparse.Namespace, way: Any) -> dict[str, Any]:
    H, K, group = args.kcp_heads, 128, dist.group.WORLD
    M, B = (torch.randn(len(cut.mine), H, K, K, device=DEVICE) / 12 for _ in range(2))
    kept = fold_forward(M, B, cut, group, way).M_PHKK
    return {
        "forward": timed(lambda: fold_forward(M, B, cut, group, way), args.parallel_repeat),
        "backward": timed(lambda: fold_backward(B, kept, cut, group, way), args.parallel_repeat),
        "bytes": exchange_bytes(cut.spans, H, K, K, way=way),
    }


def plot(result: dict[str, Any], file: Path) -> None:
    """A KDA layer over its tokens (one rank, weak and strong scaling), and the parts of each model's training step."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    known = [row for row in result.get("step", ()) if "exposed" in row]
    models = [name for name in ("mini", "slice") if sum(row["model"] == name for row in known) > 1]
    size = 4.5 * (1 + len(models)), 3.8
    figure, (panels,) = pyplot.subplots(1, 1 + len(models), figsize=size, squeeze=False)
    for name, label in (("one", "T on one GPU"), ("weak", "T on each GPU"), ("strong", "T over all GPUs")):
        rows = [row for row in result.get("kcp", {}).get("layers", ()) if f"{name} both" in row]
        times = [row[f"{name} both"]["median"] for row in rows]
        panels[0].plot([row["tokens"] for row in rows], times, marker="o", label=label)
    panels[0].set(xscale="log", yscale="log", xlabel="T, tokens", ylabel="ms", title="KDA layer, forward and backward")
    panels[0].legend()
    for panel, model in zip(panels[1:], models, strict=True):
        bars(panel, [row for row in known if row["model"] == model])
        panel.set(xlabel="us a token", title=f"Training step of {model}")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def bars(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Time a token of each layout; its parts as in the step that the profiler saw."""
    start = [0.0] * len(rows)
    for part, label in ((None, "computing"), ("nccl", "NCCL alone"), ("idle", "idle")):
        widths = []
        for row in rows:
            seen = row["exposed"]
            share = (seen["call"] - seen["nccl"] - seen["idle"] if part is None else seen[part]) / seen["call"]
            widths.append(max(0.0, share) * row["ms"]["median"] * 1e3 / row["tokens"])
        panel.barh([row["layout"] for row in rows], widths, left=start, label=label)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    panel.invert_yaxis()
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
