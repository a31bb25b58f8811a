"""Figures on several GPUs of one machine, one module a part: first that it is right, then what it takes.

    torchrun --nproc-per-node 2 bench/multi_gpu.py --plots /tmp/plots

A part is bench/multi_gpu_NAME.py with `add_arguments(group)`; `run(args, keep)`, called on every rank, which hands what
it has found to `keep` as it comes; and `plot(result, file)`. It is written under the part's name at once, so a run that
is cut short loses one row. A part begins nothing after its own --NAME-seconds, and the run ends after --seconds at the
latest. What is not measured keeps what --out has of it, and every row says its run.

Without GPUs the same runs small over gloo, as far as CPUs can: to see that it works, not for its times. NVLink
multicast is not used: NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1 are set before anything starts.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import threading
from pathlib import Path
from typing import Any

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# The profiler of one row would otherwise slow the launches of the next.
os.environ["TEARDOWN_CUPTI"] = "1"

import torch
import torch.distributed as dist
from multi_gpu_common import DRY, machine, say, seconds

PARTS = ("ep", "parallel")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kept = Path("bench/results/multi_gpu.json")
    parser.add_argument("--out", type=Path, default=kept)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=455.0, help="after which the run ends, in all")
    parser.add_argument("--plots", type=Path, help="a folder to draw every part to, as PART.svg, when it has run")
    parser.add_argument("--plot", type=Path, help="draw the one of --parts from --out to this file, measure nothing")
    modules = {part: importlib.import_module(f"multi_gpu_{part}") for part in PARTS}
    for part, module in modules.items():
        module.add_arguments(parser.add_argument_group(part))
    args = parser.parse_args()
    if DRY and args.plot is None and args.out == kept:
        parser.error(f"--out is {kept}; without GPUs name another file, since nothing is measured")
    result: dict[str, Any] = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {}
    if args.plot is not None:
        modules[args.parts[0]].plot(result[args.parts[0]], args.plot)
        return
    end = threading.Timer(args.seconds - seconds(), stop, [args])
    end.daemon = True
    end.start()
    if not DRY:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if DRY else "nccl", timeout=datetime.timedelta(seconds=120))
    here = machine()
    say(here)
    for part in args.parts:

        def keep(found: dict[str, Any], part: str = part) -> None:
            result[part] = merged(result.get(part, {}), {"machine": here} | found)
            if dist.get_rank() == 0:
                write(args.out, result)

        modules[part].run(args, keep)
        if args.plots is not None and dist.get_rank() == 0:
            args.plots.mkdir(parents=True, exist_ok=True)
            modules[part].plot(result[part], args.plots / f"{part}.svg")
    dist.barrier()
    end.cancel()
    dist.destroy_process_group()


def stop(args: argparse.Namespace) -> None:
    """End this process, whatever it waits for; torchrun ends the others."""
    print(f"the {args.seconds:.0f} s are over; what was measured is in {args.out}", flush=True)
    os._exit(3)


def write(file: Path, result: dict[str, Any]) -> None:
    """Whole or not at all: the run may be ended meanwhile."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


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
