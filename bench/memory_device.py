"""What the memory benches ask of a device, and an end for what takes too long. On a CPU there is nothing to count."""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUDA = DEVICE.type == "cuda"


class TimeLimitError(Exception):
    """The block of `capped` has had its time."""


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def allocated() -> int:
    return torch.cuda.memory_allocated() if CUDA else 0


def peak(forget: bool = False) -> int:
    """Most bytes since it was last forgotten."""
    if not CUDA:
        return 0
    if forget:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def capacity() -> int:
    """Bytes of the device; on a CPU so few that a plan's longest batch is a short one."""
    return torch.cuda.get_device_properties(DEVICE).total_memory if CUDA else 1 << 23


@contextlib.contextmanager
def capped(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError inside the block when it takes longer: between two operations, as soon as Python runs."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def rate(copy: Callable[[], object], size: int) -> float:
    """GB/s of a call that moves `size` bytes."""
    copy()
    wait()
    begin = time.perf_counter()
    for _ in range(4):
        copy()
    wait()
    return 4 * size / (time.perf_counter() - begin) / 1e9


def write(path: Path, found: dict[str, Any]) -> None:
    """All of it, or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
