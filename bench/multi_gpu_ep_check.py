"""Whether expert parallelism over several GPUs is right, at a small width: all transports, graphs, two in flight.

Legend: E experts, T tokens, J choices a token, L width, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_common import DRY, everywhere, say
from multi_gpu_ep_layer import ACT, F, J, L, M, draw, padded, plain
from parallel_layers import DEVICE

from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import Collective, DirectParallel, ExpertParallel, Symmetric, Virtual


def mixture(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, weights: Dense, experts: int) -> torch.Tensor:
    order, offs = moe.permute(ids, experts)
    rows = moe.experts(
        moe.dispatch(x, order, ids.shape[1]), weights, offs, ACT, row_weights_R=w.reshape(-1).index_select(0, order)
    )
    return moe.combine(rows, order, None, ids.shape[1])


def check() -> dict[str, Any]:
    """Layer of all transports against float64 in one place; symmetric bitwise against virtual ranks; graphs; races.

    Without GPUs `collective` alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts, top_k, width, inner, tokens = 16 * ranks, 4, 512, 256, 384
    sizes = [tokens - 100 * (r % 2) for r in range(ranks)]
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    generator = torch.Generator(device=DEVICE).manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()

    x, d_y = normal(sum(sizes), width), normal(sum(sizes), width)
    up, down = normal(experts, 2 * inner, width) / width**0.5, normal(experts, width, inner) / inner**0.5
    w = torch.rand(sum(sizes), top_k, device=DEVICE, generator=generator)
    own = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
    collective = ExpertParallel(Collective(), experts, top_k, tokens, align=8)
    layers: dict[str, Any] = {"collective": collective}
    direct: list[DirectParallel] = []
    if not DRY:
        for transport in (Symmetric(), Virtual(ranks, "cuda")):
            direct.append(DirectParallel(transport, experts, top_k, tokens, width, inner, align=8))
        layers["symmetric"] = direct[0]
    for parallel in direct:
        space = parallel.workspace
        for shared in (*space.rows, space.weights, space.results, space.numbers, *space.slots, *space.grads):
            for tensor in shared.mine:
                tensor.fill_(float("nan"))
    worst = dict.fromkeys(layers, 0.0)
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
        again = [] if DRY else layer(direct[1], ids, *everything, sizes)
        for trial in range(4):
            # Ranks come at different times.
            if not DRY:
                torch.cuda._sleep(int(2e6) * ((rank + trial + step) % 3))
            for name, parallel in layers.items():
                got = layer(parallel, ids, mine, own, (sizes[rank],))
                for a, b, part in zip(got, truth, parts, strict=True):
                    worst[name] = max(worst[name], float((a.double() - b[part]).norm() / b[part].norm()))
                if name == "symmetric":
                    for i, (a, b, part) in enumerate(zip(got, again, parts, strict=True)):
                        assert torch.equal(a, b[part]), f"symmetric differs from virtual ranks in output {i}, {kind}"
        last = layers["collective" if DRY else "symmetric"]
        stats = last.stats(last.plan([ids[mine]]), 2 * width, 1)
        assert stats.residual == 0
        copies += stats.copies
    assert copies > 0 or ranks == 1, "no load needed copies"
    for name, error in worst.items():
        worst[name] = everywhere(error)
        assert worst[name] < 1e-2, f"{name} is {worst[name]} from float64"
    found: dict[str, Any] = {"relative_error_to_fp64": worst, "copies_used": copies}
    if DRY:
        return found
    found["bitwise_virtual_ranks"] = True
    say(found)
    mine_of = x[mine], w[mine], up[own], down[own], d_y[mine]
    graph_check(direct[0], *mine_of, experts, top_k)
    say("graphs are right at other routings")
    flight_check(direct[0], DirectParallel(Symmetric(), experts, top_k, tokens, width, inner, align=8), *mine_of)
    return found | {"graph": True, "two_in_flight": True}


def wide_check(tokens: int = 512) -> float:
    """At K3's width, where a rank's weights are more than 2^31 numbers: all layers against the first one."""
    rank, experts = dist.get_rank(), M * dist.get_world_size()
    generator = torch.Generator(device=DEVICE).manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    leaves = [normal(tokens, L), torch.rand(tokens, J, device=DEVICE), normal(M, 2 * F, L), normal(M, L, F)]
    for weight in leaves[2:]:
        weight.mul_(weight.shape[-1] ** -0.5)
    leaves = [t.requires_grad_() for t in leaves]
    d_y, ids = normal(tokens, L), draw("lognormal 2", experts, tokens, J, seed=rank)
    results = []
    layers: list[Any] = [] if DRY else [DirectParallel(Symmetric(), experts, J, tokens, L, F)]
    layers.append(ExpertParallel(Collective(), experts, J, tokens))
    for parallel in layers:
        planned = parallel.plan([ids])
        y = expert.balanced_experts(parallel, leaves[0], leaves[1], Dense(*leaves[2:]), planned, ACT)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, d_y)])
        assert parallel.stats(planned, 1, 1).copies > 0
        del planned, y
    for other in (plain, padded):
        y = other(leaves[0], leaves[1], ids, Dense(*leaves[2:]))
        results.append([y.detach(), *torch.autograd.grad(y, leaves, d_y)])
        del y
    # Which rows of an expert are whose differs in no way; how products are cut may.
    worst = max(
        float((a - b).float().norm() / b.float().norm())
        for result in results[1:]
        for a, b in zip(result, results[0], strict=True)
    )
    assert all(t.isfinite().all() for outputs in results for t in outputs)
    worst = everywhere(worst)
    assert worst < 5e-3, f"layers differ by {worst} at K3's width"
    say(f"at K3's width layers differ by {worst}")
    return worst


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
