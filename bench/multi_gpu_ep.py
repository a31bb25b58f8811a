"""Balanced expert parallelism over several GPUs, a part of bench/multi_gpu.py.

Every rank holds 112 experts of Kimi-K3's shape (latent 3584, width 3072) and its own tokens, 16 experts each. Times are
those of the slowest rank (each repeat starts at a barrier), in milliseconds.

`symmetric` writes rows straight into the other GPU's memory, `collective` is the same layer over NCCL. `plain` is our
own all-to-all layer (one row a choice, exact sizes read on the host), `padded` the same with every message padded to
the worst case, so that nothing is read. `off` is plain placement.

Legend: R ranks, E experts, M experts a rank, S tokens a rank, J choices a token, L width, F expert width.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_common import (
    DRY,
    RUN,
    between,
    captured,
    everywhere,
    forget_peak,
    late,
    mark,
    once,
    peak_GB,
    rest,
    say,
    seconds,
    spread,
)
from multi_gpu_ep_check import check, wide_check
from multi_gpu_ep_layer import ACT, F, J, L, M, draw, padded, plain
from parallel_layers import DEVICE

from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import Collective, DirectParallel, ExpertParallel, Symmetric

EXPERT_BYTES = 3 * L * F * 2


def add_arguments(group: Any) -> None:
    group.add_argument("--ep-tokens", type=int, nargs="*", default=[64, 32] if DRY else [8192, 1024])
    group.add_argument(
        "--ep-loads",
        nargs="*",
        default=["even", "lognormal 1", "share 0.75", "share 1", "16 experts"],
    )
    group.add_argument(
        "--ep-layers",
        nargs="*",
        default=[
            "symmetric exact",
            "symmetric tolerant",
            "plain",
            "collective tolerant",
            "symmetric off",
            "padded",
            "collective exact",
        ],
    )
    group.add_argument("--ep-repeat", type=int, default=5)
    group.add_argument("--ep-seconds", type=float, default=190.0, help="after which no more is measured")
    group.add_argument("--ep-only", choices=["check", "times"])


def run(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Hand over what was found right, and the times of every layer."""
    deadline = seconds() + args.ep_seconds
    if args.ep_only != "times":
        found = check() | {"wide_relative_difference": wide_check()}
        say(found)
        keep({"check": found})
        forget_peak()
    if args.ep_only != "check":
        for tokens in args.ep_tokens:
            measure(tokens, args.ep_loads, args.ep_layers, args.ep_repeat, deadline, keep)


def stages(
    parallel: DirectParallel, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, weights: Dense, repeat: int
) -> dict[str, float]:
    """The forward pass step by step, each from a barrier to the next: median milliseconds of the slowest rank."""
    names = ("plan", "prefetch", "dispatch", "expand", "compute", "return", "combine")
    spent: dict[str, list[float]] = {name: [] for name in names}
    own = (weights.gate_up_E2FL, weights.down_ELF)
    ends_home = parallel.home
    for i in range(repeat + 2):
        rest()
        dist.barrier()
        marks = [mark()]
        planned = parallel.plan([ids])
        marks.append(mark())
        generation = parallel.copies.push([own], planned)
        parallel.transport.barrier()
        marks.append(mark())
        parallel.exchange.send([x], planned, [w])
        parallel.transport.barrier()
        marks.append(mark())
        (rows,), (copied,), (wr,), (wc,) = parallel.exchange.receive(planned)
        marks.append(mark())
        ends_G = planned.plan.ends_RG[dist.get_rank()]
        out = moe.experts(rows, weights, ends_G[:ends_home], ACT, row_weights_R=wr, clean=False)
        theirs = copied
        if parallel.slots:
            slots = Dense(*parallel.copies.weights(0, generation))
            offs = ends_G[ends_home:] - ends_G[ends_home - 1]
            theirs = moe.experts(copied, slots, offs, ACT, row_weights_R=wc, clean=False)
        marks.append(mark())
        parallel.exchange.return_rows([out], [theirs], planned)
        parallel.transport.barrier()
        marks.append(mark())
        parallel.exchange.combine(planned)
        marks.append(mark())
        rest()
        for k, name in enumerate(names):
            value = everywhere(between(marks[k], marks[k + 1]))
            if i >= 2:
                spent[name].append(value)
    return {name: round(statistics.median(values), 3) for name, values in spent.items()}


def measure(
    tokens: int,
    kinds: Sequence[str],
    names: Sequence[str],
    repeat: int,
    deadline: float,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = M * ranks
    torch.manual_seed(rank)
    new = {"device": DEVICE, "dtype": torch.bfloat16}
    up = (torch.randn(M, 2 * F, L, **new) / L**0.5).requires_grad_()
    down = (torch.randn(M, L, F, **new) / F**0.5).requires_grad_()
    x, d_y = torch.randn(tokens, L, **new).requires_grad_(), torch.randn(tokens, L, **new)
    w = torch.rand(tokens, J, device=DEVICE).div_(J).requires_grad_()
    policies = {"exact": expert.exact(), "tolerant": expert.tolerant(0.02, 8 if DRY else 1024), "off": expert.off()}
    loads = {kind: draw(kind, experts, tokens, J, seed=rank) for kind in kinds}
    found: dict[str, dict[str, Any]] = {kind: {"R": ranks, "S": tokens, "load": kind} for kind in kinds}
    for name in names:
        if DRY and name.startswith("symmetric"):
            say(f"{name} needs GPUs")
            continue
        if late(deadline):
            say(f"out of time before {name}")
            break
        parallel: Any = None
        if name.startswith("symmetric"):
            policy = policies[name.split()[1]]
            parallel = DirectParallel(Symmetric(), experts, J, tokens, L, F, policy=policy)
        elif name.startswith("collective"):
            parallel = ExpertParallel(Collective(), experts, J, tokens, policies[name.split()[1]])
        try:
            cells = layer_cells(name, parallel, loads, (x, w, up, down, d_y), repeat)
        except Exception as error:
            # Of all ranks, or the next collective times out; what is measured already stays.
            say(f"{name}, S {tokens}: {type(error).__name__}: {error}")
            continue
        for kind, (cell, before) in cells.items():
            found[kind] |= before | {name: {"run": RUN} | cell}
            say({"S": tokens, "load": kind, name: cell})
        keep({"layers": list(found.values())})
        del parallel
        forget_peak()


def layer_cells(
    name: str, parallel: Any, loads: dict[str, torch.Tensor], tensors: tuple[torch.Tensor, ...], repeat: int
) -> dict[str, tuple[dict[str, Any], dict[str, float]]]:
    """Of each load: times of one layer, and how uneven the load is, where the layer plans it.

    Loads take turns, so that clocks that change change all of them; `symmetric` is one graph for all.
    """
    x, w, up, down, d_y = tensors
    ids, weights = next(iter(loads.values())).clone(), Dense(up, down)
    cells: dict[str, tuple[dict[str, Any], dict[str, float]]] = {kind: ({}, {}) for kind in loads}

    def layer() -> torch.Tensor:
        if parallel is None:
            return (plain if name == "plain" else padded)(x, w, ids, weights)
        return expert.balanced_experts(parallel, x, w, weights, parallel.plan([ids]), ACT)

    def forward() -> None:
        with torch.no_grad():
            layer()

    def both() -> None:
        torch.autograd.grad(layer(), (x, w, up, down), d_y)

    for key, call in (("forward_ms", forward), ("forward_backward_ms", both)):
        for kind, chosen in loads.items():
            ids.copy_(chosen)
            forget_peak()
            call()
            # Without symmetric memory, which torch's allocator does not count.
            cells[kind][0]["peak_GB"] = round(peak_GB(), 1)
        run: Callable[[], None] = captured(call).replay if name.startswith("symmetric") else call
        times: dict[str, list[float]] = {kind: [] for kind in loads}
        for _ in range(repeat + 1):
            for kind, chosen in loads.items():
                ids.copy_(chosen)
                times[kind].append(once(run))
        for kind, values in times.items():
            cells[kind][0][key] = spread(values[1:])
        del run
        forget_peak()
    for kind, chosen in loads.items():
        if parallel is not None:
            ids.copy_(chosen)
            with torch.no_grad():
                cells[kind] = balance(name, parallel, cells[kind][0], ids, (x, w), weights, repeat)
    return cells


def balance(
    name: str,
    parallel: Any,
    cell: dict[str, Any],
    ids: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor],
    weights: Dense,
    repeat: int,
) -> tuple[dict[str, Any], dict[str, float]]:
    """(the cell with what the plan did, and of `symmetric` the stages; how uneven the load is)."""
    planned = parallel.plan([ids])
    stats = parallel.stats(planned, 2 * L, EXPERT_BYTES)
    cell = cell | {"after": round(stats.after, 4), "copies": stats.copies, "rule": stats.rule}
    cell |= {"row_GB": round(stats.row_bytes / 1e9, 3), "copy_GB": round(stats.copy_bytes / 1e9, 3)}
    cell["critical_copies"] = stats.critical_copies
    if name.startswith("symmetric"):
        cell["stages_ms"] = stages(parallel, *inputs, ids, weights, repeat)
        cell["exposed_ms"] = round(cell["forward_ms"]["median"] - cell["stages_ms"]["compute"], 3)
        cell["GBps"] = rates(cell, parallel, planned)
    return cell, {"rank_max_over_mean": round(stats.before, 4), "MaxVio": round(stats.max_vio, 3)}


def rates(cell: dict[str, Any], parallel: DirectParallel, planned: Any) -> dict[str, float]:
    """GB/s that cross the busiest rank's port, by the stage's time."""
    rank = dist.get_rank()
    to = planned.dst[0] // parallel.rows
    away = (to != rank) & (planned.dst[0] >= 0)
    met = torch.zeros(to.shape[0], parallel.transport.ranks, device=DEVICE)
    met.scatter_add_(1, to.clamp(min=0).long(), away.float())
    payload = everywhere(float((met > 0).sum()) * L * 2)
    choice = everywhere(float(away.sum()) * L * 2)
    stage = cell["stages_ms"]
    out = {"dispatch": payload / stage["dispatch"] / 1e6, "return": choice / stage["return"] / 1e6}
    if cell["critical_copies"]:
        out["prefetch"] = cell["critical_copies"] * EXPERT_BYTES / stage["prefetch"] / 1e6
    return {name: round(value, 1) for name, value in out.items()}


def plot(found: dict[str, Any], to: Path) -> None:
    """Forward and backward of every layer over the unevenness of the load, one panel for each S."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [row for row in found.get("layers", ()) if "rank_max_over_mean" in row]
    if not rows:
        return
    sizes = sorted({row["S"] for row in rows}, reverse=True)
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(5 * len(sizes), 3.6), squeeze=False)
    for panel, size in zip(panels[0], sizes, strict=True):
        mine = sorted((row for row in rows if row["S"] == size), key=lambda row: row["rank_max_over_mean"])
        for name in sorted({key for row in mine for key, cell in row.items() if isinstance(cell, dict)}):
            points = [
                (
                    row["rank_max_over_mean"],
                    row[name]["forward_backward_ms"]["median"],
                )
                for row in mine
                if name in row
            ]
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
        panel.set(title=f"S = {size} tokens a rank", xlabel="busiest rank over mean", ylim=(0, None))
    panels[0][0].set_ylabel("forward and backward, ms")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})
