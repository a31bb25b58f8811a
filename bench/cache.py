"""Replay two traces through the prefix cache and through models of its peers.

    python bench/cache.py --traces FOLDER --out bench/results/cache.json [--plot bench/results/cache.png]

FOLDER holds agentic.jsonl.gz with agentic-offsets.json (497 sessions of a coding agent, callanjfox/kv-cache-tester,
re-encoded; Poisson arrivals, one session in 180 s) and conversation.jsonl.gz (12,031 requests of a chat service,
kvcache-ai/Mooncake FAST25). Kimi-K3, bf16 MLA rows, fp32 state, one device tier, 512-token hashes, GB = 1e9 bytes. One
thread; the traces run in two processes.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from multiprocessing import Pool
from pathlib import Path

import perilune
from perilune.serve.cache import Geometry
from perilune.serve.simulate import Policy, policy, read, replay
from perilune.serve.simulate.align import VllmAlign
from perilune.serve.simulate.ours import Perilune

UNIT = 512
K3 = Geometry.of("kimi-k3", match_unit=UNIT)
FP8 = Geometry.of("kimi-k3", match_unit=UNIT, kv="fp8")
PAGES = Geometry.of("kimi-k3", page_tokens=6144, match_unit=UNIT)

CACHES: dict[str, Callable[[int], Policy]] = {
    "perilune": lambda size: Perilune(K3, size),
    "perilune, gain only": lambda size: Perilune(K3, size, eviction="gain"),
    "perilune, lru only": lambda size: Perilune(K3, size, eviction="lru"),
    "perilune, 400 GB of host": lambda size: Perilune(K3, size, 400 * 10**9),
    "perilune, fp8 rows": lambda size: Perilune(FP8, size),
    "perilune, 6144-token pages": lambda size: Perilune(PAGES, size),
    "vllm-align 6144": lambda size: VllmAlign(K3, size, 6144),
    "vllm-align 1536": lambda size: VllmAlign(K3, size, 1536),
    "mamba-radix": lambda size: policy("mamba-radix", K3, size),
    "marconi": lambda size: policy("marconi", K3, size),
    "lru": lambda size: policy("lru", K3, size),
}
BUDGETS = {
    "conversation": (100, 200, 800),
    "agentic": (100, 200, 400),
}


def rows(name: str, traces: Path) -> list[dict]:
    """Every cache at every budget on one trace; the bound first."""
    offsets = traces / "agentic-offsets.json" if name == "agentic" else None
    trace = read(traces / f"{name}.jsonl.gz", UNIT, offsets)
    found = [{"trace": name, "cache": "infinite", **asdict(replay(trace, policy("infinite", K3, 0)))}]
    for budget in BUDGETS[name]:
        for label, make in CACHES.items():
            start = time.perf_counter()
            result = replay(trace, make(budget * 10**9))
            seconds = round(time.perf_counter() - start, 1)
            found.append({"trace": name, "gb": budget, "cache": label, "seconds": seconds, **asdict(result)})
            print(name, budget, label, result.token_hit_rate, seconds, flush=True)
    return found


def plot(found: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(12, 4))
    for axes, name in zip(panels, ("agentic", "conversation"), strict=True):
        mine = [row for row in found if row["trace"] == name]
        for label in CACHES:
            line = [(row["gb"], row["token_hit_rate"]) for row in mine if row["cache"] == label]
            axes.plot(*zip(*line, strict=True), "o-" if label.startswith("perilune") else "s--", label=label)
        axes.axhline(mine[0]["token_hit_rate"], color="k", linestyle=":", label="infinite")
        axes.set(title=name, xscale="log", xlabel="cache, GB", ylabel="token hit rate")
    panels[1].legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--traces", type=Path, required=True)
    arguments.add_argument("--out", type=Path, default=Path("bench/results/cache.json"))
    arguments.add_argument("--plot", type=Path)
    options = arguments.parse_args()
    with Pool(len(BUDGETS)) as pool:
        found = [*chain(*pool.starmap(rows, [(name, options.traces) for name in BUDGETS]))]
    versions = {"python": platform.python_version(), "perilune": perilune.__version__, "machine": platform.machine()}
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": "cpu, one thread",
        "versions": versions,
        "geometry": asdict(K3),
    }
    options.out.write_text(json.dumps({**facts, "rows": found}, indent=1) + "\n")
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
