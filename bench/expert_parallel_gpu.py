"""Balanced expert parallelism on one GPU: plan and destination rows, and the layer of the slowest rank at K3's width.

    python bench/expert_parallel_gpu.py --out bench/results/expert_parallel_gpu.json

All times are those of CUDA graphs; the exchange of counts is left out of plan times. For the layer one rank of R runs
alone with the rows that the plan gives it; what it would send to other GPUs it writes to a spare buffer of its own
memory. Wire time is modelled from bytes (`wire_ms`, at --link GB/s), never measured here. `plain` is our own all-to-all
layer with exact sizes, one row a choice on the wire; `padded` the same experts in a buffer for the worst case.

Legend: R ranks, E experts, M experts at home, S tokens a rank, J choices a token, L width, F expert width.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import DirectParallel, Virtual
from perilune.parallel.expert.layout_triton import plan_and_lay_out
from perilune.parallel.expert.rows_triton import count_choices, destination_rows
from perilune.parallel.expert.symmetric import Shared

M, J, L, F = 112, 16, 3584, 3072
ACT = Activation("situ")
EXPERT_BYTES = 3 * L * F * 2


def graphed(call: Callable[[], Any], inner: int, repeat: int = 15) -> dict[str, float]:
    """Microseconds a call, in a graph of `inner` calls: median, least and most of `repeat` replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    graph.replay()
    times = [elapsed(graph.replay) * 1e3 / inner for _ in range(repeat)]
    del graph
    torch.cuda.empty_cache()
    return {"median": round(statistics.median(times), 2), "min": round(min(times), 2), "max": round(max(times), 2)}


def milliseconds(call: Callable[[], Any], repeat: int) -> float:
    """Median of `repeat` replays of a graph of one call."""
    return round(graphed(call, 1, repeat)["median"] / 1e3, 3)


def elapsed(call: Callable[[], Any]) -> float:
    """Milliseconds by device events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def shares(kind: str, ranks: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    p_E = torch.ones(experts, dtype=torch.float64)
    if kind.startswith("lognormal"):
        p_E = (float(kind.split()[1]) * torch.randn(experts, generator=generator, dtype=torch.float64)).exp()
    elif kind == "one rank idle":
        p_E[: experts // ranks] = 0
    elif kind == "all on one rank":
        p_E[experts // ranks :] = 0
    elif kind == "16 experts of one rank":
        p_E[J:] = 0
    return p_E / p_E.sum()


def draw(p_E: torch.Tensor, tokens: int, seed: int) -> torch.Tensor:
    """Distinct experts a token, by the Gumbel trick."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    noise = torch.empty(tokens, p_E.shape[0], device="cuda").exponential_(generator=generator)
    return (noise / p_E.float().cuda().clamp(min=1e-30)).topk(J, largest=False).indices


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


class Alone(Virtual):
    """Rank `rank` of R with memory of its own; the memory of all others is one spare buffer."""

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__(ranks, "cuda")
        self.held = (rank,)
        self.spare: dict[tuple[Any, ...], torch.Tensor] = {}

    def share(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        mine = torch.zeros(*shape, dtype=dtype, device="cuda")
        spare = self.spare.setdefault((tuple(shape), dtype), torch.zeros_like(mine))
        table = [spare.data_ptr()] * self.ranks
        table[self.held[0]] = mine.data_ptr()
        return Shared((mine,), torch.tensor(table, device="cuda"))

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


def wire_ms(plan: expert.Plan, ids: list[torch.Tensor], link: float) -> dict[str, float]:
    """Modelled milliseconds of the busiest port at `link` GB/s: rows out and back, copies, gradients of copies."""
    ranks, home = plan.ranks, plan.home
    remote_RE = (plan.alloc_RE > 0).cpu() & (torch.arange(ranks * home) // home != torch.arange(ranks).unsqueeze(1))
    copies_RR = remote_RE.view(ranks, ranks, home).sum(2)
    port_copies = int(torch.maximum(copies_RR.sum(0), copies_RR.sum(1)).max()) * EXPERT_BYTES
    payload, choice = torch.zeros(ranks, ranks), torch.zeros(ranks, ranks)
    for rank, x in enumerate(ids):
        where, _ = expert.destinations(plan, x, rank)
        met = torch.zeros(x.shape[0], ranks, device="cuda").scatter_(1, where, 1.0)
        payload[rank], choice[rank] = met.sum(0).cpu(), torch.bincount(where.flatten(), minlength=ranks).cpu().float()
    for table in (payload, choice):
        table.fill_diagonal_(0)
    port = lambda t: float(torch.maximum(t.sum(0), t.sum(1)).max()) * L * 2 / link / 1e6  # noqa: E731
    return {"rows_out": round(port(payload), 3), "rows_back": round(port(choice), 3)} | {
        "copies": round(port_copies / link / 1e6, 3)
    }


def layers(
    ranks: int, tokens: int, kinds: Sequence[str], names: Sequence[str], link: float, repeat: int
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    experts = ranks * M
    new = {"device": "cuda", "dtype": torch.bfloat16}
    up = (torch.randn(M, 2 * F, L, **new) / L**0.5).requires_grad_()
    down = (torch.randn(M, L, F, **new) / F**0.5).requires_grad_()
    x = torch.randn(tokens, L, **new).requires_grad_()
    w = torch.rand(tokens, J, device="cuda").div_(J).requires_grad_()
    d_y = torch.randn(tokens, L, **new)
    rows = []
    for kind in kinds:
        ids = [draw(shares(kind, ranks, experts), tokens, seed) for seed in range(ranks)]
        counts_RE = torch.stack([torch.bincount(i.flatten(), minlength=experts) for i in ids])
        load_R = counts_RE.sum(0).view(ranks, M).sum(1)
        load_E = counts_RE.sum(0).double()
        row: dict[str, Any] = {
            "R": ranks,
            "S": tokens,
            "load": kind,
            "rank_max_over_mean": round(float(load_R.max() / load_R.double().mean()), 4),
            "MaxVio": round(float(load_E.max() / load_E.mean()) - 1, 3),
        }
        policies = {"exact": expert.exact(), "tolerant": expert.tolerant(0.02, 1024)}
        for name, policy in [(name, policies[name]) for name in names if name in policies]:
            plan = expert.plan(counts_RE, policy)
            busy_R = plan.rows_RG.sum(1)
            copies_R = (plan.slots_RB >= 0).sum(1)
            slowest = int((busy_R * 1000 + copies_R).argmax())
            row[name] = run_alone(policy, ranks, slowest, tokens, ids, counts_RE, (x, w, up, down, d_y), repeat)
            row[name] |= {"copies": int(copies_R.sum()), "wire_ms": wire_ms(plan, ids, link)}
        for name, worst in (("plain", None), ("padded", ranks * tokens * J)):
            if name in names and (worst is None or ranks <= 2):
                row[name] = run_plain(int(load_R.argmax()), counts_RE, (x, w, up, down, d_y), worst, repeat)
                row[name]["wire_ms"] = wire_ms(expert.plan(counts_RE, expert.off()), ids, link)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def run_alone(
    policy: expert.Policy,
    ranks: int,
    rank: int,
    tokens: int,
    ids: list[torch.Tensor],
    counts_RE: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    repeat: int,
) -> dict[str, Any]:
    """Forward and backward milliseconds of one rank, in its own memory, and its peak memory."""
    x, w, up, down, d_y = tensors
    transport = Alone(ranks, rank)
    parallel = DirectParallel(transport, ranks * M, J, tokens, L, F, policy=policy)
    for slots in parallel.workspace.slots:
        slots.mine[0].normal_(std=slots.mine[0].shape[-1] ** -0.5)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    for counts in parallel.workspace.counts:
        counts.mine[0].copy_(counts_RE)
    plan = expert.plan(counts_RE, policy)
    # Every source writes once, so that this rank has all its rows.
    for source, i in enumerate(ids):
        _, earlier = count_choices(i, ranks * M, flag)
        dst = destination_rows(plan, i, earlier, source, parallel.rows)
        sent = expert.DirectPlanned(plan, (dst,), (), ())
        parallel.send([x.detach()], sent, [w.detach()])
        parallel.send([d_y], sent, None, buffer=1)
    planned: list[Any] = [None]

    def forward() -> torch.Tensor:
        planned[0] = parallel.plan([ids[rank]])
        return expert.balanced_experts(parallel, x, w, Dense(up, down), planned[0], ACT)

    def both() -> None:
        torch.autograd.grad(forward(), (x, w, up, down), d_y)

    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        one_way = milliseconds(forward, repeat)
    result = {
        "forward_ms": one_way,
        "forward_backward_ms": milliseconds(both, repeat),
        "rows": int(plan.rows_RG[rank].sum()),
    }
    result["copies_here"] = int((plan.slots_RB[rank] >= 0).sum())
    result["peak_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return result


def run_plain(
    rank: int, counts_RE: torch.Tensor, tensors: tuple[torch.Tensor, ...], padded: int | None, repeat: int
) -> dict[str, Any]:
    """The hottest rank under plain expert parallelism: permute, its rows through its experts, combine; no wire."""
    x, _, up, down, d_y = tensors
    home_M = counts_RE.sum(0).view(-1, M)[rank]
    offs = home_M.cumsum(0).int()
    used = int(offs[-1])
    choices = x.shape[0] * J
    order = torch.randperm(choices, device="cuda")
    received = torch.randn(padded or used, L, device="cuda", dtype=torch.bfloat16)
    row_weights = torch.rand(padded or used, device="cuda")
    back = torch.randn(choices, L, device="cuda", dtype=torch.bfloat16)
    weights = Dense(up.detach(), down.detach())

    def forward() -> None:
        moe.dispatch(x.detach(), order, J)
        moe.experts(received, weights, offs, ACT, row_weights_R=row_weights)
        moe.combine(back, order, None, J)

    def both() -> None:
        forward()
        moe.dispatch(d_y, order, J)
        moe.experts_backward(received, received, weights, offs, ACT, row_weights_R=row_weights)
        moe.combine(back, order, None, J)

    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        one_way = milliseconds(forward, repeat)
        result = {"forward_ms": one_way, "forward_backward_ms": milliseconds(both, repeat), "rows": used}
    result["peak_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return result


def kept(tokens: int = 8192, ranks: int = 2) -> dict[str, Any]:
    """Bytes a token that stay allocated between forward and backward pass, by the allocator; y and inputs left out."""
    new = {"device": "cuda", "dtype": torch.bfloat16}
    up, down = (torch.randn(M, *shape, **new).requires_grad_() for shape in ((2 * F, L), (L, F)))
    x, w = torch.randn(tokens, L, **new), torch.rand(tokens, J, device="cuda")
    ids = draw(shares("lognormal 0.3", ranks, ranks * M), tokens, 0)
    near = ids % M
    parallel = DirectParallel(Alone(ranks, 0), ranks * M, J, tokens, L, F)

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return expert.balanced_experts(parallel, x, w, Dense(up, down), parallel.plan([ids]), ACT)

    def naive(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        order, offs = moe.permute(near, M)
        rows = moe.experts(moe.dispatch(x, order, J), Dense(up, down), offs, ACT, save="all")
        return moe.combine(rows, order, w)

    def library(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Grouped products and torch's own operations, each keeping what it needs."""
        order, offs = moe.permute(near, M)
        rows = x.index_select(0, order // J)
        gate, value = torch.nn.functional.grouped_mm(rows, up.transpose(1, 2), offs=offs).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * value
        out = torch.nn.functional.grouped_mm(hidden, down.transpose(1, 2), offs=offs)
        out = out * w.reshape(-1).index_select(0, order).unsqueeze(-1).bfloat16()
        return torch.zeros_like(x).index_add(0, order // J, out)

    found = {"L": L, "F": F, "J": J, "S": tokens}
    for name, layer in (("balanced", ours), ("saving all", naive), ("torch operations", library)):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        for _ in range(2):
            y = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = layer(*leaves)
            after = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
        # The layer's input is kept by reference in all of them.
        found[name] = round((after + x.untyped_storage().nbytes()) / tokens)
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
