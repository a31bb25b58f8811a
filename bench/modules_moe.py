"""Latent mixture of experts at Kimi-K3 widths on one GPU: training on one rank's share, and a few tokens at a time.

Training: 8192 tokens x 16 choices = 131072 rows over 112 experts, which is what each of 8 expert-parallel ranks
computes of 896 experts when the load is even; row counts differ by a random factor (log-normal, sigma 0.3) and one
expert has none. Serving: all 896 experts in memory, 1, 8 and 64 tokens, 16 distinct experts each.
Floors: real FLOPs at the measured bfloat16 rate, or every weight, input and output once at the copy bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as nnf
from modules_timing import figures, rounds

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense, Packed, reference

D, L, F, E, LOCAL, J = 7168, 3584, 3072, 896, 112, 16
T = 8192
R = T * J
ACT = Activation("situ")


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(std=scale)


def uneven(total: int, experts: int) -> torch.Tensor:
    """offs of `total` rows with uneven shares, one expert empty."""
    share = torch.exp(0.3 * torch.randn(experts))
    share[5] = 0
    counts = torch.bincount(torch.multinomial(share, total, replacement=True), minlength=experts)
    return counts.cumsum(0).to(torch.int32).cuda()


def plain_situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.float(), up.float()
    left = ACT.beta * torch.tanh(gate / ACT.beta) * torch.sigmoid(gate)
    return (left * ACT.linear_beta * torch.tanh(up / ACT.linear_beta)).bfloat16()


def plain(x: torch.Tensor, weights: Dense, offs: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """torch.grouped_mm and elementwise operations under autograd."""
    gate, up = nnf.grouped_mm(x, weights.gate_up_E2FL.transpose(1, 2), offs=offs).chunk(2, -1)
    y = nnf.grouped_mm(plain_situ(gate, up), weights.down_ELF.transpose(1, 2), offs=offs)
    return (y * w[:, None]).bfloat16()


def experts_rows() -> list[dict[str, object]]:
    weights = Dense(
        draw(LOCAL, 2 * F, L, scale=L**-0.5).requires_grad_(), draw(LOCAL, L, F, scale=F**-0.5).requires_grad_()
    )
    x, w, d = draw(R, L).requires_grad_(), torch.rand(R, device="cuda").requires_grad_(), draw(R, L)
    offs = uneven(R, LOCAL)
    leaves = (x, w, weights.gate_up_E2FL, weights.down_ELF)
    compiled = torch.compile(plain)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "perilune": lambda: moe.experts(x, weights, offs, ACT, row_weights_R=w, save="all"),
        "perilune, recompute": lambda: moe.experts(x, weights, offs, ACT, row_weights_R=w),
        "grouped_mm + eager": lambda: plain(x, weights, offs, w),
        "torch.compile": lambda: compiled(x, weights, offs, w),
    }
    out: list[dict[str, object]] = []
    flop, moved = 6 * R * L * F, 2 * (2 * R * L + 3 * LOCAL * L * F)
    with torch.no_grad():
        out += figures("moe", "experts forward", rounds(dict(calls), 7), flop, moved)
    steps = {n: (lambda call=call: torch.autograd.grad(call(), leaves, d)) for n, call in calls.items()}
    for row in figures("moe", "experts forward+backward", rounds(steps, 8), 3 * flop, 3 * moved):
        if "ms" in row:
            row["kept_gib"] = kept(calls[str(row["implementation"])])
        out.append(row)
    return out


def kept(call: Callable[[], torch.Tensor]) -> float:
    """GiB that a forward pass leaves allocated for its backward pass, the result itself aside."""
    before = torch.cuda.memory_allocated()
    y = call()
    return (torch.cuda.memory_allocated() - before - y.numel() * y.element_size()) / 2**30


def routing_rows() -> list[dict[str, object]]:
    x, z, d = draw(T, D), draw(T, L), draw(T, L)
    latent, router = draw(L, D, scale=D**-0.5), draw(E, D, scale=D**-0.5)
    logits, bias = x.float() @ router.float().t(), 0.1 * torch.randn(E, device="cuda")
    routing = moe.route(logits, bias, J, 1.0)
    order, _ = moe.permute(routing.ids_TJ, E)
    expert_rows, d_rows = draw(R, L), draw(R, L)
    weights = routing.weights_TJ.detach()
    row_TJ = reference.row_of_choice(order).view(T, J)
    out = figures(
        "moe",
        "router + latent down",
        rounds(
            {
                "perilune": lambda: moe.project(x, router, latent),
                "eager": lambda: (x.float() @ router.float().t(), x @ latent.t()),
            },
            8,
        ),
        2 * T * D * (L + E),
        2 * (T * D + (L + E) * D + T * L) + 4 * T * E,
    )
    moved = 4 * T * E * 2 + 12 * T * J
    calls = {
        "perilune": lambda: moe.route(logits, bias, J, 1.0),
        "eager": lambda: reference.route(logits, bias, J, 1.0, True),
    }
    out += figures("moe", "route", rounds(calls, 8), 0, moved)
    calls = {"perilune": lambda: moe.permute(routing.ids_TJ, E), "eager": lambda: reference.permute(routing.ids_TJ, E)}
    out += figures("moe", "permute", rounds(calls, 8), 0, 16 * R)
    calls = {"perilune": lambda: moe.dispatch(z, order, J), "eager": lambda: reference.spread(z, order, J)}
    out += figures("moe", "dispatch", rounds(calls, 8), 0, 2 * L * (T + R))
    calls = {
        "perilune": lambda: moe.combine(expert_rows, order, weights),
        "eager": lambda: reference.gather_sum(expert_rows, row_TJ, weights),
    }
    out += figures("moe", "combine", rounds(calls, 8), 0, 2 * L * (T + R))

    def backward(call: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor, grad: torch.Tensor) -> Callable:
        leaf = leaf.detach().requires_grad_()
        y = call(leaf)
        return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)

    calls = {
        "dispatch backward": backward(lambda t: moe.dispatch(t, order, J), z, d_rows),
        "combine backward": backward(lambda t: moe.combine(t, order, None, J), expert_rows, d),
    }
    for name, times in rounds(calls, 8).items():
        out += figures("moe", name, {"perilune": times}, 0, 2 * L * (T + R))
    return out


def mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    latent: torch.Tensor,
    bias: torch.Tensor,
    weights: Dense | Packed,
    save: moe.Save = "inputs",
) -> torch.Tensor:
    """From the layer's input to the sum of its experts in the latent space."""
    logits, z = moe.project(x, router, latent)
    routing = moe.route(logits, bias, J, 1.0)
    order, offs = moe.permute(routing.ids_TJ, len(router))
    w = routing.weights_TJ.reshape(-1).index_select(0, order)
    y = moe.experts(z, weights, offs, ACT, row_weights_R=w, save=save, order_R=order)
    return moe.combine(y, order, None, J)


def layer_rows() -> list[dict[str, object]]:
    """Router, latent down, experts and sum as one layer on one rank's share, against the eager parts together."""
    x, d, bias = draw(T, D).requires_grad_(), draw(T, L), torch.zeros(LOCAL, device="cuda")
    router, latent = draw(LOCAL, D, scale=D**-0.5).requires_grad_(), draw(L, D, scale=D**-0.5).requires_grad_()
    weights = Dense(
        draw(LOCAL, 2 * F, L, scale=L**-0.5).requires_grad_(), draw(LOCAL, L, F, scale=F**-0.5).requires_grad_()
    )
    leaves = (x, router, latent, weights.gate_up_E2FL, weights.down_ELF)

    def eager() -> torch.Tensor:
        routing = reference.route(x.float() @ router.float().t(), bias, J, 1.0, True)
        z = x @ latent.t()
        order, offs = reference.permute(routing.ids_TJ, LOCAL)
        y = plain(z[order // J], weights, offs, routing.weights_TJ.reshape(-1)[order])
        row = reference.row_of_choice(order).view(T, J)
        return y.float()[row].sum(1).bfloat16()

    calls = {
        "perilune": lambda: mixture(x, router, latent, bias, weights, "all"),
        "perilune, recompute": lambda: mixture(x, router, latent, bias, weights),
        "eager": eager,
    }
    steps = {n: (lambda call=call: torch.autograd.grad(call(), leaves, d)) for n, call in calls.items()}
    flop = 3 * (6 * R * L * F + 2 * T * D * (L + LOCAL))
    return figures("moe", "layer forward+backward", rounds(steps, 7), flop, 0)


def small_rows() -> list[dict[str, object]]:
    gate_up = torch.empty(E, 2 * F, L, device="cuda", dtype=torch.bfloat16)
    down = torch.empty(E, L, F, device="cuda", dtype=torch.bfloat16)
    for first in range(0, E, 128):
        gate_up[first : first + 128].normal_(std=L**-0.5)
        down[first : first + 128].normal_(std=F**-0.5)
    weights, packed = Dense(gate_up, down), draw_packed()
    out: list[dict[str, object]] = []
    router, latent = draw(E, D, scale=D**-0.5), draw(L, D, scale=D**-0.5)
    bias = torch.zeros(E, device="cuda")
    for tokens in (1, 8, 64):
        x = draw(tokens, D)
        ids = moe.route(moe.project(x, router, None)[0], bias, J, 1.0).ids_TJ
        used, (_, offs), picked = len(ids.unique()), moe.permute(ids, E), draw(tokens * J, L)
        ones = torch.ones(tokens * J, device="cuda")
        name = f"forward, {tokens} token{'s' * (tokens > 1)} ({used} of {E} experts)"
        flop, number = 6 * tokens * J * L * F, 3 * used * L * F
        dense = {
            "perilune": partial(moe.experts, picked, weights, offs, ACT),
            "grouped_mm + eager": partial(plain, picked, weights, offs, ones),
        }
        layer = {"perilune": partial(mixture, x, router, latent, bias, weights)}
        with torch.no_grad():
            out += figures("moe", "experts " + name, rounds(dense, 8, graph=True), flop, 2 * number)
            times = rounds({"perilune": partial(moe.experts, picked, packed, offs, ACT)}, 8, graph=True)
            out += figures("moe", "MXFP4 experts " + name, times, flop, number * 17 // 32)
            times = rounds(layer, 8, graph=True)
            out += figures("moe", "layer " + name, times, flop + 2 * tokens * D * (E + L), 2 * (number + D * (E + L)))
    return out


def draw_packed() -> Packed:
    """Any codes are weights; scales of about 2^-8."""

    def bytes_(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device="cuda", dtype=torch.uint8)

    return Packed(
        bytes_(0, 256, E, 2 * F, L // 2),
        bytes_(117, 121, E, 2 * F, L // 32),
        bytes_(0, 256, E, L, F // 2),
        bytes_(117, 121, E, L, F // 32),
    )


def rows(device: torch.device) -> Iterator[dict[str, object]]:
    with torch.cuda.device(device):
        for part in (small_rows, experts_rows, layer_rows, routing_rows):
            torch.cuda.empty_cache()
            yield from part()
