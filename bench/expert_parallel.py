"""Planners on equal counts, their time, and the balanced layer on virtual ranks; CPU figures, written as JSON.

    python bench/expert_parallel.py --out bench/results/expert_parallel.json

The peers are in bench/expert_peers.py: LLEP (experts by size, spilled to the rank with least assigned and pending
rows), EPLB (replicas from an earlier batch's load), and a quota search in the manner of UltraEP; and MoonEP's one-donor
rule, which is one of our policies.

Legend: R ranks, E experts, M = E / R experts at home.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expert_peers import eplb, llep, quota

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import ExpertParallel, Local, plan_reference, plan_torch

# Kimi-K3: latent 3584, width 3072, three matrices, bf16.
EXPERT_BYTES = 3 * 3584 * 3072 * 2


def shares(kind: str, ranks: int, experts: int) -> np.ndarray:
    """The probability of each expert."""
    rng, home = np.random.default_rng(0), experts // ranks
    p = np.ones(experts)
    if kind == "even":
        pass
    elif kind.startswith("lognormal"):
        p = np.exp(float(kind.split()[1]) * rng.standard_normal(experts))
    elif kind == "30 % into 4":
        p[rng.permutation(experts)[:4]] = 0.3 / 4 / (0.7 / (experts - 4))
    elif kind == "80 % into 4":
        p[rng.permutation(experts)[:4]] = 0.8 / 4 / (0.2 / (experts - 4))
    elif kind == "95 % into 1":
        p[rng.integers(experts)] = 0.95 / (0.05 / (experts - 1))
    elif kind == "half into one rank":
        p[:home] = 0.5 / home / (0.5 / (experts - home))
    elif kind == "half the ranks idle":
        p[experts // 2 :] = 0
    elif kind == "one rank idle":
        p[:home] = 0
    return p / p.sum()


KINDS = (
    "even",
    "lognormal 0.3",
    "lognormal 1",
    "lognormal 2",
    "30 % into 4",
    "80 % into 4",
    "95 % into 1",
    "half into one rank",
    "half the ranks idle",
    "one rank idle",
)


def draw(p_E: np.ndarray, ranks: int, choices: int, seed: int) -> torch.Tensor:
    """int64 [R, E]: every source draws its own choices."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([rng.multinomial(choices, p_E) for _ in range(ranks)]))


def describe(alloc_RE: torch.Tensor) -> dict[str, Any]:
    """What an allocation costs and what it leaves; experts stand at home."""
    ranks, experts = alloc_RE.shape
    at_home = torch.arange(experts) // (experts // ranks) == torch.arange(ranks).unsqueeze(1)
    away = alloc_RE.masked_fill(at_home, 0)
    copies_RR = (away > 0).view(ranks, ranks, -1).sum(2)
    load_R = alloc_RE.sum(1)
    critical = int(torch.maximum(copies_RR.sum(0), copies_RR.sum(1)).max())
    return {
        "rank_max_over_mean": round(float(load_R.max() / load_R.double().mean()), 4),
        "copies": int(copies_RR.sum()),
        "most_on_a_rank": int(copies_RR.sum(1).max()),
        "most_sent_by_a_rank": int(copies_RR.sum(0).max()),
        "smallest_copy_rows": int(away[away > 0].min()) if (away > 0).any() else None,
        "moved_percent": round(100 * float(away.sum() / alloc_RE.sum()), 2),
        "critical_copy_MB": round(critical * EXPERT_BYTES / 1e6, 1),
    }


def planners(ranks: int, experts: int, choices: int) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        p_E = shares(kind, ranks, experts)
        counts_RE = draw(p_E, ranks, choices, seed=1)
        # The earlier batch: other tokens, and loads that have drifted since.
        drift = np.exp(0.3 * np.random.default_rng(2).standard_normal(experts))
        past_RE = draw(p_E * drift / (p_E * drift).sum(), ranks, choices, seed=3)
        home = experts // ranks
        load_E = counts_RE.sum(0).double()
        results: dict[str, dict[str, Any]] = {}
        for name, policy in {
            "exact": expert.exact(),
            "tolerant 2 %, 1024 rows": expert.tolerant(0.02, 1024),
            "budget 4": expert.budget(4),
            "off": expert.off(),
            "peer: MoonEP one-donor": expert.one_donor(),
        }.items():
            plan = plan_reference(counts_RE, policy)
            results[name] = describe(plan.alloc_RE) | {"rule": expert.RULES[int(plan.rule)]}
        results["peer: LLEP"] = describe(llep(counts_RE))
        results["peer: quota (UltraEP-style)"] = describe(quota(counts_RE, home))
        stale = describe(eplb(counts_RE, past_RE))
        # Its replicas are placed between batches, so what a batch moves is not comparable.
        results["peer: EPLB, stale load"] = {"rank_max_over_mean": stale["rank_max_over_mean"], "replicas": 2 * ranks}
        rows.append(
            {
                "load": kind,
                "R": ranks,
                "E": experts,
                "choices_a_rank": choices,
                "rank_max_over_mean": results["off"]["rank_max_over_mean"],
                "MaxVio": round(float(load_E.max() / load_E.mean()) - 1, 3),
                "planners": results,
            }
        )
    return rows


def timed(call: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds."""
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 3)


def plan_times(repeat: int) -> list[dict[str, Any]]:
    rows = []
    for ranks, experts, choices in ((8, 256, 65536), (8, 896, 131072), (64, 896, 131072)):
        for kind in ("lognormal 1", "one rank idle"):
            counts_RE = draw(shares(kind, ranks, experts), ranks, choices, seed=1)
            plan = expert.plan(counts_RE, expert.exact())
            ids = torch.repeat_interleave(torch.arange(experts), counts_RE[0])
            ids = ids[torch.randperm(ids.shape[0], generator=torch.Generator().manual_seed(0))].view(-1, 16)
            rows.append(
                {
                    "R": ranks,
                    "E": experts,
                    "choices": choices,
                    "load": kind,
                    "plan_reference_ms": timed(lambda c=counts_RE: plan_reference(c, expert.exact()), repeat),
                    "plan_torch_ms": timed(lambda c=counts_RE: plan_torch(c, expert.exact()), repeat),
                    "destinations_ms": timed(lambda p=plan, i=ids: expert.destinations(p, i, 0), repeat),
                }
            )
    return rows


def layer_times(repeat: int) -> list[dict[str, Any]]:
    """Times of the layer in one process; `slowest_rank_ms` runs one rank's experts alone, which sets the pace."""
    experts, top_k, width, inner, tokens, ranks = 32, 4, 256, 256, 1024, 4
    torch.manual_seed(0)
    act = Activation("situ")
    weights = Dense(
        torch.randn(experts, 2 * inner, width).div_(16).requires_grad_(),
        torch.randn(experts, width, inner).div_(16).requires_grad_(),
    )
    rows = []
    for skew in (0.0, 1.0, 2.0, 4.0):
        logits = torch.randn(tokens, experts)
        logits[:, : experts // ranks] += skew
        routing = moe.route(logits, torch.zeros(experts), top_k, 1.0)
        x = torch.randn(tokens, width, requires_grad=True)

        def dense(x: torch.Tensor = x, routing: moe.Routing = routing) -> torch.Tensor:
            order, offs = moe.permute(routing.ids_TJ, experts)
            out = moe.experts(moe.dispatch(x, order, top_k), weights, offs, act)
            return moe.combine(out, order, routing.weights_TJ)

        runs: dict[str, Callable[[], torch.Tensor]] = {"dense": dense}
        row: dict[str, Any] = {"skew": skew, "T": tokens, "E": experts, "J": top_k, "L": width, "F": inner, "R": ranks}
        for name, policy in (("exact", expert.exact()), ("tolerant 2 %", expert.tolerant(0.02)), ("off", expert.off())):
            parallel = ExpertParallel(Local(ranks), experts, top_k, tokens // ranks, policy)
            ids = routing.ids_TJ.split(tokens // ranks)
            planned = parallel.plan(ids)
            stats = parallel.stats(planned, width * 4, 3 * width * inner * 4)
            row["rank_max_over_mean"] = round(stats.before, 3)
            plan = planned.plan
            rank = int(plan.rows_RG.sum(1).argmax())
            used = torch.cat([torch.arange(rank * 8, rank * 8 + 8), plan.slots_RB[rank].clamp(min=0)])
            theirs = Dense(weights.gate_up_E2FL[used].detach(), weights.down_ELF[used].detach())
            buffer, ends = torch.randn(int(plan.ends_RG[rank, -1]), width), plan.ends_RG[rank]
            row[name] = {
                "slowest_rank_ms": timed(lambda b=buffer, w=theirs, e=ends: moe.experts(b, w, e, act), repeat),
                "copies": stats.copies,
                "rule": stats.rule,
                "row_bytes": stats.row_bytes,
                "copy_bytes": stats.copy_bytes,
            }

            runs[name] = lambda x=x, p=parallel, i=ids, r=routing: expert.balanced_experts(
                p, x, r.weights_TJ, weights, p.plan(i), act
            )
        for name, run in runs.items():
            cell = row.setdefault(name, {})
            with torch.no_grad():
                cell["all_ranks_forward_ms"] = timed(run, repeat)
            cell["all_ranks_forward_backward_ms"] = timed(lambda run=run: run().sum().backward(), repeat)
        rows.append(row)
    return rows


def kept_bytes() -> dict[str, Any]:
    """Bytes a token that the layer keeps for its backward pass, counted from the tensors; K3's latent width, bf16."""
    ranks, experts, top_k, width, inner, tokens = 8, 128, 16, 3584, 8, 64
    torch.manual_seed(0)
    weights = Dense(
        torch.randn(experts, 2 * inner, width, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(experts, width, inner, dtype=torch.bfloat16, requires_grad=True),
    )
    routing = moe.route(torch.randn(ranks * tokens, experts), torch.zeros(experts), top_k, 1.0)
    x = torch.randn(ranks * tokens, width, dtype=torch.bfloat16, requires_grad=True)
    parallel = ExpertParallel(Local(ranks), experts, top_k, tokens)
    planned = parallel.plan(routing.ids_TJ.split(tokens))
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        expert.balanced_experts(parallel, x, routing.weights_TJ, weights, planned, Activation("situ"))
    for weight in (weights.gate_up_E2FL, weights.down_ELF):
        kept.pop(weight.untyped_storage().data_ptr())
    index = [t for r in planned.routes for t in (r.place_n, r.token_P, r.row_n, r.origin_n)]
    total = sum(kept.values()) + sum(t.numel() * t.element_size() for t in index)
    # Rows in and out (J L), both halves of the hidden layer and the activation (3 J F), bf16, F = 3072.
    naive = 2 * (2 * top_k * width + 3 * top_k * 3072)
    return {"L": width, "J": top_k, "R": ranks, "bytes_a_token": total / (ranks * tokens), "naive_computed": naive}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/expert_parallel.json"))
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "device": f"CPU, {platform.machine()}, 1 thread",
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "expert_bytes": EXPERT_BYTES,
        "planners": planners(8, 256, 65536) + planners(64, 896, 131072),
        "plan_times": plan_times(args.repeat),
        "layer": layer_times(args.repeat),
        "kept_for_backward": kept_bytes(),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["planners"]:
        print(f"R {row['R']}  {row['load']}  {row['rank_max_over_mean']}  MaxVio {row['MaxVio']}")
        for name, got in row["planners"].items():
            print(f"    {name:30s} {got}")
    for row in [*result["plan_times"], *result["layer"], result["kept_for_backward"]]:
        print(row)


if __name__ == "__main__":
    main()
