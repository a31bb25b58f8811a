"""Batches of decode calls and their times; used by `kda.py` and `kda_decode.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from perilune.config import Gate
from perilune.ops.kda import decode, decode_cuda, decode_triton
from perilune.ops.kda.decode_call import BLOCK, CAPACITY, CENTRE, Call

GATE = Gate("safe", -5.0)
DIM = 128


def make(tokens: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> tuple[decode.Projected, decode.Weights]:
    """Random projected inputs and weights of one layer."""

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda") * scale

    inputs = decode.Projected(
        *[rand(tokens, heads, DIM).to(dtype) for _ in range(3)],
        rand(tokens, heads, DIM, scale=2).to(dtype),
        rand(tokens, heads).to(dtype),
        rand(tokens, heads, DIM).to(dtype),
    )
    taps = [rand(heads * DIM, 4, scale=0.5) for _ in range(3)]
    weights = decode.Weights(
        *taps, rand(heads, scale=0.3), rand(heads, DIM) - 2.0, 1 + rand(DIM, scale=0.1), 1e-5, GATE
    )
    return inputs, weights


def pools(slots: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Random matrices and convolution windows."""
    matrix = torch.randn(slots, heads, DIM, DIM, device="cuda")
    return matrix, torch.randn(slots, 3, 3 * heads * DIM, device="cuda").to(dtype)


def timed(calls: list[Callable[[], Any]], replays: int = 15) -> dict[str, float]:
    """Microseconds a call: all calls captured in one CUDA graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(replays + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return {"us": statistics.median(times), "min": min(times), "max": max(times)}


def slots_of(batch: int, sets: int) -> list[torch.Tensor]:
    """Disjoint, shuffled slot lists."""
    return [x.to(torch.int32) for x in torch.randperm(batch * sets, device="cuda").chunk(sets)]


def lengths_at(batch: int, length: int) -> torch.Tensor:
    """The same tail length for all sequences."""
    return torch.full((batch,), length, dtype=torch.int32, device="cuda")


class Case:
    """One shape: several disjoint batches of slots, each with its own inputs and weights."""

    def __init__(self, batch: int, heads: int, drafts: int = 1, sets: int = 2, ring: torch.dtype | None = None) -> None:
        self.batch, self.heads, self.drafts, self.sets = batch, heads, drafts, sets
        self.data = [make(batch * drafts, heads) for _ in range(sets)]
        self.matrix, self.window = pools(batch * sets, heads)
        self.slots = slots_of(batch, sets)
        self.tail = None
        if ring is not None:
            self.tail = decode.Tail.empty(batch * sets, heads, DIM, DIM, dtype=ring, device="cuda")
            self.fill()

    def fill(self) -> None:
        """Entries as a decode would leave them, without the cost of 71 steps: random keys with block-local decays."""
        assert self.tail is not None
        keys = torch.nn.functional.normalize(torch.randn_like(self.tail.k_SHRK, dtype=torch.float32), dim=-1)
        log = -torch.rand_like(keys)
        for block in range(0, CAPACITY, BLOCK):
            part = log[:, :, block : block + BLOCK]
            part.copy_(part.cumsum(2))
        self.tail.g_SHRK.copy_(log)
        self.tail.k_SHRK.copy_(keys * (-CENTRE - log).exp())
        self.tail.u_SHRV.copy_(torch.randn_like(keys))

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Matrices and windows."""
        return self.matrix, self.window

    def call(self, i: int, store: bool = True, **fields: Any) -> Call:
        """The call on set i."""
        return Call(*self.data[i], self.matrix, self.window, self.slots[i], self.drafts, store, **fields)

    def step(self, module: Any = decode_cuda, store: bool = True, repeat: int = 1) -> dict[str, float]:
        """The in-place kernel."""
        calls = [lambda i=i: module.step(self.call(i, store)) for i in range(self.sets)]
        return timed(calls * repeat)

    def replay(self, module: Any = decode_cuda) -> dict[str, float]:
        """The in-place kernel committing all drafts."""
        accepted = lengths_at(self.batch, self.drafts)
        return timed([lambda i=i: module.step(self.call(i, counts_N=accepted)) for i in range(self.sets)])

    def tail_step(
        self,
        lengths: torch.Tensor,
        module: Any = decode_cuda,
        shift: bool = True,
        fold: bool = False,
        repeat: int = 1,
    ) -> dict[str, float]:
        """The tail kernel at given tail lengths."""
        fields = [
            {"counts_N": lengths, "tail": self.tail, "target_N": self.slots[i] if fold else None}
            for i in range(self.sets)
        ]
        calls = [lambda i=i: module.tail_step(self.call(i, shift, **fields[i])) for i in range(self.sets)]
        return timed(calls * repeat)

    def fold(self, lengths: torch.Tensor) -> dict[str, float]:
        """The fold kernel."""
        pools = (self.matrix, self.tail, lengths)
        calls = [
            lambda i=i: decode_triton.fold(*pools, self.slots[i], None, self.slots[i], GATE) for i in range(self.sets)
        ]
        return timed(calls)
