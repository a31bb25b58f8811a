"""Memory of another GPU: copies there and back, and a pipeline of two stages whose first one keeps activations there.

    torchrun --nproc-per-node 2 bench/memory_peer.py [--tokens 8192] [--micro 6] [--rounds 5] [--out FILE]

Two CUDA devices of one host (`--small` runs a few tokens on two CPU processes instead, to try the script). The model
is the reduced slice of bench/memory.py, bf16, forward and backward of all micro-batches by 1F1B, no optimizer. Plans
take turns; a figure is the median over the rounds, with all of them beside. Loss bits and gradients are compared with
no plan. The loan is what evens out the kept bytes of both stages, measured by one profiled micro-batch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

import torch
import torch.distributed as dist
from memory_device import write
from memory_slice import build, slice_config
from multi_gpu_common import machine

from perilune import Transformer
from perilune.memory import Memory, Plan, load_plan, nixl
from perilune.memory.lending import Lending, Loan, Transport, even_out
from perilune.memory.profile import device_bytes, predict, profile
from perilune.memory.stores import MemoryStore
from perilune.memory.waits import Waits
from perilune.model import initialize
from perilune.ops.sequences import Sequences
from perilune.parallel.pipeline import MicroBatch, Pipeline

MOVED = {"norm": "recompute", "kda.qkv": "recompute", "kda.normed": "recompute", "mla.gated": "recompute"}
MOVED |= {"*mlp.a": "recompute", "moe.normed": "recompute"}
Note = Callable[[str, Any], None]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def copies(rank: int, device: torch.device, transport: Transport, size: int, count: int) -> dict[str, Any]:
    """GB/s of `count` tensors of `size` bytes there and back, and whether they came back as they were."""
    lending = Lending([Loan(0, 1, count * size)], device, 60.0, transport)
    rates: dict[str, Any] = {"out": [], "back": []}
    same = True
    if rank == 0:
        tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(count)]
        for _ in range(4):
            wait(device)
            begin = time.perf_counter()
            tickets = [lending.store.put(x) for x in tensors]
            lending.store._let_go(0)
            wait(device)
            middle = time.perf_counter()
            for ticket in tickets:
                lending.store.prefetch(ticket)
            got = [lending.store.get(ticket) for ticket in tickets]
            wait(device)
            end = time.perf_counter()
            same = same and all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
            for ticket in tickets:
                lending.store.drop(ticket)
            rates["out"].append(count * size / (middle - begin) / 1e9)
            rates["back"].append(count * size / (end - middle) / 1e9)
    lending.close()
    dist.barrier()
    return {"same": same, **{name: [round(x, 1) for x in found[1:]] for name, found in rates.items()}}


class Bench:
    """The stages of this rank and their micro-batches."""

    def __init__(self, args: argparse.Namespace, rank: int, device: torch.device) -> None:
        config = slice_config("reduced", args.layers, args.experts)
        if args.small:
            import sys

            sys.path.insert(0, "tests/memory")
            from memory_models import small_config

            config = small_config(args.layers)
            model = initialize(Transformer(config), 0)
        else:
            model = build(config)
            for parameter in model.parameters():
                parameter.grad = None
        dtype = torch.float32 if args.small else torch.bfloat16
        self.rank, self.device = rank, device
        self.pipeline = Pipeline(model, dist.group.WORLD, "1F1B", 1, device, dtype)
        self.model = model
        generator = torch.Generator().manual_seed(0)
        self.rows = args.tokens
        sequences = Sequences.from_lengths([args.tokens // 2, args.tokens - args.tokens // 2], device=device)
        self.micros = [
            MicroBatch(torch.randint(0, config.vocab_size, (args.tokens,), generator=generator).to(device), sequences)
            for _ in range(args.micro)
        ]
        self.weights = [*model.parameters(), *model.buffers(), sequences.cu_seqlens, *(m.tokens_T for m in self.micros)]
        self.losses: list[torch.Tensor] = []

    def loss(self, x_TD: torch.Tensor, micro: int) -> torch.Tensor:
        value = x_TD.float().square().mean(-1).square().mean()
        self.losses.append(value.detach())
        # What the schedule expects of the last stage.
        return value.double()

    def kept(self) -> int:
        """Bytes that a micro-batch keeps on this rank, elements computed again."""

        def forward() -> torch.Tensor:
            return self.pipeline.forward(self.micros[0], self.rows, self.loss, gradients=True)

        forward()
        return device_bytes(predict(profile(forward, self.weights, self.device), Plan.of(MOVED, required=False)))

    def step(self, memory: Memory) -> dict[str, Any]:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.losses.clear()
        dist.barrier()
        wait(self.device)
        cuda = self.device.type == "cuda"
        base = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        memory.waits = Waits(self.device)
        begin = time.perf_counter()
        with memory.step():
            self.pipeline.step(self.micros, self.rows, self.loss, lambda stats: None)
        wait(self.device)
        ms = 1e3 * (time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() - base if cuda else 0
        waited = round(1e3 * sum(memory.waits.seconds().values()), 2)
        return {"ms": ms, "peak": peak, "losses": [float(x) for x in self.losses], "waited_ms": waited}

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def stages(args: argparse.Namespace, rank: int, device: torch.device, note: Note) -> None:
    """Both ranks' rows, noted whenever a plan has had its first step and after every round."""
    begin = time.monotonic()
    bench = Bench(args, rank, device)
    kept = [0, 0]
    dist.all_gather_object(kept, bench.kept())
    live = [min(2, args.micro), 1]
    loans = even_out([a * b for a, b in zip(kept, live, strict=True)], [kept[0] * (live[0] - 1), 0])
    transports: dict[str, Transport] = {"peer": "auto", "peer nccl": "messages"}
    lent = {name: Lending(loans, device, 60.0, transport) for name, transport in transports.items()}
    if device.type == "cuda":
        from perilune.memory.pinned import PinnedStore

        host: Any = PinnedStore(device)
    else:
        host = MemoryStore()
    away = {place: Plan.of(MOVED | {"*": place}, required=False) for place in ("host", "peer")}
    memories = {
        "none": Memory(Plan(), bench.weights),
        "elements recomputed": Memory(Plan.of(MOVED, required=False), bench.weights),
        "peer": Memory(away["peer"], bench.weights, peer=lent["peer"].store),
        "host": Memory(away["host"], bench.weights, host),
        "full-recompute": Memory(load_plan("full-recompute"), bench.weights),
        # Last, as it may not end in its time.
        "peer nccl": Memory(away["peer"], bench.weights, peer=lent["peer nccl"].store),
    }
    if args.no_messages or device.type == "cpu":
        memories.pop("peer nccl")
    rows: dict[str, Any] = {}
    about = {"kept_gb": [k / 1e9 for k in kept], "loan_gb": [loan.bytes / 1e9 for loan in loans]}

    def tell() -> None:
        for row in rows.values():
            row["median_ms"] = round(statistics.median(row["ms"]), 1) if row["ms"] else None
        rows["none"]["stored_at_peer_gb"] = round(lent["peer"].store.most / 1e9, 3)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, rows)
        note("stages", about | {"ranks": everyone})

    reference: list[torch.Tensor] = []
    for name, memory in memories.items():
        got = bench.step(memory)
        gradients = bench.gradients()
        reference = reference or gradients
        different = sum(not torch.equal(a, b) for a, b in zip(gradients, reference, strict=True))
        rows[name] = {"ms": [], "first_ms": round(got["ms"], 1), "different": different, "losses": got["losses"]}
        del gradients
        tell()
    del reference
    for _ in range(args.rounds):
        # One clock for both, so that they end together.
        left = [args.seconds - (time.monotonic() - begin)]
        dist.broadcast_object_list(left, 0)
        if left[0] < 0:
            break
        for name, memory in memories.items():
            got = bench.step(memory)
            rows[name]["ms"].append(round(got["ms"], 1))
            rows[name]["peak_gb"] = round(got["peak"] / 1e9, 3)
            rows[name]["losses_same"] = got["losses"] == rows["none"]["losses"]
            rows[name].setdefault("waited_ms", []).append(got["waited_ms"])
        tell()
    for lending in lent.values():
        lending.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--micro", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="*", choices=("copies", "stages"), default=("copies", "stages"))
    parser.add_argument("--seconds", type=float, default=180.0, help="after which no round of steps is begun")
    parser.add_argument("--no-messages", action="store_true", help="leave out NCCL as the transport")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory_peer.json"))
    args = parser.parse_args()
    device = torch.device("cpu") if args.small else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.small else "nccl", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    result: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}}
    if not args.small:
        result["machine"] = machine()

    def note(name: str, value: Any) -> None:
        result[name] = value
        if rank == 0:
            print(name, json.dumps(value), flush=True)
            write(args.out, result)

    size, count = (1 << 20, 4) if args.small else (1 << 28, 8)
    kinds: list[Transport] = ["messages"] if args.small else ["mapped", "messages"]
    kinds = [*kinds, "nixl"] if nixl.installed() else kinds
    if "copies" in args.parts:
        note(f"copies {kinds[0]}", copies(rank, device, kinds[0], size, count))
    if "stages" in args.parts:
        stages(args, rank, device, note)
    for kind in kinds[1:] if "copies" in args.parts else ():
        note(f"copies {kind}", copies(rank, device, kind, size, count))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
