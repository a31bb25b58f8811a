"""The balanced layer of the slowest rank alone on one GPU, a part of bench/expert_parallel_gpu.py.

One rank of R runs with the rows that the plan gives it; what it would send to other GPUs it writes to a spare buffer of
its own memory. Wire time is modelled from bytes (`wire_ms`, at a given GB/s), never measured here. `plain` is our own
all-to-all layer with exact sizes, one row a choice on the wire; `padded` the same experts in a buffer for the worst
case.

Legend: R ranks, E experts, M experts at home, S tokens a rank, J choices a token, L width, F expert width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from expert_parallel_gpu_timing import J, draw, milliseconds, shares

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import DirectParallel, Virtual
from perilune.parallel.expert.rows_triton import count_choices, destination_rows
from perilune.parallel.expert.symmetric import Shared

M, L, F = 112, 3584, 3072
ACT = Activation("situ")
EXPERT_BYTES = 3 * L * F * 2


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
        parallel.exchange.send([x.detach()], sent, [w.detach()])
        parallel.exchange.send([d_y], sent, None, buffer=1)
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
