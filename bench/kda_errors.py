"""Errors of KDA on a GPU, ours and the peers', against a float64 recurrence on the same inputs.

    python bench/kda_errors.py --out bench/results/kda_errors.json

One CUDA device. Relative Frobenius errors of outputs, final state and gradients; bfloat16 inputs, K = V = 128, zero
initial state, lower bound -5, on the inputs where KDA kernels have gone wrong: random, slow decay, every gate at -5,
similar keys, identical keys. The loss of the gradients is a fixed random projection of outputs and final state.
"""

import argparse
import json
from pathlib import Path

import torch
from kda_peers import BOUND, Forward, Inputs, peers, perilune, versions

KINDS = ("random", "slow decay", "g = -5", "similar keys", "identical keys")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")


def make(kind: str, T: int, H: int) -> Inputs:
    random = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device="cuda")

    q, k, v, g, beta = draw(T, H, 128), draw(T, H, 128), draw(T, H, 128), 2 * draw(T, H, 128), draw(T, H)
    if kind == "slow decay":
        g = g - 8
    elif kind == "g = -5":
        g = torch.full_like(g, 20.0)
    elif kind == "similar keys":
        k, g, beta = 0.1 * k + draw(1, H, 128), g - 8, beta + 2
    elif kind == "identical keys":
        k, g, beta = draw(1, H, 128).expand_as(k), g - 12, torch.full_like(beta, 8.0)
    return [x.to(torch.bfloat16) for x in (q, k, v, g, beta)] + [torch.zeros(H).cuda(), torch.zeros(H, 128).cuda()]


def recurrence(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token."""
    q, k, v, g, beta, A_log, dt_bias = x
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * 128**-0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    decay = (BOUND * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias))).exp()
    beta = torch.sigmoid(beta)
    S, outputs = q.new_zeros(q.shape[1], 128, 128), []
    for t in range(len(q)):
        S = S * decay[t][:, :, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][:, :, None] * u[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]))
    return torch.stack(outputs), S


def results(run: Forward, x: Inputs, backward: bool) -> dict[str, torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_(backward) for t in x]
    with torch.set_grad_enabled(backward):
        o, final = run(leaves)
    found = {"o": o.detach(), "state": final.detach()}
    if backward:
        random = torch.Generator(device="cuda").manual_seed(1)
        do, df = (torch.randn(t.shape, generator=random, device="cuda").to(torch.bfloat16) for t in (o, final))
        torch.autograd.backward([o, final], [do.to(o.dtype), df.to(final.dtype)])
        found |= {name: leaf.grad for name, leaf in zip(GRADIENTS, leaves, strict=False) if leaf.grad is not None}
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("bench/results/kda_errors.json"))
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--heads", type=int, default=32, help="fla tunes anew for every head count")
    options = arguments.parse_args()
    calls: dict[str, Forward] = {"perilune": perilune, **peers()}
    rows = []
    for kind in KINDS:
        x = make(kind, options.tokens, options.heads)
        exact = results(recurrence, [t.double() for t in x], backward=True)
        for name, call in calls.items():
            found = results(call, x, backward=name != "FlashKDA")
            errors = {
                key: ((value.double() - exact[key]).norm() / exact[key].norm()).item() for key, value in found.items()
            }
            rows.append({"inputs": kind, "implementation": name, **errors})
            print(json.dumps(rows[-1]), flush=True)
    about = {**versions(), "tokens": options.tokens, "heads": options.heads}
    options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
