"""Balanced expert parallelism over several GPUs of one machine: first that it is right, then what it takes.

    torchrun --nproc-per-node 2 bench/multi_gpu.py --out bench/results/multi_gpu.json

Every rank holds 112 experts of Kimi-K3's shape (latent 3584, width 3072) and its own tokens, 16 experts each. Times are
medians over repeats of the slowest rank (each repeat starts at a barrier), in milliseconds. NVLink multicast is not
used: NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1 are set before anything starts.

`symmetric` writes rows straight into the other GPU's memory, `collective` is the same layer over NCCL, `plain` our own
all-to-all layer (one row a choice, exact sizes read on the host), `off` plain placement in static worst-case buffers.

Legend: R ranks, E experts, M experts a rank, S tokens a rank, J choices a token, L width, F expert width.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import torch
import torch.distributed as dist
import triton

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import Collective, DirectParallel, ExpertParallel, Symmetric, Virtual

M, J, L, F = 112, 16, 3584, 3072
ACT = Activation("situ")
EXPERT_BYTES = 3 * L * F * 2
START = time.monotonic()


def say(what: Any) -> None:
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - START:6.1f} s  {what if isinstance(what, str) else json.dumps(what)}", flush=True)


def everywhere(value: float, op: Any = dist.ReduceOp.MAX) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(tensor, op=op)
    return float(tensor)


def draw(kind: str, experts: int, tokens: int, top_k: int, seed: int) -> torch.Tensor:
    """int64 [T, J], distinct in a token, by the Gumbel trick."""
    fixed = torch.Generator().manual_seed(0)
    p_E = torch.ones(experts, dtype=torch.float64)
    if kind.startswith("lognormal"):
        p_E = (float(kind.split()[1]) * torch.randn(experts, generator=fixed, dtype=torch.float64)).exp()
    elif kind.startswith("share"):
        # This share of all choices, beyond the even one, goes to the first rank's experts.
        first, ranks = experts // dist.get_world_size(), dist.get_world_size()
        more = float(kind.split()[1])
        p_E[:first] *= more * (ranks - 1) / (1 - more) if more < 1 else 1
        p_E[first:] *= 0 if more >= 1 else 1
    elif kind == "16 experts":
        p_E[top_k:] = 0
    generator = torch.Generator(device="cuda").manual_seed(seed)
    noise = torch.empty(tokens, experts, device="cuda").exponential_(generator=generator)
    return (noise / p_E.float().cuda().clamp(min=1e-30)).topk(top_k, largest=False).indices


# -- right first ------------------------------------------------------------------------------------------------------


def mixture(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, weights: Dense, experts: int) -> torch.Tensor:
    order, offs = moe.permute(ids, experts)
    rows = moe.experts(
        moe.dispatch(x, order, ids.shape[1]), weights, offs, ACT, row_weights_R=w.reshape(-1).index_select(0, order)
    )
    return moe.combine(rows, order, None, ids.shape[1])


def check() -> dict[str, Any]:
    """Layer of all transports against float64 in one place; symmetric bitwise against virtual ranks; graphs; races."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts, top_k, width, inner, tokens = 16 * ranks, 4, 512, 256, 384
    sizes = [tokens - 100 * (r % 2) for r in range(ranks)]
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    generator = torch.Generator(device="cuda").manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    x, d_y = normal(sum(sizes), width), normal(sum(sizes), width)
    up, down = normal(experts, 2 * inner, width) / width**0.5, normal(experts, width, inner) / inner**0.5
    w = torch.rand(sum(sizes), top_k, device="cuda", generator=generator)
    own = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
    collective = ExpertParallel(Collective(), experts, top_k, tokens, align=8)
    symmetric = DirectParallel(Symmetric(), experts, top_k, tokens, width, inner, align=8)
    one_place = DirectParallel(Virtual(ranks, "cuda"), experts, top_k, tokens, width, inner, align=8)
    for parallel in (symmetric, one_place):
        space = parallel.workspace
        for shared in (*space.rows, space.weights, space.results, space.numbers, *space.slots, *space.grads):
            for tensor in shared.mine:
                tensor.fill_(float("nan"))
    worst: dict[str, float] = {"collective": 0.0, "symmetric": 0.0}
    copies = 0

    def layer(parallel: Any, ids: torch.Tensor, part: slice, held: slice, cuts: Sequence[int]) -> list[torch.Tensor]:
        leaves = [t[s].detach().requires_grad_() for t, s in ((x, part), (w, part), (up, held), (down, held))]
        planned = parallel.plan(ids[part].split(list(cuts)))
        y = expert.balanced_experts(parallel, leaves[0], leaves[1], Dense(*leaves[2:]), planned, ACT)
        return [y.detach(), *torch.autograd.grad(y, leaves, d_y[part])]

    everything = slice(0, sum(sizes)), slice(0, experts)
    for step, kind in enumerate(("even", "lognormal 2", "share 0.8", "16 experts", "share 1")):
        ids = draw(kind, experts, sum(sizes), top_k, seed=step)
        wide = [t.double().requires_grad_() for t in (x, w, up, down)]
        y = mixture(wide[0], ids, wide[1], Dense(*wide[2:]), experts)
        truth = [y.detach(), *torch.autograd.grad(y, wide, d_y.double())]
        parts = (mine, mine, mine, own, own)
        again = layer(one_place, ids, *everything, sizes)
        for trial in range(4):
            # Ranks come at different times.
            torch.cuda._sleep(int(2e6) * ((rank + trial + step) % 3))
            for name, parallel in (("collective", collective), ("symmetric", symmetric)):
                got = layer(parallel, ids, mine, own, (sizes[rank],))
                for a, b, part in zip(got, truth, parts, strict=True):
                    worst[name] = max(worst[name], float((a.double() - b[part]).norm() / b[part].norm()))
                if name == "symmetric":
                    for i, (a, b, part) in enumerate(zip(got, again, parts, strict=True)):
                        assert torch.equal(a, b[part]), f"symmetric differs from virtual ranks in output {i}, {kind}"
        planned = symmetric.plan([ids[mine]])
        stats = symmetric.stats(planned, 2 * width, 1)
        assert stats.residual == 0
        copies += stats.copies
    assert copies > 0 or ranks == 1, "no load needed copies"
    for name, error in worst.items():
        worst[name] = everywhere(error)
        assert worst[name] < 1e-2, f"{name} is {worst[name]} from float64"
    found = {"relative_error_to_fp64": worst, "bitwise_virtual_ranks": True, "copies_used": copies}
    say(found)
    mine_of = x[mine], w[mine], up[own], down[own], d_y[mine]
    graph_check(symmetric, *mine_of, experts, top_k)
    say("graphs are right at other routings")
    flight_check(symmetric, DirectParallel(Symmetric(), experts, top_k, tokens, width, inner, align=8), *mine_of)
    return found | {"graph": True, "two_in_flight": True}


def flight_check(first: DirectParallel, second: DirectParallel, *tensors: torch.Tensor) -> None:
    """Two layers on two streams at a time, each with its own transport and workspace: the bits of one by one."""
    x, w, up, down, d_y = tensors
    experts, top_k = first.experts, first.top_k
    streams = [torch.cuda.Stream() for _ in range(2)]
    ids = [draw("lognormal 2", experts, x.shape[0], top_k, seed=7 + dist.get_rank() + 50 * i) for i in range(2)]

    def layer(parallel: DirectParallel, ids: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, w, up, down)]
        y = expert.balanced_experts(parallel, leaves[0], leaves[1], Dense(*leaves[2:]), parallel.plan([ids]), ACT)
        return [y.detach(), *torch.autograd.grad(y, leaves, d_y)]

    want = [layer(parallel, i) for parallel, i in zip((first, second), ids, strict=True)]
    torch.cuda.synchronize()
    for trial in range(4):
        got = []
        for k in (trial % 2, 1 - trial % 2):
            with torch.cuda.stream(streams[k]):
                torch.cuda._sleep(int(1e6) * ((dist.get_rank() + k) % 2))
                got.append((k, layer((first, second)[k], ids[k])))
        torch.cuda.synchronize()
        for k, outputs in got:
            assert all(torch.equal(a, b) for a, b in zip(outputs, want[k], strict=True)), "two in flight differ"


def graph_check(
    parallel: DirectParallel,
    x: torch.Tensor,
    w: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    d_y: torch.Tensor,
    experts: int,
    top_k: int,
) -> None:
    """Captured at one routing, right to the bit at others."""
    ids = draw("even", experts, x.shape[0], top_k, seed=dist.get_rank())
    leaves = [t.detach().requires_grad_() for t in (x, w, up, down)]

    def step() -> list[torch.Tensor]:
        planned = parallel.plan([ids])
        y = expert.balanced_experts(parallel, leaves[0], leaves[1], Dense(*leaves[2:]), planned, ACT)
        return [y.detach(), *torch.autograd.grad(y, leaves, d_y)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    for seed, kind in enumerate(("lognormal 2", "16 experts", "share 1", "even")):
        ids.copy_(draw(kind, experts, x.shape[0], top_k, seed=100 * seed + dist.get_rank()))
        graph.replay()
        got = [t.clone() for t in captured]
        for a, b in zip(got, step(), strict=True):
            assert torch.equal(a, b), f"graph differs from eager, {kind}"


# -- plain all-to-all -------------------------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows, and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sent, received = ctx.sizes
        d_x = d_out.new_empty(sum(sent), *d_out.shape[1:])
        dist.all_to_all_single(d_x, d_out.contiguous(), sent, received)
        return d_x, None, None


def plain(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, weights: Dense) -> torch.Tensor:
    """Rows by expert to their home ranks, by source there, grouped again by expert, and the same way back."""
    ranks, experts = dist.get_world_size(), M * dist.get_world_size()
    order, offs = moe.permute(ids, experts)
    counts_E = torch.diff(offs.long(), prepend=offs.new_zeros(1))
    arriving = torch.empty_like(counts_E)
    dist.all_to_all_single(arriving, counts_E)
    table = torch.stack([counts_E, arriving]).view(2, ranks, -1).sum(2).tolist()
    rows = Exchange.apply(moe.dispatch(x, order, J), *table)
    row_weights = Exchange.apply(w.reshape(-1).index_select(0, order), *table)
    # Arrived in order of (source, expert); the experts need (expert, source).
    expert_n = torch.arange(M, device="cuda").repeat(ranks).repeat_interleave(arriving)
    by_expert = torch.argsort(expert_n, stable=True)
    back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(by_expert.shape[0], device="cuda"))
    ends = arriving.view(ranks, M).sum(0).cumsum(0).int()
    rows, row_weights = rows.index_select(0, by_expert), row_weights.index_select(0, by_expert)
    out = moe.experts(rows, weights, ends, ACT, row_weights_R=row_weights)
    returned = Exchange.apply(out.index_select(0, back), table[1], table[0])
    return moe.combine(returned, order, None, J)


# -- times ------------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds of the slowest rank."""
    times = []
    for i in range(repeat + 2):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(everywhere(start.elapsed_time(end)))
    return round(statistics.median(times), 3)


def replayed(call: Callable[[], Any], repeat: int) -> float:
    """`timed` of a graph of the call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    value = timed(graph.replay, repeat)
    del graph
    torch.cuda.empty_cache()
    return value


def stages(
    parallel: DirectParallel, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, weights: Dense, repeat: int
) -> dict[str, float]:
    """The forward pass step by step, each from a barrier to the next: median milliseconds of the slowest rank."""
    names = ("plan", "prefetch", "dispatch", "expand", "compute", "return", "combine")
    spent: dict[str, list[float]] = {name: [] for name in names}
    own = (weights.gate_up_E2FL, weights.down_ELF)
    ends_home = parallel.home
    for i in range(repeat + 2):
        torch.cuda.synchronize()
        dist.barrier()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(names) + 1)]
        marks[0].record()
        planned = parallel.plan([ids])
        marks[1].record()
        generation = parallel.push_copies([own], planned)
        parallel.transport.barrier()
        marks[2].record()
        parallel.send([x], planned, [w])
        parallel.transport.barrier()
        marks[3].record()
        (rows,), (copied,), (wr,), (wc,) = parallel.receive(planned, weights=True)
        marks[4].record()
        ends_G = planned.plan.ends_RG[dist.get_rank()]
        out = moe.experts(rows, weights, ends_G[:ends_home], ACT, row_weights_R=wr, clean=False)
        theirs = copied
        if parallel.slots:
            slots = Dense(*parallel.copies(0, generation))
            offs = ends_G[ends_home:] - ends_G[ends_home - 1]
            theirs = moe.experts(copied, slots, offs, ACT, row_weights_R=wc, clean=False)
        marks[5].record()
        parallel.return_rows([out], [theirs], planned)
        parallel.transport.barrier()
        marks[6].record()
        parallel.combine(planned)
        marks[7].record()
        torch.cuda.synchronize()
        for k, name in enumerate(names):
            value = everywhere(marks[k].elapsed_time(marks[k + 1]))
            if i >= 2:
                spent[name].append(value)
    return {name: round(statistics.median(values), 3) for name, values in spent.items()}


def measure(
    tokens: int, kinds: Sequence[str], names: Sequence[str], repeat: int, deadline: float
) -> list[dict[str, Any]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = M * ranks
    torch.manual_seed(rank)
    new = {"device": "cuda", "dtype": torch.bfloat16}
    up = (torch.randn(M, 2 * F, L, **new) / L**0.5).requires_grad_()
    down = (torch.randn(M, L, F, **new) / F**0.5).requires_grad_()
    x, d_y = torch.randn(tokens, L, **new).requires_grad_(), torch.randn(tokens, L, **new)
    w = torch.rand(tokens, J, device="cuda").div_(J).requires_grad_()
    policies = {"exact": expert.exact(), "tolerant": expert.tolerant(0.02, 1024), "off": expert.off()}
    found: dict[str, dict[str, Any]] = {kind: {"R": ranks, "S": tokens, "load": kind} for kind in kinds}
    tensors = x, w, up, down, d_y
    for name in names:
        parallel: Any = None
        if name.startswith("symmetric"):
            policy = policies[name.split()[1]]
            parallel = DirectParallel(Symmetric(), experts, J, tokens, L, F, policy=policy)
        elif name.startswith("collective"):
            parallel = ExpertParallel(Collective(), experts, J, tokens, policies[name.split()[1]])
        for kind in kinds:
            if everywhere(time.monotonic() - START) > deadline:
                say(f"out of time before {name}, {kind}")
                return list(found.values())
            ids = draw(kind, experts, tokens, J, seed=rank)
            try:
                cell, before = one_cell(name, parallel, ids, tensors, repeat)
            except Exception as error:
                # Of all ranks, or the next collective times out; what is measured already stays.
                say(f"{name}, {kind}, S {tokens}: {type(error).__name__}: {error}")
                continue
            found[kind] |= before
            found[kind][name] = cell
            say({"S": tokens, "load": kind, name: cell})
        del parallel
        torch.cuda.empty_cache()
    return list(found.values())


def one_cell(
    name: str, parallel: Any, ids: torch.Tensor, tensors: tuple[torch.Tensor, ...], repeat: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Times of one layer under one load; and how uneven the load is, where the layer plans it."""
    x, w, up, down, d_y = tensors
    weights, before = Dense(up, down), {}

    def forward() -> torch.Tensor:
        if parallel is None:
            return plain(x, w, ids, weights)
        return expert.balanced_experts(parallel, x, w, weights, parallel.plan([ids]), ACT)

    def both() -> None:
        torch.autograd.grad(forward(), (x, w, up, down), d_y)

    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        cell: dict[str, Any] = {"forward_ms": timed(forward, repeat)}
    cell["forward_backward_ms"] = timed(both, repeat)
    # Without symmetric memory, which torch's allocator does not count.
    cell["peak_GB"] = round(everywhere(torch.cuda.max_memory_allocated() / 1e9), 1)
    if parallel is not None:
        planned = parallel.plan([ids])
        stats = parallel.stats(planned, 2 * L, EXPERT_BYTES)
        cell |= {"after": round(stats.after, 4), "copies": stats.copies, "rule": stats.rule}
        cell |= {"row_GB": round(stats.row_bytes / 1e9, 3), "copy_GB": round(stats.copy_bytes / 1e9, 3)}
        cell["critical_copies"] = stats.critical_copies
        before = {"rank_max_over_mean": round(stats.before, 4), "MaxVio": round(stats.max_vio, 3)}
    if name.startswith("symmetric"):
        with torch.no_grad():
            cell["graph_forward_ms"] = replayed(forward, repeat)
        cell["graph_forward_backward_ms"] = replayed(both, repeat)
        with torch.no_grad():
            cell["stages_ms"] = stages(parallel, x.detach(), w.detach(), ids, weights, repeat)
        cell["exposed_ms"] = round(cell["graph_forward_ms"] - cell["stages_ms"]["compute"], 3)
        cell["GBps"] = rates(cell, parallel, planned)
    return cell, before


def rates(cell: dict[str, Any], parallel: DirectParallel, planned: Any) -> dict[str, float]:
    """GB/s that cross the busiest rank's port, by the stage's time."""
    rank = dist.get_rank()
    to = planned.dst[0] // parallel.rows
    away = (to != rank) & (planned.dst[0] >= 0)
    met = torch.zeros(to.shape[0], parallel.transport.ranks, device="cuda")
    met.scatter_add_(1, to.clamp(min=0).long(), away.float())
    payload = everywhere(float((met > 0).sum()) * L * 2)
    choice = everywhere(float(away.sum()) * L * 2)
    stage = cell["stages_ms"]
    out = {"dispatch": payload / stage["dispatch"] / 1e6, "return": choice / stage["return"] / 1e6}
    if cell["critical_copies"]:
        out["prefetch"] = cell["critical_copies"] * EXPERT_BYTES / stage["prefetch"] / 1e6
    return {name: round(value, 1) for name, value in out.items()}


def plot(results: Path, to: Path) -> None:
    """Forward and backward of every layer over the unevenness of the load, one panel for each S."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = json.loads(results.read_text("utf-8"))["layers"]
    sizes = sorted({row["S"] for row in rows}, reverse=True)
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(5 * len(sizes), 3.6), squeeze=False)
    for panel, size in zip(panels[0], sizes, strict=True):
        mine = sorted((row for row in rows if row["S"] == size), key=lambda row: row["rank_max_over_mean"])
        for name in sorted({key for row in mine for key, cell in row.items() if isinstance(cell, dict)}):
            points = [
                (
                    row["rank_max_over_mean"],
                    row[name].get("graph_forward_backward_ms", row[name]["forward_backward_ms"]),
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


def machine() -> dict[str, Any]:
    def shell(*command: str) -> str:
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
            return re.sub(r"\x1b\[\d*m", "", text)
        except (OSError, subprocess.TimeoutExpired):
            return ""

    return {
        "device": torch.cuda.get_device_name(),
        "gpus": dist.get_world_size(),
        "driver": shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
        "topology": shell("nvidia-smi", "topo", "-m").splitlines()[: dist.get_world_size() + 1],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/multi_gpu.json"))
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 1024])
    parser.add_argument("--loads", nargs="*", default=["even", "lognormal 1", "share 0.75", "16 experts"])
    parser.add_argument(
        "--layers",
        nargs="*",
        default=["symmetric exact", "symmetric tolerant", "plain", "collective exact", "symmetric off"],
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=200.0, help="seconds after which no more is measured")
    parser.add_argument("--only", choices=["check", "times"])
    parser.add_argument("--plot", type=Path, help="draw --out to this file instead of measuring")
    args = parser.parse_args()
    if args.plot is not None:
        plot(args.out, args.plot)
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
    result: dict[str, Any] = machine()
    say(result)
    if args.only != "times":
        result["check"] = check()
        say(result["check"])
    if args.only != "check":
        result["layers"] = []
        for tokens in args.tokens:
            result["layers"] += measure(tokens, args.loads, args.layers, args.repeat, args.deadline)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
