"""`perilune simulate-cache`: a trace of requests through the prefix cache, or through a model of a peer's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Annotated, Any, Literal

import tyro

from perilune.cli.parse import parse
from perilune.errors import Error
from perilune.serve.cache import Geometry
from perilune.serve.simulate import POLICIES, Result, Trace, policy, read, replay

DESCRIPTION = """Replay a trace of requests through the prefix cache and count what it saves.

examples:
  perilune simulate-cache tests/data/traces/agentic.jsonl --budget-gb 20
  perilune simulate-cache tests/data/traces/conversation.jsonl --policy vllm-align --block-size 1536 --json
  perilune simulate-cache TRACE.jsonl.gz --geometry kimi-linear --kv fp8 --budget-gb 40 --host-gb 200
  perilune simulate-cache TRACE.jsonl.gz --compare curves.png --budgets-gb 100 200 400"""


@dataclass(frozen=True)
class SimulateCache:
    trace: Annotated[str, tyro.conf.Positional]
    """JSON lines, plain or gzip: sessions with `requests`, or requests with `hash_ids`"""
    policy: Literal["perilune", "vllm-align", "mamba-radix", "marconi", "lru", "infinite"] = "perilune"
    """perilune, a model of a peer, or the bound of a cache without end"""
    geometry: str = "kimi-k3"
    """kimi-k3, kimi-linear, another preset, a checkpoint folder or a config.json"""
    budget_gb: float = 100.0
    """device bytes for cached data, in 1e9 bytes"""
    host_gb: float = 0.0
    """host bytes for evicted segments, in 1e9 bytes"""
    kv: Literal["bf16", "fp8"] = "bf16"
    """number format of the MLA rows"""
    prefix_match_unit: int = 512
    """tokens of one hash"""
    page_tokens: int = 64
    """tokens of one KV page"""
    block_size: int = 6144
    """tokens of a block of vllm-align"""
    offsets: str | None = None
    """JSON file with `offset_s`, the start of every session; without it sessions follow one another"""
    limit: int | None = None
    """only the first so many lines of the trace"""
    json: bool = False
    """print one JSON object (with --compare: a list of them)"""
    compare: str | None = None
    """run all policies over --budgets-gb and draw hit rate against bytes into this image"""
    budgets_gb: tuple[float, ...] = (50.0, 100.0, 200.0, 400.0)
    """budgets of --compare, in 1e9 bytes"""


def run(arguments: list[str]) -> None:
    args = parse(SimulateCache, "simulate-cache", arguments, DESCRIPTION)
    budgets = [("budgets_gb", size) for size in args.budgets_gb]
    for name, size in [("budget_gb", args.budget_gb), ("host_gb", args.host_gb), *budgets]:
        if not 0 <= size < inf:
            raise Error(f"{name} is {size}; must be >= 0 and finite")
    geometry = Geometry.of(args.geometry, args.kv, args.page_tokens, args.prefix_match_unit)
    trace = read(args.trace, args.prefix_match_unit, args.offsets, args.limit)
    if args.compare is not None:
        rows = [row for budget in args.budgets_gb for row in compare(trace, geometry, budget, args.block_size)]
        draw(rows, args.compare)
        print(json.dumps(rows, indent=2) if args.json else "\n".join(line(row) for row in rows))
        return
    cache = policy(args.policy, geometry, int(args.budget_gb * 1e9), int(args.host_gb * 1e9), args.block_size)
    row = {"budget_gb": args.budget_gb, "host_gb": args.host_gb, **asdict(replay(trace, cache))}
    print(json.dumps(row, indent=2) if args.json else "\n".join(f"{key:<25} {value}" for key, value in row.items()))


def compare(trace: Trace, geometry: Geometry, budget: float, block: int) -> list[dict[str, Any]]:
    """One row a policy."""
    rows = []
    for name in POLICIES:
        result: Result = replay(trace, policy(name, geometry, int(budget * 1e9), block=block))
        rows.append({"budget_gb": budget, **asdict(result)})
    return rows


def line(row: dict[str, Any]) -> str:
    return f"{row['budget_gb']:>8} GB  {row['policy']:<18} hit rate {row['token_hit_rate']:.4f}"


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Hit rate against bytes, a line a policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name in dict.fromkeys(str(row["policy"]) for row in rows):
        mine = [row for row in rows if row["policy"] == name]
        style = "k:" if name == "infinite" else "o-"
        axes.plot([row["budget_gb"] for row in mine], [row["token_hit_rate"] for row in mine], style, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("cache, GB")
    axes.set_ylabel("token hit rate")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


__all__ = ["run"]
