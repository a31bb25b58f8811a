"""Time KDA against its memory floor and, where importable, against fla-core and FlashKDA.

    python bench/kda.py --out bench/results/kda.json [--plot bench/results/kda.png]

One CUDA device; K = V = 128, bfloat16, gate, L2 norm and sigmoid inside, lower bound -5, float32 final state. Every
implementation of a row runs in the same process on the same inputs, in turns; a figure is the median of the rounds with
the fastest and slowest round beside it. Small shapes are replayed from CUDA graphs. Peers are not installed by this
project; fla searches its configurations for about two minutes on its first call for a new head count.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from perilune.config import Gate
from perilune.ops.kda import triton as kernels
from perilune.ops.sequences import Sequences

SAFE = Gate("safe", -5.0)
COPY = 4.3e12  # bytes a second, read and written, of a large device copy on an H200
FORWARD_BYTES, BACKWARD_BYTES = 1282, 2310  # per token and head: every input read once, every output written once


def make(T: int, H: int) -> list[torch.Tensor]:
    random = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((T, H, 128),) * 4 + ((T, H),)
    x = [torch.randn(*shape, generator=random, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return [*x, torch.zeros(H, device="cuda"), torch.zeros(H, 128, device="cuda")]


def ours(x: list[torch.Tensor], save: str = "inputs") -> torch.Tensor:
    sequences = Sequences.from_lengths([x[0].shape[0]], device="cuda")
    return kernels.kda(*x, SAFE, None, sequences, save=save)[0]


def fla(x: list[torch.Tensor]) -> torch.Tensor:
    from fla.ops.kda import chunk_kda

    q, k, v, g, beta, A_log, dt_bias = x
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}
    batch = (t[None] for t in (q, k, v, g, beta.float().sigmoid()))
    return chunk_kda(*batch, A_log=A_log, dt_bias=dt_bias.flatten(), output_final_state=True, **options)[0][0]


def peers() -> dict[str, Callable[[list[torch.Tensor]], torch.Tensor]]:
    try:
        import fla.ops.kda
    except ImportError:
        return {}
    return {"fla": fla}


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


def forward_row(T: int, H: int, count: int) -> dict[str, object]:
    x = make(T, H)
    with torch.no_grad():
        calls: dict[str, Callable[[], object]] = {"perilune": lambda: ours(x)}
        calls |= {name: (lambda peer=peer: peer(x)) for name, peer in peers().items()}
        times = rounds(calls, count, graph=T * H <= 2048 * 32)
    return {"pass": "forward", "T": T, "H": H, "floor_ms": 1e3 * T * H * FORWARD_BYTES / COPY, **times}


def training_row(T: int, H: int, count: int) -> dict[str, object]:
    x = make(T, H)
    d_o = torch.randn(T, H, 128, device="cuda", dtype=torch.bfloat16)

    def step(run: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        leaves = [t.detach().requires_grad_() for t in x]
        run(leaves).backward(d_o)

    calls: dict[str, Callable[[], object]] = {
        "perilune recompute": lambda: step(ours),
        "perilune save all": lambda: step(lambda leaves: ours(leaves, "all")),
    }
    calls |= {name: (lambda peer=peer: step(peer)) for name, peer in peers().items()}
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

    figure, axes = plt.subplots(figsize=(6, 4))
    for H in sorted({row["H"] for row in rows}):
        chosen = sorted((r for r in rows if r["H"] == H and r["pass"] == "forward"), key=lambda r: r["T"])
        T = [row["T"] for row in chosen]
        (line,) = axes.loglog(T, [row["perilune"]["ms"] for row in chosen], "o-", label=f"forward, H = {H}")
        axes.loglog(T, [row["floor_ms"] for row in chosen], ":", color=line.get_color(), label=f"memory floor, H = {H}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("ms")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("bench/results/kda.json"))
    arguments.add_argument("--plot", type=Path)
    arguments.add_argument("--rounds", type=int, default=30)
    options = arguments.parse_args()
    rows = []
    for T, H in ((2048, 32), (8192, 32), (32768, 32), (131072, 32), (2048, 96), (8192, 96), (65536, 96), (8192, 4)):
        rows.append(forward_row(T, H, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    for T, H in ((8192, 96), (8192, 32)):
        rows.append(training_row(T, H, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    import triton

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    options.out.write_text(json.dumps({**about, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
