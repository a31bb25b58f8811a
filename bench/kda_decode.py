"""Times the KDA decode kernels in CUDA graphs over state that does not fit the L2 cache; writes JSON.

    python bench/kda_decode.py --out bench/results/kda_decode.json     the shipped configurations, all shapes
    python bench/kda_decode.py --sweep --only "" --out sweep.json      one shape, Triton configurations

Every time is the median over graph replays divided by the launches in a graph; every configuration is compared with
the float64 reference before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from perilune.config import Gate
from perilune.ops.kda import decode, decode_cuda, decode_triton

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
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
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


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def double(group: Any) -> Any:
    """A dataclass of tensors in float64 on the CPU."""
    return type(group)(*[x.double().cpu() if isinstance(x, torch.Tensor) else x for x in vars(group).values()])


def slots_of(batch: int, sets: int) -> list[torch.Tensor]:
    """Disjoint, shuffled slot lists."""
    return [x.to(torch.int32) for x in torch.randperm(batch * sets, device="cuda").chunk(sets)]


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
        for block in range(0, decode.CAPACITY, decode.BLOCK):
            part = log[:, :, block : block + decode.BLOCK]
            part.copy_(part.cumsum(2))
        self.tail.g_SHRK.copy_(log)
        self.tail.k_SHRK.copy_(keys * (-decode.CENTRE - log).exp())
        self.tail.u_SHRV.copy_(torch.randn_like(keys))

    def step(self, module: Any = decode_cuda, store: bool = True, repeat: int = 1, **config: Any) -> dict[str, float]:
        """The in-place kernel."""
        calls = [
            lambda i=i: module.step(
                *self.data[i], self.matrix, self.window, self.slots[i], self.drafts, None, store, **config
            )
            for i in range(self.sets)
        ]
        return timed(calls * repeat)

    def replay(self, module: Any = decode_cuda) -> dict[str, float]:
        """The in-place kernel committing all drafts."""
        accepted = lengths_at(self.batch, self.drafts)
        calls = [
            lambda i=i: module.step(*self.data[i], self.matrix, self.window, self.slots[i], self.drafts, accepted, True)
            for i in range(self.sets)
        ]
        return timed(calls)

    def tail_step(
        self,
        lengths: torch.Tensor,
        module: Any = decode_cuda,
        shift: bool = True,
        fold: bool = False,
        repeat: int = 1,
        **config: Any,
    ) -> dict[str, float]:
        """The tail kernel at given tail lengths."""
        calls = [
            lambda i=i: module.tail_step(
                *self.data[i],
                self.matrix,
                self.window,
                self.tail,
                lengths,
                self.slots[i],
                self.drafts,
                shift,
                self.slots[i] if fold else None,
                **config,
            )
            for i in range(self.sets)
        ]
        return timed(calls * repeat)

    def fold(self, lengths: torch.Tensor, module: Any = decode_cuda, **config: Any) -> dict[str, float]:
        """The fold kernel."""
        calls = [
            lambda i=i: module.fold(self.matrix, self.tail, lengths, self.slots[i], self.slots[i], GATE, **config)
            for i in range(self.sets)
        ]
        return timed(calls)


def check(kernel: str, module: Any, ring: torch.dtype = torch.float32, **config: Any) -> dict[str, float]:
    """Errors of one configuration against float64, over a few tokens, at small size."""
    heads, batch = 3, 4
    inputs, weights = make(batch, heads)
    matrix, window = pools(6, heads)
    slots = torch.tensor([4, -1, 2, 0], dtype=torch.int32, device="cuda")
    live = [0, 2, 3]
    matrix64, window64, slots_cpu = matrix.double().cpu(), window.double().cpu(), slots.cpu()
    weights64 = double(weights)
    if kernel == "step":
        got = module.step(inputs, weights, matrix, window, slots, 1, None, True, **config)
        want = decode.decode_step_inplace(double(inputs), weights64, matrix64, window64, slots_cpu)
        return {"o": error(got.cpu()[live], want[live]), "state": error(matrix.cpu(), matrix64)}
    tail = decode.Tail.empty(6, heads, DIM, DIM, dtype=ring, device="cuda")
    for part in (tail.k_SHRK, tail.u_SHRV, tail.g_SHRK):
        part.fill_(float("nan"))
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    worst = 0.0
    for token in range(decode.GRID):
        inputs, _ = make(batch, heads)
        want = decode.decode_step_inplace(double(inputs), weights64, matrix64, window64, slots_cpu)
        steps = config if kernel == "tail" else {}
        got = module.tail_step(inputs, weights, matrix, window, tail, lengths + token, slots, 1, True, None, **steps)
        worst = max(worst, error(got.cpu()[live], want[live]))
    folds = config if kernel == "fold" else {}
    module.fold(matrix, tail, lengths + decode.GRID, slots, slots, GATE, **folds)
    return {"o": worst, "state": error(matrix.cpu(), matrix64)}


def copy_bandwidth() -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed([lambda: target.copy_(source)] * 3)["us"] / 1e6


def lengths_at(batch: int, length: int) -> torch.Tensor:
    """The same tail length for all sequences."""
    return torch.full((batch,), length, dtype=torch.int32, device="cuda")


def attempt(label: dict[str, Any], run: Callable[[], dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Keep a configuration's result, or the error that it ended in."""
    try:
        row = label | run()
    except Exception as problem:
        row = label | {"error": f"{type(problem).__name__}: {problem}"[:300]}
    if "launch" in row:
        row["launch"] = dataclasses.asdict(row["launch"])
    rows.append(row)
    print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


NAMES = {"cuda": decode_cuda, "triton": decode_triton}


def report_steps(rows: list[dict[str, Any]], name: str) -> None:
    """Decode in both forms at the two shapes of the target table."""
    module = NAMES[name]
    label = {"kernel": name, "what": "in place"}
    attempt(label, lambda: {"check": check("step", module)}, rows)
    for batch, heads, sets in ((64, 96, 2), (1, 32, 64)):
        case = Case(batch, heads, sets=sets)
        attempt(label | {"B": batch, "H": heads}, lambda c=case: c.step(module, repeat=3), rows)
        del case
    for ring in (torch.float32, torch.bfloat16):
        label = {"kernel": name, "what": "tail", "ring": str(ring)}
        attempt(label, lambda r=ring: {"check": check("tail", module, r)}, rows)
        for batch, heads, sets in ((64, 96, 2), (1, 32, 64)):
            case = Case(batch, heads, sets=sets, ring=ring)

            def cycle(c: Case = case, batch: int = batch) -> dict[str, Any]:
                step = 1 if batch > 1 else 21
                at = {n: c.tail_step(lengths_at(batch, n), module, fold=True)["us"] for n in range(0, 64, step)}
                mixed = torch.arange(batch, dtype=torch.int32, device="cuda") % decode.GRID
                return {
                    "mean_us": statistics.mean(at.values()),
                    "at": at,
                    "mixed_us": c.tail_step(mixed, module, fold=True)["us"],
                    "step63_us": c.tail_step(lengths_at(batch, 63), module)["us"],
                    "fold_us": c.fold(lengths_at(batch, 64), module)["us"],
                }

            attempt(label | {"B": batch, "H": heads}, cycle, rows)
            del case


def report_verify(rows: list[dict[str, Any]], name: str = "cuda") -> None:
    """Time against drafts: entries, and verify plus replay of the in-place form; bytes kept a request and layer."""
    for batch in (1, 16, 64):
        for drafts in (1, 2, 4, 8):
            sets = max(2, 64 // batch)
            case = Case(batch, 96, drafts, sets=min(sets, 16), ring=torch.float32)

            def run(c: Case = case, batch: int = batch) -> dict[str, Any]:
                return {
                    "tail_us": c.tail_step(lengths_at(batch, 31), NAMES[name], shift=False)["us"],
                    "verify_us": c.step(NAMES[name], store=False)["us"],
                    "replay_us": c.replay(NAMES[name])["us"],
                }

            kept = {"tail_bytes": drafts * 96 * DIM * 12, "in_place_bytes": drafts * 96 * (DIM * 4 + 1) * 2}
            attempt({"kernel": name, "what": "verify", "B": batch, "H": 96, "drafts": drafts} | kept, run, rows)
            del case


def sweep(batch: int, heads: int, rows: list[dict[str, Any]]) -> None:
    """Triton configurations at one large shape."""
    big, one = Case(batch, heads), Case(1, 32, sets=64)
    for config in STEP_CONFIGS:

        def run_step(c: dict[str, Any] = config) -> Any:
            times = big.step(decode_triton, repeat=2, **c) | {"b1": one.step(decode_triton, **c)["us"]}
            return times | {"check": check("step", decode_triton, **c)}

        attempt({"kernel": "triton", "what": "in place"} | config, run_step, rows)
    case, ring = Case(batch, heads, ring=torch.float32), Case(1, 32, sets=64, ring=torch.float32)
    for config in TAIL_CONFIGS:

        def run(c: dict[str, Any] = config) -> Any:
            times = {f"at{n}": case.tail_step(lengths_at(batch, n), decode_triton, **c)["us"] for n in (0, 31, 63)}
            times["b1_at31"] = ring.tail_step(lengths_at(1, 31), decode_triton, **c)["us"]
            return times | {"check": check("tail", decode_triton, **c)}

        attempt({"kernel": "triton", "what": "tail"} | config, run, rows)


STEP_CONFIGS: list[dict[str, Any]] = [
    {"launch": decode_triton.Launch(w, c, ahead=ahead)}
    for w, c, ahead in ((1, 16, True), (1, 16, False), (2, 16, True), (2, 32, False), (4, 32, True), (4, 64, False))
]
TAIL_CONFIGS: list[dict[str, Any]] = [
    {"launch": decode_triton.Launch(w, c, r, ahead, rows)}
    for w, c, r, ahead, rows in (
        (1, 16, None, False, 8),
        (2, 16, 128, True, 8),
        (2, 32, None, False, 16),
        (4, 64, 128, False, 8),
    )
]


def main() -> None:
    """Run and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/kda_decode.json"))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="cuda,verify,triton", help="parts of the report")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "copy_TB_s": copy_bandwidth(),
        "rows": rows,
    }
    print(report["device"], "copy", report["copy_TB_s"], flush=True)
    try:
        if arguments.sweep:
            sweep(64, 96, rows)
        for part in arguments.only.split(",") if arguments.only else []:
            report_verify(rows) if part == "verify" else report_steps(rows, part)
    finally:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
