"""A mixture of experts in plain torch whose loop over experts becomes two grouped products, without a Perilune model.

    python examples/moe.py

The same weights run as a loop over nn.Linear experts and through perilune.ops.moe: equal outputs and gradients, fewer
bytes kept for the backward pass. Then the selection bias of Quantile Balancing evens out a skewed router in two steps.

Legend: T tokens, D width, F expert width, E experts, J experts a token, R = T J rows sorted by expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import nn

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense

T, D, F, E, J = 256, 64, 96, 16, 4


class Expert(nn.Module):
    """SwiGLU: down(silu(gate(x)) up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(D, F, bias=False) for _ in range(2))
        self.down = nn.Linear(F, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nnf.silu(self.gate(x)) * self.up(x))
        return out


def loop(x_TD: torch.Tensor, routing: moe.Routing, experts: list[Expert]) -> torch.Tensor:
    """What most code bases start with: every expert gathers its tokens."""
    y_TD = torch.zeros_like(x_TD)
    for e, expert in enumerate(experts):
        token, choice = (routing.ids_TJ == e).nonzero(as_tuple=True)
        y_TD = y_TD.index_add(0, token, expert(x_TD[token]) * routing.weights_TJ[token, choice, None])
    return y_TD


def grouped(x_TD: torch.Tensor, routing: moe.Routing, weights: Dense) -> torch.Tensor:
    """All experts at once. The routing weight goes to the activation, so that no expert output is kept."""
    order_R, offs_E = moe.permute(routing.ids_TJ, E)
    row_weights_R = routing.weights_TJ.reshape(-1).index_select(0, order_R)
    activation = Activation("silu")
    y_RD = moe.experts(x_TD, weights, offs_E, activation, row_weights_R=row_weights_R, order_R=order_R)
    return moe.combine(y_RD, order_R, None, J)


def main() -> None:
    torch.manual_seed(0)
    experts = [Expert() for _ in range(E)]
    x_TD, router = torch.randn(T, D, requires_grad=True), torch.randn(E, D, requires_grad=True)
    gate_up = torch.stack([torch.cat([e.gate.weight, e.up.weight]) for e in experts]).detach().requires_grad_()
    down = torch.stack([e.down.weight for e in experts]).detach().requires_grad_()
    logits_TE, _ = moe.project(x_TD, router / D**0.5, None)
    routing = moe.route(logits_TE, torch.zeros(E), J, scale=1.0)

    results, d_TD = [], torch.randn(T, D)
    for call in (lambda: loop(x_TD, routing, experts), lambda: grouped(x_TD, routing, Dense(gate_up, down))):
        kept: dict[int, int] = {}

        def note(t: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y_TD = call()
        d_x, d_router = torch.autograd.grad(y_TD, (x_TD, router), d_TD, retain_graph=True)
        results.append((y_TD, d_x, d_router, sum(kept.values())))
    for a, b in zip(results[0][:3], results[1][:3], strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
    print(f"kept for the backward pass: loop {results[0][3] / 1e6:.1f} MB, grouped {results[1][3] / 1e6:.1f} MB")

    skewed_TE = logits_TE.detach() + 1.5 * torch.randn(E)
    bias_E = torch.zeros(E)
    for step in range(3):
        routing = moe.route(skewed_TE, bias_E, J, scale=1.0)
        load_E = moe.expert_load(routing.ids_TJ, E)
        print(f"step {step}: busiest expert has {load_E.max().item() * E / (T * J):.2f} times its share")
        assert routing.threshold_T is not None
        bias_E = moe.quantile_bias(routing.scores_TE, routing.threshold_T, J)
    assert load_E.max().item() * E / (T * J) < 1.3


if __name__ == "__main__":
    main()
