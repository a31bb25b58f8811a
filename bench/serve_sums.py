"""Sums over GPUs inside CUDA graphs: NCCL's all-reduce, and torch's one-shot and two-shot over symmetric memory.

    torchrun --standalone --nproc-per-node 2 bench/serve_sums.py --out sums.json

A term is [T, 2304] bf16. Microseconds (median, least, most of seven) of one of 20 sums in a graph; terms of the shots
are copied into symmetric memory in that time. What they give is compared with the sum in float32, rounded once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Multicast is not used.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

WIDTH, SUMS = 2304, 20
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


def microseconds(call: Callable[[], object]) -> list[float]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            call()
    times = []
    for _ in range(7):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / SUMS * 1e3)
    return [round(f(times), 2) for f in (statistics.median, min, max)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    name = dist.group.WORLD.group_name
    room = symm_mem.empty(max(TOKENS) * WIDTH, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(room, dist.group.WORLD)
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, WIDTH, device=device).bfloat16()
        mine, summed = room[: x.numel()].view(x.shape), x.clone()
        every = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(every, x)
        want = torch.stack(every).float().sum(0).bfloat16()

        def one(x: torch.Tensor = x, mine: torch.Tensor = mine) -> torch.Tensor:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(mine, x, "sum", name)

        def two(x: torch.Tensor = x, mine: torch.Tensor = mine) -> torch.Tensor:
            mine.copy_(x)
            return torch.ops.symm_mem.two_shot_all_reduce_(mine, "sum", name)

        def nccl(summed: torch.Tensor = summed) -> None:
            dist.all_reduce(summed)

        row: dict[str, Any] = {"tokens": tokens, "kb": x.nbytes / 1e3, "nccl_us": microseconds(nccl)}
        for label, call in (("one_shot", one), ("two_shot", two)):
            row[f"{label}_equal"] = bool(torch.equal(call(), want))
            row[f"{label}_us"] = microseconds(call)
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": ranks, "rows": rows}
    if rank == 0 and options.out:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    dist.barrier()
    os._exit(0)  # graphs with collectives in them outlive their group


if __name__ == "__main__":
    main()
