"""Memory and speed of a K3-shaped slice, forward and backward, under several activation plans.

    python bench/memory.py [--slice full] [--layers 6] [--tokens 8192] [--rounds 3] [--out bench/results/memory.json]

One CUDA device. `full` has K3's widths with 56 experts (every fourth layer MLA), `reduced` about a quarter of the width
with 64 experts; `tiny` is to try the script on a CPU. Vocabulary 8192, bf16 gradients, no optimizer. The plans take
turns; a figure is the median over the rounds. Bytes are of the allocator, weights and gradients taken off. Loss bits
and gradients are compared with no plan. The file is written whenever something has been measured, so a run that is
ended leaves what it has; a plan whose steps take longer than --row-seconds in all is left out of further rounds.
"""

import argparse
import collections
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from memory_device import CUDA, DEVICE, TimeLimitError, allocated, capacity, capped, rate, write
from memory_selective import Selective
from memory_slice import SIZES, Bench, build, compare, slice_config

from perilune.errors import Error
from perilune.memory import PRESETS, Plan
from perilune.memory.codec import decode, encode
from perilune.memory.fit import fit, resident
from perilune.memory.manager import AHEAD
from perilune.memory.plan import short
from perilune.memory.profile import Profile, device_bytes, predict
from perilune.memory.waits import Waits

GB = 1e9
LINK = 50e9
# Most bytes that `longest` pins, and by how much a batch that did not fit is made shorter, at most four times.
HOST = 100 * GB
SHORTER = 0.94
# Failures of one plan that the others survive.
OF_A_ROW = (TimeLimitError, torch.OutOfMemoryError, Error)
Plans = dict[str, Plan | Selective]
Rows = dict[str, dict[str, Any]]


class Rounds:
    """Rows of the plans, and seconds that each has left."""

    def __init__(self, bench: Bench, plans: Plans, seconds: float, note: Callable[[Rows], None]) -> None:
        self.bench, self.plans, self.note = bench, plans, note
        self.rows: Rows = {name: {"plan": name, "rules": rules(plan)} for name, plan in plans.items()}
        self.left = dict.fromkeys(plans, seconds)
        self.taken: dict[str, list[dict[str, float]]] = collections.defaultdict(list)

    @contextmanager
    def row(self, name: str) -> Iterator[dict[str, Any]]:
        """Work on a plan's row; what goes wrong stands there and ends it."""
        begin, row = time.perf_counter(), self.rows[name]
        try:
            with capped(self.left[name]):
                yield row
        except OF_A_ROW as cause:
            row["ended"] = f"{type(cause).__name__}: {str(cause).splitlines()[0]}"
            print(name, row["ended"], flush=True)
        self.left[name] -= time.perf_counter() - begin
        self.note(self.rows)

    def open(self) -> list[str]:
        return [name for name in self.plans if "ended" not in self.rows[name]]

    def first(self) -> None:
        """Two steps of every plan, of which the first builds buffers and kernels: its gradients and its bytes by name.
        Those of no plan are what others are compared with, and its noise, of another rounding of every number of the
        backward pass, is what bf16 leaves of the gradients."""
        bench, reference, first_loss = self.bench, dict[str, torch.Tensor](), torch.zeros(())
        for name in self.open():
            plan = self.plans[name]
            with self.row(name) as row:
                bench.step(plan)
                step, value, memory = bench.step(plan)
                row["first"] = step
                if not reference:
                    reference, first_loss = bench.gradients(), value
                    bench.step(plan, scale=3.0)
                    thirds = {n: g / 3 if g.is_floating_point() else g for n, g in bench.gradients().items()}
                    row["noise"] = compare(thirds, reference)["worst_gradients"]
                    bench.step(plan)
                row |= {"loss_equal": bool(torch.equal(value, first_loss)), **compare(bench.gradients(), reference)}
                by_name: dict[str, list[float]] = {}
                for full, one in memory.rows.items():
                    entry = by_name.setdefault(short(full), [0, 0.0, 0.0, 0.0])
                    for i, part in enumerate((one.count, one.before / GB, one.device / GB, one.stored / GB)):
                        entry[i] += part
                row["by_name"] = by_name
                print(name, {k: round(v / (1 if k == "ms" else GB), 3) for k, v in step.items()}, flush=True)

    def predicted(self, noted: Profile, working: int) -> None:
        """What `predict` says of every plan. working: of `Bench.working`."""
        for name in self.open():
            plan = self.plans[name]
            with self.row(name) as row:
                if isinstance(plan, Plan):
                    rows = predict(noted, plan)
                    row["predicted_peak_gb"] = (resident(noted, plan) + working) / GB
                    row["predicted_device_gb"] = device_bytes(rows) / GB
                    row["predicted_host_gb"] = sum(r.stored for r in rows.values()) / GB

    def turn(self) -> None:
        """A step of every plan that has time left."""
        for name in self.open():
            with self.row(name) as row:
                self.taken[name].append(self.bench.step(self.plans[name])[0])
                ms = [one["ms"] for one in self.taken[name]]
                row |= {"rounds": len(ms), "ms": median(ms), "ms_range": [min(ms), max(ms)]}
                row["tokens_per_s"] = self.bench.tokens.numel() / row["ms"] * 1e3
                row["peak_gb"] = max(one["peak"] for one in self.taken[name]) / GB
                row["kept_gb"] = median(one["kept"] for one in self.taken[name]) / GB

    def exposed(self) -> None:
        """ms in which the computing stream waits for copies."""
        for name in self.open():
            plan = self.plans[name]
            with self.row(name) as row:
                if isinstance(plan, Plan):
                    waits = Waits(DEVICE)
                    self.bench.step(plan, waits=waits)
                    row["exposed_ms"] = 1e3 * sum(waits.seconds().values())
                print(json.dumps({k: v for k, v in row.items() if k not in ("by_name", "rules")}), flush=True)


def pareto(rounds: Rounds, noted: Profile, working: int, count: int) -> None:
    """A row a plan, in turns; times first, so that a run that is ended early has some."""
    rounds.first()
    rounds.predicted(noted, working)
    for _ in range(count):
        rounds.turn()
    rounds.exposed()


def longest(rounds: Rounds, noted: Profile, working: int) -> None:
    """The longest batch that a plan is predicted to train with, from two lengths, and the longest tried that ran."""
    bench = rounds.bench
    tokens = bench.tokens.numel()
    half = Bench(bench.model, tokens // 2)
    slope = 2 * (working - half.working(half.profile())) / tokens
    constant = working - slope * tokens + allocated()
    free = 0.97 * capacity() - constant
    for name in rounds.open():
        plan = rounds.plans[name]
        with rounds.row(name) as row:
            if not isinstance(plan, Plan):
                continue
            rows = predict(noted, plan)
            stored = sum(r.stored for r in rows.values()) / tokens
            most = int(free / (slope + resident(noted, plan) / tokens)) // 128 * 128
            row |= {"predicted_tokens": most, "host_gb": stored * most / GB, "ran_tokens": None}
            for _ in range(5 if stored * most < HOST else 0):
                rounds.note(rounds.rows)
                step = tried(bench, most, plan)
                if step is not None:
                    row |= {"ran_tokens": most, "ms": step["ms"], "peak_gb": step["peak"] / GB}
                    break
                most = int(SHORTER * most) // 128 * 128
            print(json.dumps({k: v for k, v in row.items() if k != "rules"}), flush=True)


def tried(bench: Bench, tokens: int, plan: Plan) -> dict[str, float] | None:
    """Two steps of a batch, the second measured; None if the device has no room for it."""
    if CUDA:
        torch.cuda.empty_cache()
    longer = Bench(bench.model, tokens)
    longer.host = bench.host
    try:
        longer.step(plan)
        return longer.step(plan)[0]
    except torch.OutOfMemoryError:
        return None


def rules(plan: Plan | Selective) -> dict[str, str]:
    return {rule.pattern: str(rule.placement) for rule in plan.rules} if isinstance(plan, Plan) else {}


def link() -> dict[str, float]:
    """GB/s to the host and back, alone."""
    size = 1 << 29 if CUDA else 1 << 20
    device, host = torch.empty(size, dtype=torch.uint8, device=DEVICE), torch.empty(size, dtype=torch.uint8)
    host = host.pin_memory() if CUDA else host
    return {
        "out": rate(lambda: host.copy_(device, non_blocking=True), size),
        "back": rate(lambda: device.copy_(host, non_blocking=True), size),
    }


def codec() -> dict[str, float]:
    """GB/s of device memory (read and written) that the codec's kernels reach."""
    x = torch.randn(1 << 28 if CUDA else 1 << 16, dtype=torch.bfloat16, device=DEVICE)
    codes = encode(x)
    moved = x.nbytes + codes.nbytes
    return {
        "encode": rate(lambda: encode(x), moved),
        "decode": rate(lambda: decode(codes, x.numel(), x.dtype), moved),
    }


def plan_of(name: str) -> Plan | Selective:
    """A preset, `selective`, or the preset k3 with other placements: "k3,kda.u=fp8+host"."""
    if name == "selective":
        return Selective()
    preset, *changes = name.split(",")
    changed = dict(change.split("=") for change in changes)
    # The first pattern that matches decides, so changes stand in front.
    rest = {pattern: placement for pattern, placement in PRESETS[preset].items() if pattern not in changed}
    return Plan.of(changed | rest, required=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slice", choices=SIZES, default="reduced")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=56)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead", type=float, default=AHEAD, help="of what the plans move, see Memory.ahead")
    parser.add_argument("--plans", nargs="*", default=["none", "full-recompute", "selective", "k3"])
    parser.add_argument("--longest", action="store_true", help="instead of the table: the longest batch of each plan")
    parser.add_argument("--fit", type=float, nargs="*", default=[], help="budgets in GB of everything on the device")
    parser.add_argument("--row-seconds", type=float, default=120.0, help="most seconds of one plan's steps in all")
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory.json"))
    args = parser.parse_args()
    if args.longest:
        # Lengths that nothing was allocated for before leave gaps that no other length fits into.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    begin = time.perf_counter()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        **{key: getattr(args, key) for key in ("slice", "layers", "experts", "tokens", "ahead")},
    }
    model = build(slice_config(args.slice, args.layers, args.experts))
    bench = Bench(model, args.tokens)
    bench.ahead = args.ahead
    found |= {"weights_gb": sum(p.nbytes for p in model.parameters()) / GB, "gb_per_s": link() | codec()}
    write(args.out, found)
    print(f"built in {time.perf_counter() - begin:.1f} s, {found['gb_per_s']}", flush=True)
    for _ in range(2):
        bench.loss().backward()
    noted = bench.profile()
    working = bench.working(noted)
    around = allocated() + working
    found |= {"working_set_gb": working / GB, "around_gb": around / GB, "forward_ms": 1e3 * noted.forward}
    write(args.out, found)
    print(f"profiled after {time.perf_counter() - begin:.1f} s", flush=True)
    plans: Plans = {name: plan_of(name) for name in args.plans}
    for budget in args.fit:
        name = f"fit({budget:g} GB)"
        try:
            plans[name] = fit(noted, int(budget * GB), LINK, around=around)
            print(name, rules(plans[name]), flush=True)
        except Error as cause:
            # The other budgets, and the plans, are measured all the same.
            found.setdefault("not_fitted", {})[name] = str(cause)
            print(name, cause, flush=True)
    kind = "longest" if args.longest else "plans"

    def note(rows: Rows) -> None:
        write(args.out, found | {kind: list(rows.values())})

    rounds = Rounds(bench, plans, args.row_seconds, note)
    if args.longest:
        longest(rounds, noted, working)
    else:
        pareto(rounds, noted, working, args.rounds)


if __name__ == "__main__":
    main()
