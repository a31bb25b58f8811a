"""A training step with gradients and optimizer states outside the device, and a reference model in borrowed memory.

    python bench/memory_outside.py [--micro 4] [--rounds 3] [--nvme /tmp] [--out bench/results/memory_outside.json]

One CUDA device (`--small`: a few tokens on a CPU, to try the script). The model is the reduced slice of
bench/memory.py, bf16 with float32 masters, Muon and AdamW. A step is `--micro` micro-batches forward and backward,
clipping and the optimizers. Variants begin from the same weights and take the same steps; a figure is the median over
the rounds after one step that does not count. Bytes are of the allocator: `pass` while micro-batches run, `step` in the
optimizers. Weights after the last step are compared bit by bit with the variant where all is resident.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from memory_device import write
from memory_slice import build, slice_config

from perilune import Transformer
from perilune.memory.gradients import HostGradients
from perilune.memory.optimizer import States
from perilune.memory.reference import borrow
from perilune.model import initialize, muon_heads
from perilune.ops.sequences import Sequences
from perilune.train.config import OptimConfig
from perilune.train.masters import Masters
from perilune.train.optim import build_optimizers, clip_gradients, step_optimizers

VARIANTS = {
    "resident": (False, None),
    "gradients on the host": (True, None),
    "states on the host": (False, "host"),
    "both on the host": (True, "host"),
    "states in files": (False, "nvme"),
}


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def model_of(args: argparse.Namespace) -> Transformer:
    if args.small:
        sys.path.insert(0, "tests/memory")
        from memory_models import small_config

        return initialize(Transformer(small_config()), 0).bfloat16()
    model = build(slice_config("reduced", args.layers, args.experts))
    for parameter in model.parameters():
        parameter.grad = None
    return model


def batches(args: argparse.Namespace, vocabulary: int, device: torch.device) -> tuple[list[torch.Tensor], Sequences]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, vocabulary, (args.tokens,), generator=generator).to(device) for _ in range(args.micro)]
    return tokens, Sequences.from_lengths([args.tokens // 2, args.tokens - args.tokens // 2], device=device)


def peak(device: torch.device) -> float:
    """GB since the last call."""
    if device.type != "cuda":
        return 0.0
    size = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return round(size, 3)


def variant(args: argparse.Namespace, device: torch.device, on_host: bool, where: str | None) -> dict[str, Any]:
    model = model_of(args)
    tokens, sequences = batches(args, model.config.vocab_size, device)
    masters = Masters(model)
    states = None if where is None else States(device, Path(args.nvme) if where == "nvme" else None)
    optimizers = build_optimizers(masters.params, muon_heads(model), OptimConfig(), None, states)
    host = HostGradients(masters.weights) if on_host else None
    times: dict[str, list[float]] = {"passes": [], "take": [], "optimizers": []}
    losses: list[float] = []
    found: dict[str, Any] = {}
    for turn in range(args.rounds + 1):
        peak(device)
        begin = clock(device)
        for one in tokens:
            loss = model.hidden(one, sequences).x_TD.float().square().mean(-1).square().mean()
            loss.backward()
        made = clock(device)
        losses.append(float(loss.detach()))
        found["pass_gb"] = peak(device)
        masters.take_gradients()
        for name, grad in host.take().items() if host is not None else ():
            masters.params[name].grad = grad.to(masters.params[name].dtype)
        taken = clock(device)
        found["take_gb"] = peak(device)
        clip_gradients(masters.params.values(), 1.0)
        step_optimizers(optimizers, states)
        masters.write_back()
        end = clock(device)
        found["step_gb"] = peak(device)
        if turn:
            for name, seconds in (("passes", made - begin), ("take", taken - made), ("optimizers", end - taken)):
                times[name].append(round(1e3 * seconds, 1))
    if host is not None:
        host.close()
    bits = hashlib.sha256()
    for value in masters.params.values():
        # The sum of a tensor's bits stands for it.
        bits.update(str(int(value.detach().view(torch.int32).sum(dtype=torch.int64))).encode())
    found |= {f"{name}_ms": round(statistics.median(of), 1) for name, of in times.items()} | {"all_ms": times}
    found |= {"weights": bits.hexdigest()[:16], "losses": losses}
    if states is not None:
        found["states_on_device_gb"] = round(states.most / 1e9, 3)
    return found


def reference(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A forward pass of a frozen model: resident, and in the memory of the gradients."""
    model = model_of(args)
    frozen = model_of(args).requires_grad_(False)
    tokens, sequences = batches(args, model.config.vocab_size, device)
    out: dict[str, Any] = {"resident_ms": [], "borrowed_ms": []}
    with torch.no_grad():
        for turn in range(args.rounds + 1):
            begin = clock(device)
            want = frozen.hidden(tokens[0], sequences).x_TD
            if turn:
                out["resident_ms"].append(round(1e3 * (clock(device) - begin), 1))
    weights = sum(x.nbytes for x in (*frozen.parameters(), *frozen.buffers()))
    for x in (*frozen.parameters(), *frozen.buffers()):
        x.data = x.data.cpu().pin_memory() if device.type == "cuda" else x.data
    base = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    units = [part for layer in frozen.layers for part in (layer.attn, layer.ffn)]
    same = True
    for turn in range(args.rounds + 1):
        peak(device)
        begin = clock(device)
        with borrow(model.parameters(), frozen, units) as borrowed:
            got = borrowed.hidden(tokens[0], sequences).x_TD
            if turn:
                out["borrowed_ms"].append(round(1e3 * (clock(device) - begin), 1))
            same = same and torch.equal(got, want)
    out |= {"same": same, "weights_gb": round(weights / 1e9, 3)}
    out["beyond_gb"] = round(peak(device) - base / 1e9, 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nvme", default="/tmp")
    parser.add_argument("--variants", nargs="*", choices=tuple(VARIANTS), default=tuple(VARIANTS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory_outside.json"))
    args = parser.parse_args()
    device = torch.device("cpu" if args.small else "cuda")
    result: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}}
    result["device"] = "cpu" if args.small else torch.cuda.get_device_name()
    result |= {"torch": torch.__version__, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    for name in args.variants:
        row = result[name] = variant(args, device, *VARIANTS[name])
        row["same"] = row["weights"] == result[args.variants[0]]["weights"]
        print(name, json.dumps(row), flush=True)
        write(args.out, result)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    result["reference"] = reference(args, device)
    print("reference", json.dumps(result["reference"]), flush=True)
    write(args.out, result)


if __name__ == "__main__":
    main()
