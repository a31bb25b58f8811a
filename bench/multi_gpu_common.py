"""What the parts of bench/multi_gpu.py share: words, times, and the machine they were measured on."""

from __future__ import annotations

import datetime
import json
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton

START = time.monotonic()


def say(what: Any) -> None:
    """Print on the first rank, with the seconds since the start."""
    if dist.get_rank() == 0:
        print(f"{seconds():6.1f} s  {what if isinstance(what, str) else json.dumps(what)}", flush=True)


def seconds() -> float:
    return time.monotonic() - START


def everywhere(value: float, op: Any = dist.ReduceOp.MAX) -> float:
    """The largest (or `op`) of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(tensor, op=op)
    return float(tensor)


Times = dict[str, float]  # median, min, max


def timed(call: Callable[[], Any], repeat: int) -> Times:
    """Milliseconds of the slowest rank, each repeat from a barrier."""
    times = []
    for i in range(repeat + 2):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(everywhere(start.elapsed_time(end)))
    return spread(times)


def spread(times: list[float]) -> Times:
    return {name: round(of(times), 3) for name, of in (("median", statistics.median), ("min", min), ("max", max))}


def replayed(call: Callable[[], Any], repeat: int) -> Times:
    """`timed` of a graph of the call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    value = timed(graph.replay, repeat)
    del graph
    torch.cuda.empty_cache()
    return value


def machine() -> dict[str, Any]:
    """GPUs and links, driver, versions, day."""

    def shell(*command: str) -> str:
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
            return re.sub(r"\x1b\[\d*m", "", text)
        except (OSError, subprocess.TimeoutExpired):
            return ""

    return {
        "device": torch.cuda.get_device_name(),
        "gpus": dist.get_world_size(),
        "driver": shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
        "topology": shell("nvidia-smi", "topo", "-m").splitlines()[: dist.get_world_size() + 1],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
