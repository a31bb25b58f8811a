"""Figures on several GPUs of one machine, one module a part: first that it is right, then what it takes.

    torchrun --nproc-per-node 2 bench/multi_gpu.py --parts ep --out bench/results/multi_gpu.json

A part is bench/multi_gpu_NAME.py with `add_arguments(group)`; `run(args)`, called on every rank, whose result is
written under its name; and `plot(result, file)`. What is not measured keeps what --out has of it, and every row says
its run. NVLink multicast is not used: NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1 are set before anything
starts.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
from pathlib import Path
from typing import Any

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import torch
import torch.distributed as dist
from multi_gpu_common import machine, say

PARTS = ("ep", "parallel")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/multi_gpu.json"))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--plot", type=Path, help="draw the one of --parts from --out to this file, measure nothing")
    modules = {part: importlib.import_module(f"multi_gpu_{part}") for part in PARTS}
    for part, module in modules.items():
        module.add_arguments(parser.add_argument_group(part))
    args = parser.parse_args()
    result: dict[str, Any] = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {}
    if args.plot is not None:
        modules[args.parts[0]].plot(result[args.parts[0]], args.plot)
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
    here = machine()
    say(here)
    for part in args.parts:
        result[part] = merged(result.get(part, {}), {"machine": here} | modules[part].run(args))
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


# What tells rows of one list apart.
KEYS = ("R", "S", "load", "ranks", "heads", "tokens", "model", "layout")


def merged(old: Any, new: Any) -> Any:
    """`new`, with what only `old` has: of dicts by key, of lists of rows by what they are of."""
    if isinstance(old, dict) and isinstance(new, dict) and "run" not in new:
        return old | {key: merged(old.get(key), value) for key, value in new.items()}
    if isinstance(new, list) and isinstance(old, list) and new and isinstance(new[0], dict):
        rows = {tuple(row.get(key) for key in KEYS): row for row in old}
        for row in new:
            place = tuple(row.get(key) for key in KEYS)
            rows[place] = merged(rows.get(place), row)
        return list(rows.values())
    return new


if __name__ == "__main__":
    main()
