"""Times the KDA decode kernels in CUDA graphs over state that does not fit the L2 cache; writes JSON.

    python bench/kda_decode.py --out bench/results/kda_decode.json

Every time is the median over graph replays divided by the launches in a graph; every configuration is compared with
the float64 reference before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from kda_decode_case import DIM, GATE, Case, lengths_at, make, pools, slots_of, timed

from perilune.ops.kda import decode, decode_cuda, decode_triton
from perilune.ops.kda.decode_call import Call
from perilune.ops.kda.decode_exact import RawTail, exact_step_inplace
from perilune.ops.kda.decode_replay import Replay


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def double(group: Any) -> Any:
    """A dataclass of tensors in float64 on the CPU."""
    return type(group)(*[x.double().cpu() if isinstance(x, torch.Tensor) else x for x in vars(group).values()])


def check(kernel: str, module: Any, ring: torch.dtype = torch.float32) -> dict[str, float]:
    """Errors of a kernel against float64, over a few tokens, at small size."""
    heads, batch = 3, 4
    inputs, weights = make(batch, heads)
    matrix, window = pools(6, heads)
    slots = torch.tensor([4, -1, 2, 0], dtype=torch.int32, device="cuda")
    live = [0, 2, 3]
    matrix64, window64, slots_cpu = matrix.double().cpu(), window.double().cpu(), slots.cpu()
    weights64 = double(weights)
    if kernel == "step":
        got = module.step(Call(inputs, weights, matrix, window, slots))
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
        call = Call(inputs, weights, matrix, window, slots, counts_N=lengths + token, tail=tail)
        got = module.tail_step(call)
        worst = max(worst, error(got.cpu()[live], want[live]))
    decode_triton.fold(matrix, tail, lengths + decode.GRID, slots, None, slots, GATE)
    return {"o": worst, "state": error(matrix.cpu(), matrix64)}


def copy_bandwidth() -> float:
    """TB/s of a large copy by a kernel (a `copy_` would be a copy engine's job in a graph), bytes read plus written."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed([lambda: torch.add(source, 1.0, out=target)] * 3)["us"] / 1e6


def attempt(label: dict[str, Any], run: Callable[[], dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Keep a configuration's result, or the error that it ended in."""
    try:
        row = label | run()
    except Exception as problem:
        row = label | {"error": f"{type(problem).__name__}: {problem}"[:300]}
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


def main() -> None:
    """Run and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/kda_decode.json"))
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
        for part in arguments.only.split(",") if arguments.only else []:
            others = {"verify": report_verify, "replay": report_replay, "exact": report_exact}
            others[part](rows) if part in others else report_steps(rows, part)
    finally:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
