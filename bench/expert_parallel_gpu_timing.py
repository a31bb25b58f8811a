"""Times of CUDA graphs, and the routings of the one-GPU figures of balanced expert parallelism.

Legend: E experts, J choices a token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

J = 16


def graphed(call: Callable[[], Any], inner: int, repeat: int = 15, rest: float = 0) -> dict[str, float]:
    """Microseconds a call, in a graph of `inner` calls: median, least and most of `repeat` replays, after a rest."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    graph.replay()
    times = []
    for _ in range(repeat):
        time.sleep(rest)
        times.append(elapsed(graph.replay) * 1e3 / inner)
    del graph
    torch.cuda.empty_cache()
    return {"median": round(statistics.median(times), 2), "min": round(min(times), 2), "max": round(max(times), 2)}


def milliseconds(call: Callable[[], Any], repeat: int) -> float:
    """Median of `repeat` replays of a graph of one call.

    Each after a rest: in a second of such work a GPU meets its power limit, and the same graph takes 10 to 15 % longer.
    """
    return round(graphed(call, 1, repeat, rest=0.3)["median"] / 1e3, 3)


def elapsed(call: Callable[[], Any]) -> float:
    """Milliseconds by device events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def shares(kind: str, ranks: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    p_E = torch.ones(experts, dtype=torch.float64)
    if kind.startswith("lognormal"):
        p_E = (float(kind.split()[1]) * torch.randn(experts, generator=generator, dtype=torch.float64)).exp()
    elif kind == "one rank idle":
        p_E[: experts // ranks] = 0
    elif kind == "all on one rank":
        p_E[experts // ranks :] = 0
    elif kind == "16 experts of one rank":
        p_E[J:] = 0
    return p_E / p_E.sum()


def draw(p_E: torch.Tensor, tokens: int, seed: int) -> torch.Tensor:
    """Distinct experts a token, by the Gumbel trick."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    noise = torch.empty(tokens, p_E.shape[0], device="cuda").exponential_(generator=generator)
    return (noise / p_E.float().cuda().clamp(min=1e-30)).topk(J, largest=False).indices
