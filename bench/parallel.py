"""What cutting a stream of tokens costs, on one GPU: the algebra of KDA context parallelism, all ranks in one process.

    python bench/parallel.py --out bench/results/parallel.json

One document of --tokens tokens is cut into W spans (`perilune.parallel.slices`); every span's map is made, the maps are
folded, and the spans run from their entry states, in one process and without communication: what W ranks compute
together, so the time over the time of the uncut layer is what the algebra costs a rank. Layers have Kimi-K3's shape
(width 7168, 96 heads of 128), bfloat16. Times in milliseconds, cut and uncut in turns; peaks are above what was there
before the call, in GiB.

Scaling over several GPUs is bench/multi_gpu_parallel.py (a part of bench/multi_gpu.py); on one GPU it is skipped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from parallel_layers import DEVICE, kda_layer, random_model, shape_of

from perilune.config import ModelConfig
from perilune.model import Transformer, muon_heads
from perilune.model.parts import DEFAULT
from perilune.ops import kda as kda_ops
from perilune.ops.sequences import Sequences
from perilune.parallel.context import context_parts, kcp
from perilune.parallel.slices import Slice, cut_stream, take_slice
from perilune.train.config import OptimConfig
from perilune.train.loss import cross_entropy
from perilune.train.masters import Masters
from perilune.train.optim import build_optimizers, clip_gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/parallel.json"))
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768])
    parser.add_argument("--spans", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--model-spans", type=int, nargs="*", default=[4])
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--parts", nargs="*", default=["layer", "op", "mini", "slice"])
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    for part in args.parts:
        result[part] = []
        for tokens in args.tokens:
            measure = {"layer": layer, "op": op}.get(part)
            rows = measure(args, tokens) if measure else model(args, part, tokens)
            for row in rows:
                print(part, json.dumps(row), flush=True)
            result[part] += rows
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            torch.cuda.empty_cache()


def machine() -> dict[str, str]:
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "date": day}


def cut(whole: Sequences, spans: int) -> Slice:
    return take_slice(cut_stream(whole, spans), range(spans), DEVICE)


def in_turns(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, dict[str, float]]:
    """Milliseconds and peak GiB of each call, one after the other in every round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, float] = {}
    for i in range(repeat + 2):
        for name, call in calls.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            if i >= 2:
                times[name].append(start.elapsed_time(end))
    spread = {"median": statistics.median, "min": min, "max": max}
    return {
        name: {key: round(of(values), 3) for key, of in spread.items()} | {"peak_GiB": round(peaks[name], 2)}
        for name, values in times.items()
    }


def rows_of(times: dict[str, dict[str, float]], facts: dict[str, Any]) -> list[dict[str, Any]]:
    base = {name.split()[1]: value["median"] for name, value in times.items() if name.startswith("1 ")}
    return [
        facts
        | {"spans": int(name.split()[0]), "pass": name.split()[1]}
        | value
        | {"over_uncut": round(value["median"] / base[name.split()[1]] - 1, 4)}
        for name, value in times.items()
    ]


def layer(args: argparse.Namespace, tokens: int) -> list[dict[str, Any]]:
    """A whole KDA layer: projections, convolution, attention, norm."""
    attn = kda_layer(args.heads)
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(tokens, attn.q_proj.in_features, device=DEVICE, generator=generator).bfloat16()
    d_y = torch.randn(x.shape, device=DEVICE, generator=generator).bfloat16()
    whole = Sequences.from_lengths([tokens], device=DEVICE)
    parts = context_parts(DEFAULT, None)
    calls: dict[str, Callable[[], Any]] = {}
    for spans in (1, *args.spans):
        sequences, chosen = (whole, DEFAULT) if spans == 1 else (cut(whole, spans), parts)

        def forward(sequences: Any = sequences, chosen: Any = chosen) -> None:
            with torch.no_grad():
                attn(x, sequences, chosen)

        def both(sequences: Any = sequences, chosen: Any = chosen) -> None:
            leaf = x.detach().requires_grad_()
            attn(leaf, sequences, chosen)[0].backward(d_y)
            for p in attn.parameters():
                p.grad = None

        calls |= {f"{spans} forward": forward, f"{spans} both": both}
    return rows_of(in_turns(calls, args.repeat), {"tokens": tokens, "heads": args.heads})


def op(args: argparse.Namespace, tokens: int) -> list[dict[str, Any]]:
    """KDA alone, and how far the cut result is from the uncut one."""
    H, K = args.heads, 128
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()

    q, k, v, g = (draw(tokens, H, K) for _ in range(4))
    # Slow gates, about 1 % a token, so that a state reaches far: with fast ones cut and uncut would agree by nothing.
    g -= 6
    beta, d_o = draw(tokens, H), draw(tokens, H, K)
    raw = [q, k, v, g, beta, torch.zeros(H, device=DEVICE), torch.zeros(H, K, device=DEVICE)]
    gate = ModelConfig.from_pretrained("kimi-k3").kda.gate
    whole = Sequences.from_lengths([tokens], device=DEVICE)
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    exact = run(kda_ops.kda, raw, gate, whole, d_o)
    for spans in (1, *args.spans):
        sequences, call = (whole, kda_ops.kda) if spans == 1 else (cut(whole, spans), kcp)
        got = run(call, raw, gate, sequences, d_o)
        errors[f"{spans} forward"] = relative(got[0], exact[0])
        errors[f"{spans} both"] = max(relative(a, b) for a, b in zip(got[1:], exact[1:], strict=True))
        del got

        def forward(sequences: Any = sequences, call: Any = call) -> None:
            with torch.no_grad():
                call(*raw, gate, None, sequences)

        def both(sequences: Any = sequences, call: Any = call) -> None:
            run(call, raw, gate, sequences, d_o)

        calls |= {f"{spans} forward": forward, f"{spans} both": both}
    del exact
    rows = rows_of(in_turns(calls, args.repeat), {"tokens": tokens, "heads": H})
    return [r | {"relative_difference": errors[f"{r['spans']} {r['pass']}"]} for r in rows]


def run(call: Any, raw: list[torch.Tensor], gate: Any, sequences: Any, d_o: torch.Tensor) -> list[torch.Tensor]:
    """o and the gradients of all inputs."""
    leaves = [t.detach().requires_grad_() for t in raw]
    o = call(*leaves, gate, None, sequences)[0]
    return [o.detach(), *torch.autograd.grad(o, leaves, d_o)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """In the Frobenius norm."""
    a, b = a.float(), b.float()
    return float((a - b).norm() / b.norm())


def model(args: argparse.Namespace, name: str, tokens: int) -> list[dict[str, Any]]:
    """A model's forward pass, and forward and backward; of `mini` also with the optimizer's step.

    The slice takes no optimizer step: with 14 bytes a parameter weights and states alone take 119 GB. It has at most
    16,384 tokens.
    """
    shape = shape_of(name)
    tokens = min(tokens, 16384) if name == "slice" else tokens
    net = random_model(shape, 0.006)
    update = optimizer_step(net) if name == "mini" else None
    generator = torch.Generator(DEVICE).manual_seed(0)
    ids = torch.randint(shape.vocab_size, (tokens + 1,), device=DEVICE, generator=generator)
    whole = Sequences.from_lengths([tokens], device=DEVICE)
    calls: dict[str, Callable[[], Any]] = {}
    for spans in (1, *args.model_spans):
        sequences = whole if spans == 1 else cut(whole, spans)
        chosen = net if spans == 1 else net.with_parts(context_parts(DEFAULT, None))

        def forward(sequences: Any = sequences, chosen: Any = chosen) -> None:
            with torch.no_grad():
                loss_of(chosen, ids, sequences)

        def both(sequences: Any = sequences, chosen: Any = chosen) -> None:
            loss_of(chosen, ids, sequences).backward()
            for p in net.parameters():
                p.grad = None

        def step(sequences: Any = sequences, chosen: Any = chosen) -> None:
            loss_of(chosen, ids, sequences).backward()
            assert update is not None
            update()

        calls |= {f"{spans} forward": forward, f"{spans} both": both}
        calls |= {f"{spans} step": step} if update else {}
    times = in_turns(calls, args.repeat if name == "mini" else max(3, args.repeat // 2))
    weights = round(sum(p.nbytes for p in net.parameters()) / 1e9, 2)
    return rows_of(times, {"tokens": tokens, "model": name, "weights_GB": weights})


def optimizer_step(net: Transformer) -> Callable[[], None]:
    """Muon and AdamW over float32 copies, as in training."""
    masters = Masters(net)
    optimizers = build_optimizers(masters.params, muon_heads(net), OptimConfig(), None)

    def step() -> None:
        masters.take_gradients()
        clip_gradients(masters.params.values(), 1.0)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        masters.write_back()

    return step


def loss_of(net: Transformer, ids: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    x = net.hidden(ids[:-1], sequences).x_TD
    return cross_entropy(x, net.lm_head.weight, ids[1:], None, 4096 * 8192)[0] / len(ids)


if __name__ == "__main__":
    main()
