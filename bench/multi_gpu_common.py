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
from parallel_layers import DEVICE

START = time.monotonic()
# Stands in every row, since a file may hold rows of several runs.
RUN = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
# Without a GPU: small shapes over gloo, to see that every part runs; its times mean nothing.
DRY = DEVICE.type != "cuda"


def say(what: Any) -> None:
    """Print on the first rank, with the seconds since the start."""
    if dist.get_rank() == 0:
        print(f"{seconds():6.1f} s  {what if isinstance(what, str) else json.dumps(what)}", flush=True)


def seconds() -> float:
    return time.monotonic() - START


def everywhere(value: float, op: Any = dist.ReduceOp.MAX) -> float:
    """The largest (or `op`) of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(tensor, op=op)
    return float(tensor)


def late(deadline: float) -> bool:
    """Whether any rank is past it, in seconds since the start."""
    return everywhere(seconds() - deadline) > 0


def rest() -> None:
    """Wait until the device has done all it was given."""
    if not DRY:
        torch.cuda.synchronize()


def mark() -> Any:
    """This moment of the current stream, or of the clock where there is none; for `between`, after a `rest`."""
    if DRY:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Milliseconds."""
    passed: float = (end - start) * 1e3 if DRY else start.elapsed_time(end)
    return passed


def forget_peak() -> None:
    """Free what torch keeps for later, and count `peak_GB` from here."""
    if not DRY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_GB() -> float:
    """Most memory of torch's allocator since `forget_peak`, of the fullest rank; 0 without a GPU."""
    return everywhere(0.0 if DRY else torch.cuda.max_memory_allocated() / 1e9)


Times = dict[str, float]  # median, min, max


def once(call: Callable[[], Any]) -> float:
    """Milliseconds of the slowest rank, from a barrier."""
    rest()
    dist.barrier()
    start = mark()
    call()
    end = mark()
    rest()
    return everywhere(between(start, end))


def timed(call: Callable[[], Any], repeat: int, warm: int = 2) -> Times:
    """`once`, so often, after `warm` calls that do not count."""
    return spread([once(call) for _ in range(warm + repeat)][warm:])


def spread(times: list[float]) -> Times:
    return {name: round(of(times), 3) for name, of in (("median", statistics.median), ("min", min), ("max", max))}


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


def uncovered(call: Callable[[], Any]) -> Times:
    """One call in milliseconds of the GPU: `call` in all, `nccl` while nothing but NCCL's kernels ran, which includes
    their waiting for other ranks, `idle` while nothing ran. Of the rank that computed least of the time."""
    if DRY:
        return {"call": round(once(call), 3), "nccl": 0.0, "idle": 0.0}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, "nccl" in event.name.lower())
        for event in profile.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    ]
    busy, work = covered(spans), covered([span for span in spans if not span[2]])
    whole = max((end for _, end, _ in spans), default=0) - min((start for start, _, _ in spans), default=0)
    found = {"call": whole, "nccl": busy - work, "idle": whole - busy}
    ranks: list[Times] = [found] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: round(value / 1e3, 3) for name, value in found.items()})
    return max(ranks, key=lambda rank: rank["nccl"] + rank["idle"])


def covered(spans: list[tuple[float, float, bool]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def machine() -> dict[str, Any]:
    """GPUs and links, driver, versions, day."""

    def shell(*command: str) -> str:
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
            return re.sub(r"\x1b\[\d*m", "", text)
        except (OSError, subprocess.TimeoutExpired):
            return ""

    found = {"torch": torch.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    ranks = dist.get_world_size()
    if DRY:
        return {"device": "cpu, a dry run", "ranks": ranks} | found
    # Not where there is no GPU, which may have none.
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "gpus": ranks,
        "driver": shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
        "topology": shell("nvidia-smi", "topo", "-m").splitlines()[: ranks + 1],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": triton.__version__,
    } | found
