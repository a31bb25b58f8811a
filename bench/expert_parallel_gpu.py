"""Balanced expert parallelism on one GPU: plan and destination rows, and the layer of the slowest rank at K3's width.

    python bench/expert_parallel_gpu.py --out bench/results/expert_parallel_gpu.json

All times are those of CUDA graphs; the exchange of counts is left out of plan times. The layer is described in
bench/expert_parallel_gpu_layer.py.

Legend: R ranks, E experts, S tokens a rank, J choices a token.
"""

from __future__ import annotations

import argparse
import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from expert_parallel_gpu_layer import kept, layers
from expert_parallel_gpu_timing import J, draw, graphed, shares

from perilune.parallel import expert
from perilune.parallel.expert.layout_triton import plan_and_lay_out
from perilune.parallel.expert.rows_triton import count_choices, destination_rows


def plan_row(ranks: int, experts: int, kind: str, tokens: int = 8192) -> dict[str, Any]:
    p_E = shares(kind, ranks, experts)
    ids = [draw(p_E, tokens, seed) for seed in range(min(ranks, 4))]
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    # Sources repeat beyond the fourth: only their counts matter.
    counted = [count_choices(x, experts, flag) for x in ids]
    counts_RE = torch.stack([counted[r % len(ids)][0] for r in range(ranks)])
    row: dict[str, Any] = {"R": ranks, "E": experts, "J": J, "S": tokens, "load": kind}
    for name, policy in (("exact", expert.exact()), ("tolerant 2 %, 1024 rows", expert.tolerant(0.02, 1024))):
        plan = plan_and_lay_out(counts_RE, policy, None, 1)
        row[name] = {
            "rule": expert.RULES[int(plan.rule)],
            "copies": int((plan.slots_RB >= 0).sum()),
            "plan_us": graphed(partial(plan_and_lay_out, counts_RE, policy, None, 1), 20),
        }
    plan = plan_and_lay_out(counts_RE, expert.exact(), None, 1)
    find_rows = partial(destination_rows, plan, ids[0], counted[0][1], 0, tokens * J + 64)
    row["destination_rows_us"] = graphed(find_rows, 20)
    row["count_us"] = graphed(partial(count_choices, ids[0], experts, flag), 20)
    print(json.dumps(row), flush=True)
    return row


PLAN_LOADS = ("even", "lognormal 0.3", "lognormal 1", "lognormal 2", "one rank idle", "all on one rank")


def kernels() -> dict[str, float]:
    """Microseconds of each kernel at R = 64, lognormal 1, from the profiler."""
    p_E, ranks, experts = shares("lognormal 1", 64, 896), 64, 896
    ids, flag = draw(p_E, 8192, 0), torch.zeros(1, dtype=torch.int32, device="cuda")

    def once() -> None:
        counts_E, earlier = count_choices(ids, experts, flag)
        plan = plan_and_lay_out(counts_E.repeat(ranks, 1), expert.exact(), None, 1)
        destination_rows(plan, ids, earlier, 0, 8192 * J)

    once()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            once()
        torch.cuda.synchronize()
    found = {e.key: round(e.device_time_total / 10, 2) for e in profile.key_averages() if e.device_time_total}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/expert_parallel_gpu.json"))
    parser.add_argument("--parts", default="plan,kernels,kept,layer")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--plan-ranks", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--plan-loads", nargs="*", default=list(PLAN_LOADS))
    parser.add_argument("--layers", nargs="*", default=["exact", "tolerant", "plain", "padded"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--link", type=float, default=367.0, help="GB/s one way, for modelled wire time")
    parser.add_argument(
        "--loads",
        nargs="*",
        default=["even", "lognormal 0.3", "lognormal 1", "lognormal 2", "16 experts of one rank"],
    )
    args = parser.parse_args()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "link_GBps_modelled": args.link,
    }
    parts = args.parts.split(",")
    if "plan" in parts:
        result["plans"] = [plan_row(ranks, 896, kind) for ranks in args.plan_ranks for kind in args.plan_loads]
    if "kernels" in parts:
        result["kernels"] = kernels()
    if "kept" in parts:
        result["kept_bytes_a_token"] = kept()
        torch.cuda.empty_cache()
    if "layer" in parts:
        result["layers"] = []
        for ranks in args.ranks:
            result["layers"] += layers(ranks, args.tokens, args.loads, args.layers, args.link, args.repeat)
            torch.cuda.empty_cache()
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
