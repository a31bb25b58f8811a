"""Timing shared by the module benchmarks: every call in turns, on the device, with the host out of the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import torch

Calls = dict[str, Callable[[], object]]


def rounds(calls: Calls, count: int, graph: bool = False, warmup: int = 1) -> dict[str, dict[str, float | str]]:
    """{name: {"ms", "fastest", "slowest"}} of each call, or {"error"} of one that raised.

    Calls run in turns, so that a drift of the clocks meets all of them, and in another order each round, since a call
    that follows one that drew much power runs at lower clocks. With `graph` each is captured and replayed, which takes
    the launches out of small shapes.
    """
    out: dict[str, dict[str, float | str]] = {}
    ready: Calls = {}
    for name, call in calls.items():
        try:
            for _ in range(warmup + graph):
                call()
            torch.cuda.synchronize()
            ready[name] = captured(call) if graph else call
        except Exception as error:
            out[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    times: dict[str, list[float]] = {name: [] for name in ready}
    order = list(ready.items())
    shuffle = random.Random(0).shuffle
    for _ in range(count):
        shuffle(order)
        for name, call in order:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # About 0.5 ms in which the launches queue up, so that the host is not timed.
            torch.cuda._sleep(1_000_000)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
    return out | {n: {"ms": median(t), "fastest": min(t), "slowest": max(t)} for n, t in times.items()}


def captured(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def figures(
    module: str, case: str, times: dict[str, dict[str, float | str]], flop: int = 0, bytes_: int = 0, note: str = ""
) -> list[dict[str, object]]:
    """One dict for each implementation."""
    out = []
    for name, time in times.items():
        row: dict[str, object] = {"module": module, "case": case, "implementation": name, **time}
        if "error" not in time:
            row |= {"flop": flop, "bytes": bytes_}
        if note:
            row["note"] = note
        out.append(row)
    return out
