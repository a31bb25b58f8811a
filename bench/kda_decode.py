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
from perilune.ops.kda.decode_call import BLOCK, CAPACITY, CENTRE, Call
from perilune.ops.kda.decode_exact import RawTail, exact_step_inplace
from perilune.ops.kda.decode_replay import Replay

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
        for block in range(0, CAPACITY, BLOCK):
            part = log[:, :, block : block + BLOCK]
            part.copy_(part.cumsum(2))
        self.tail.g_SHRK.copy_(log)
        self.tail.k_SHRK.copy_(keys * (-CENTRE - log).exp())
        self.tail.u_SHRV.copy_(torch.randn_like(keys))

    def call(self, i: int, store: bool = True, **fields: Any) -> Call:
        """The call on set i."""
        return Call(*self.data[i], self.matrix, self.window, self.slots[i], self.drafts, store, **fields)

    def step(self, module: Any = decode_cuda, store: bool = True, repeat: int = 1, **config: Any) -> dict[str, float]:
        """The in-place kernel."""
        calls = [lambda i=i: module.step(self.call(i, store), **config) for i in range(self.sets)]
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
        **config: Any,
    ) -> dict[str, float]:
        """The tail kernel at given tail lengths."""
        fields = [
            {"counts_N": lengths, "tail": self.tail, "target_N": self.slots[i] if fold else None}
            for i in range(self.sets)
        ]
        calls = [lambda i=i: module.tail_step(self.call(i, shift, **fields[i]), **config) for i in range(self.sets)]
        return timed(calls * repeat)

    def fold(self, lengths: torch.Tensor, **config: Any) -> dict[str, float]:
        """The fold kernel."""
        pools = (self.matrix, self.tail, lengths)
        calls = [
            lambda i=i: decode_triton.fold(*pools, self.slots[i], None, self.slots[i], GATE, **config)
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
        got = module.step(Call(inputs, weights, matrix, window, slots), **config)
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
        call = Call(inputs, weights, matrix, window, slots, counts_N=lengths + token, tail=tail)
        got = module.tail_step(call, **steps)
        worst = max(worst, error(got.cpu()[live], want[live]))
    folds = config if kernel == "fold" else {}
    decode_triton.fold(matrix, tail, lengths + decode.GRID, slots, None, slots, GATE, **folds)
    return {"o": worst, "state": error(matrix.cpu(), matrix64)}


def copy_bandwidth() -> float:
    """TB/s of a large copy by a kernel (a `copy_` would be a copy engine's job in a graph), bytes read plus written."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed([lambda: torch.add(source, 1.0, out=target)] * 3)["us"] / 1e6


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
                    "fold_us": c.fold(lengths_at(batch, 64))["us"],
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


def report_replay(rows: list[dict[str, Any]]) -> None:
    """The commit of four drafts in all layers: one launch against one a layer."""
    drafts = 4
    for batch, layers in ((1, 24), (16, 8), (64, 4)):
        states = [(*make(batch * drafts, 96), *pools(batch, 96)) for _ in range(layers)]
        slots, accepted = slots_of(batch, 1)[0], lengths_at(batch, drafts)
        calls = [Call(*state, slots, drafts, counts_N=accepted) for state in states]
        replay = Replay(states, slots, accepted, drafts)

        def run(calls: list[Call] = calls, replay: Replay = replay) -> dict[str, Any]:
            each = timed([lambda c=c: decode_cuda.step(c) for c in calls])["us"]
            return {"together_us": timed([replay.run_inplace])["us"], "one_by_one_us": each * len(calls)}

        label = {"kernel": "cuda", "what": "replay", "B": batch, "H": 96, "drafts": drafts, "layers": layers}
        attempt(label | {"one_launch": replay.one_launch}, run, rows)
        del states, calls, replay


def report_exact(rows: list[dict[str, Any]]) -> None:
    """A step with prefill's arithmetic, launched eagerly (it is not for CUDA graphs)."""
    for batch, heads in ((1, 32), (1, 96), (16, 96), (64, 96)):
        case = Case(batch, heads, sets=1)
        raw = RawTail.empty(batch, heads, DIM, DIM, torch.bfloat16, "cuda")
        for part in vars(raw).values():
            part.normal_()

        def run(c: Case = case, raw: RawTail = raw, batch: int = batch) -> dict[str, Any]:
            lengths, times = lengths_at(batch, 31), []
            for _ in range(10):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                with torch.no_grad():
                    exact_step_inplace(*c.data[0], c.matrix, c.window, raw, lengths, c.slots[0])
                stop.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(stop) * 1e3)
            return {"us": statistics.median(times[2:])}

        attempt({"kernel": "exact", "what": "tail", "B": batch, "H": heads}, run, rows)
        del case, raw


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
    parser.add_argument("--only", default="cuda,verify,replay,exact,triton", help="parts of the report")
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
            others = {"verify": report_verify, "replay": report_replay, "exact": report_exact}
            others[part](rows) if part in others else report_steps(rows, part)
    finally:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
