"""Time KDA against its memory floor and, where importable, against fla-core and FlashKDA.

    python bench/kda.py --out bench/results/kda.json [--plot bench/results/kda.png]

One CUDA device; K = V = 128, bfloat16, gate, L2 norm and sigmoid inside, lower bound -5, float32 final state. Every
implementation of a row runs in the same process on the same inputs, in turns; a figure is the median of the rounds with
the fastest and slowest round beside it. Small shapes are replayed from CUDA graphs. Peers: see `kda_peers.py`; they run
where T is at most 65536 and for the head counts of --peer-heads, since fla tunes itself for every head count.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from kda_peers import Forward, Inputs, peers, perilune, versions

COPY = 4.3e12  # bytes a second, read and written, of a large device copy on an H200
FORWARD_BYTES, BACKWARD_BYTES = 1282, 2310  # per token and head: every input read once, every output written once
GRAPH_LIMIT = 2048 * 32  # token-heads up to which calls are replayed from a CUDA graph
TRAINING_SHAPES = ((8192, 96), (8192, 32))
FORWARD_SHAPES = (
    (8192, 96), (65536, 96), (8192, 32), (2048, 32), (2048, 96), (8192, 4), (32768, 32), (131072, 32), (1 << 20, 32)
)  # fmt: skip


def make(T: int, H: int) -> Inputs:
    random = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((T, H, 128),) * 4 + ((T, H),)
    x = [torch.randn(*shape, generator=random, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return [*x, torch.zeros(H, device="cuda"), torch.zeros(H, 128, device="cuda")]


def rounds(calls: dict[str, Callable[[], object]], count: int, graph: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, in turns."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    if graph:
        calls = {name: captured(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(4_000_000)  # about 2 ms: the launches queue up behind it, so that the host is not timed
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {n: {"ms": median(t), "fastest": min(t), "slowest": max(t)} for n, t in times.items()}


def captured(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def forward_row(T: int, H: int, count: int, peers: dict[str, Forward]) -> dict[str, object]:
    x = make(T, H)
    with torch.no_grad():
        calls: dict[str, Callable[[], object]] = {"perilune": lambda: perilune(x)}
        if 8192 <= T <= 131072 and H <= 32:
            calls["perilune segmented"] = lambda: perilune(x, scan="segmented")
        calls |= {name: (lambda peer=peer: peer(x)) for name, peer in peers.items()}
        times = rounds(calls, count, graph=T * H <= GRAPH_LIMIT)
    return {"pass": "forward", "T": T, "H": H, "floor_ms": 1e3 * T * H * FORWARD_BYTES / COPY, **times}


def training_row(T: int, H: int, count: int, peers: dict[str, Forward]) -> dict[str, object]:
    x = make(T, H)
    d_o = torch.randn(T, H, 128, device="cuda", dtype=torch.bfloat16)

    def step(run: Forward) -> None:
        leaves = [t.detach().requires_grad_() for t in x]
        run(leaves)[0].backward(d_o)

    calls: dict[str, Callable[[], object]] = {
        "perilune recompute": lambda: step(perilune),
        "perilune save all": lambda: step(lambda leaves: perilune(leaves, save="all")),
    }
    calls |= {name: (lambda peer=peer: step(peer)) for name, peer in peers.items() if name != "FlashKDA"}
    memory = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    times = rounds(calls, count, graph=False)
    floor = 1e3 * T * H * (FORWARD_BYTES + BACKWARD_BYTES) / COPY
    return {"pass": "forward + backward", "T": T, "H": H, "floor_ms": floor, "peak_gib": memory, **times}


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    forward = sorted((row for row in rows if row["pass"] == "forward"), key=lambda row: row["T"])
    heads = [H for H in (32, 96) if any(row["H"] == H for row in forward)]
    figure, panels = plt.subplots(1, len(heads), figsize=(5 * len(heads), 4), sharey=True, squeeze=False)
    for H, axes in zip(heads, panels[0], strict=True):
        chosen = [row for row in forward if row["H"] == H]
        for name, style in (("fla", "s--"), ("FlashKDA", "^--"), ("perilune", "o-")):
            points = [(row["T"], row[name]["ms"]) for row in chosen if name in row]
            if points:
                axes.loglog(*zip(*points, strict=True), style, label=name)
        axes.loglog([row["T"] for row in chosen], [row["floor_ms"] for row in chosen], "k:", label="memory floor")
        axes.set_title(f"KDA forward, {H} heads")
        axes.set_xlabel("tokens")
        axes.legend()
    panels[0][0].set_ylabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("bench/results/kda.json"))
    arguments.add_argument("--plot", type=Path)
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--peer-heads", type=int, nargs="*", default=[32, 96])
    options = arguments.parse_args()
    found, rows = peers(), []

    def keep(row: dict[str, object]) -> None:
        """Every row is on disk as soon as it is measured."""
        rows.append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps({**versions(), "rounds": options.rounds, "rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()

    for T, H in TRAINING_SHAPES:
        keep(training_row(T, H, options.rounds, found if H in options.peer_heads else {}))
    for T, H in FORWARD_SHAPES:
        some = found if H in options.peer_heads and T <= 65536 else {}
        keep(forward_row(T, H, options.rounds if T * H <= 8192 * 96 else max(options.rounds // 4, 3), some))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
