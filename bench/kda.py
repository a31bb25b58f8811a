"""Time KDA against its memory floor and, where importable, against fla-core and FlashKDA.

    python bench/kda.py --out bench/results/kda.json [--plot bench/results/kda.png]

One CUDA device; K = V = 128, bfloat16, gate, L2 norm and sigmoid inside, lower bound -5, float32 final state. Every
implementation of a row runs in the same process on the same inputs, in turns; a figure is the median of the rounds with
the fastest and slowest round beside it. Small shapes and decode steps are replayed from CUDA graphs. Peers: see
`kda_peers.py`; they run where T is at most 65536 and for the head counts of --peer-heads, since fla tunes itself for
every head count. `kda_decode.py` has more of decode.
"""

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from kda_decode_case import Case, lengths_at
from kda_peers import Forward, Inputs, fla_decode, peers, perilune, versions

from perilune.ops.kda import decode

COPY = 4.3e12  # bytes a second, read and written, of a large device copy on an H200
FORWARD_BYTES, BACKWARD_BYTES = 1282, 2310  # per token and head: every input read once, every output written once
GRAPH_LIMIT = 2048 * 32  # token-heads up to which calls are replayed from a CUDA graph
SHAPES = (  # tokens, heads, whether forward and backward; one head count after the other, as fla tunes itself for each
    (8192, 96, True), (8192, 96, False), (65536, 96, False), (2048, 96, False), (8192, 32, True), (8192, 32, False),
    (2048, 32, False), (32768, 32, False), (131072, 32, False), (1 << 20, 32, False), (8192, 4, False),
)  # fmt: skip
DECODE_SHAPES = ((64, 96, 2), (1, 32, 64))  # sequences, heads, disjoint sets of slots


def make(T: int, H: int) -> Inputs:
    random = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((T, H, 128),) * 4 + ((T, H),)
    x = [torch.randn(*shape, generator=random, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return [*x, torch.zeros(H, device="cuda"), torch.zeros(H, 128, device="cuda")]


def rounds(
    calls: dict[str, Callable[[], object]], count: int, graph: bool, steps: int = 1
) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, in turns; of one of its steps where a call makes several."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    if graph:
        calls = {name: captured(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # about 10 ms: launches queue up behind it, so that the host is not timed
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / steps)
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


def decode_row(B: int, H: int, sets: int, count: int, with_fla: bool) -> dict[str, object]:
    """A token of B sequences, in place; `sets` disjoint batches of slots in turn, so that the L2 cache holds none.

    fla's step has no convolution and no output norm; it reads one state and writes another.
    """
    case = Case(B, H, sets=sets)
    calls: dict[str, Callable[[], object]] = {
        "perilune": lambda: [decode.decode_step_inplace(*case.data[i], *case.pools, case.slots[i]) for i in range(sets)]
    }
    if with_fla:
        states = [torch.randn(B, H, 128, 128, device="cuda") for _ in range(sets)]
        calls["fla"] = lambda: [fla_decode(*case.data[i], states[i]) for i in range(sets)]
    times = rounds(calls, count, graph=True, steps=sets)
    token = 2 * 4 * 128 * 128 + 2 * (6 * 128 + 1) + 2 * 2 * 3 * 3 * 128  # matrix, inputs and output, window: bytes
    return {"pass": "decode in place", "B": B, "H": H, "floor_ms": 1e3 * B * H * token / COPY, **times}


def tail_row(B: int, H: int, sets: int, count: int, ring: torch.dtype) -> dict[str, object]:
    """The mean step of a cycle of 64 tokens in the tail form, the fold into the next matrix included."""
    case = Case(B, H, sets=sets, ring=ring)
    lengths = [lengths_at(B, n) for n in range(decode.GRID)]

    def cycle() -> None:
        for length in lengths:
            for (inputs, weights), slots in zip(case.data, case.slots, strict=True):
                decode.tail_step_inplace(inputs, weights, *case.pools, case.tail, length, slots, target_N=slots)

    times = rounds({"perilune": cycle}, count, graph=True, steps=decode.GRID * sets)
    return {"pass": "decode tail", "B": B, "H": H, "entries": str(ring).removeprefix("torch."), **times}


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
        axes.set_xticks([row["T"] for row in chosen], [f"{row['T']:,}" for row in chosen], rotation=30)
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
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
        about = {**versions(), "date": datetime.date.today().isoformat(), "rounds": options.rounds}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()

    for T, H, training in SHAPES:
        some = found if H in options.peer_heads and T <= 65536 else {}
        count = options.rounds if T * H <= 8192 * 96 else max(options.rounds // 4, 3)
        keep((training_row if training else forward_row)(T, H, count, some))
    for B, H, sets in DECODE_SHAPES:
        keep(decode_row(B, H, sets, options.rounds, "fla" in found))
        for ring in (torch.float32, torch.bfloat16):
            keep(tail_row(B, H, sets, max(options.rounds // 4, 3), ring))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
