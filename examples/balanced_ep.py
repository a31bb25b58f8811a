"""Balanced expert parallelism in a plain torch mixture of experts, without a Perilune model.

    python examples/balanced_ep.py                                    4 virtual ranks in this process
    torchrun --nproc-per-node 4 examples/balanced_ep.py               4 gloo processes

Both train the same small layer on the same tokens and print the same losses. A router with a strong preference sends
most tokens to the experts of rank 0; each line shows how uneven the ranks would be and how even they were.

Legend: T tokens, D width, F expert width, E experts, J experts a token.
"""

from __future__ import annotations

import argparse
import datetime
import os

import torch
import torch.distributed as dist
from torch import nn

from perilune.config import Activation
from perilune.parallel import mesh
from perilune.parallel.expert import BalancedExperts, Collective, ExpertParallel, Local, Transport, exact, tolerant

T, D, F, E, J = 64, 32, 48, 16, 2


class Mixture(nn.Module):
    """Softmax router, top J experts."""

    def __init__(self, experts: BalancedExperts) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = experts

    def forward(self, x_TD: torch.Tensor, preference_E: torch.Tensor) -> torch.Tensor:
        weights_TJ, ids_TJ = (self.router(x_TD) + preference_E).softmax(-1).topk(J)
        return self.experts(x_TD, ids_TJ, weights_TJ)


def build(transport: Transport, tokens: int, policy: str) -> Mixture:
    """The same weights on every layout: each process draws all of them and keeps its own."""
    chosen = exact() if policy == "exact" else tolerant(0.1)
    parallel = ExpertParallel(transport, E, J, tokens, chosen)
    layer = Mixture(BalancedExperts(parallel, D, F, Activation("silu")))
    first = transport.held[0] * parallel.home
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in layer.experts.parameters():
            everyone = torch.randn(E, *weight.shape[1:]) / weight.shape[2] ** 0.5
            weight.copy_(everyone[first : first + weight.shape[0]])
        layer.router.weight.copy_(torch.randn(E, D) / D**0.5)
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4, help="virtual ranks, without torchrun")
    parser.add_argument("--policy", choices=["exact", "tolerant"], default="exact")
    args = parser.parse_args()

    transport: Transport
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        transport = Collective()
    else:
        transport = Local(args.ranks)
    ranks, held = transport.ranks, transport.held
    tokens = T // ranks
    layer = build(transport, tokens, args.policy)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    mine = slice(held[0] * tokens, (held[-1] + 1) * tokens)
    preference_E = torch.zeros(E)
    preference_E[: E // 4] = 2.0
    for step in range(args.steps):
        x_TD = torch.randn(T, D, generator=generator)
        want_TD = x_TD.roll(1, -1)
        y_TD = layer(x_TD[mine], preference_E)
        loss = (y_TD - want_TD[mine]).square().sum() / (T * D)
        loss.backward()
        total = loss.detach()
        if dist.is_initialized():
            # Experts already have the gradients of all tokens; what every rank holds does not.
            dist.all_reduce(layer.router.weight.grad)
            dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        if held[0] == 0:
            stats = layer.experts.stats()
            print(
                f"step {step}  loss {total.item():.6f}  busiest {stats.before:.2f} -> {stats.after:.2f} of the mean"
                f"  copies {stats.copies}  rule {stats.rule}"
            )
    mesh.stop()


if __name__ == "__main__":
    main()
