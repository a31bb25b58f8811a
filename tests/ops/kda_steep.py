"""Shared by the tests of KDA's gradients: softplus gates from nowhere to everywhere steep, gradients compared."""

import math

import torch
from kda_kernels import NAMES, SAFE, error, make
from torch.nn.functional import softplus

from perilune.ops.kda.triton_layout import layout

# By kind, the least and the largest share of steep warps (below): what a test is about must be there.
KINDS = {
    "random": (0.0, 0.001),
    "similar": (0.0, 0.0),
    "negative": (0.0, 0.0),
    "one token": (0.001, 0.02),
    "some channels": (0.1, 0.5),
    "fast": (0.7, 1.0),
    "jumps": (0.7, 1.0),
}


def softplus_inputs(kind, lengths, starts, seed=0, **sizes):
    """Inputs as `make` has them, q, k, v and g rounded to bfloat16."""
    inputs, sequences = make(lengths, starts, kind="similar" if kind == "similar" else "random", seed=seed, **sizes)
    g, A_log = inputs[3], inputs[5]
    A_log += 3.0 if kind == "fast" else -1.0
    if kind == "negative":
        g -= 60.0
    elif kind == "one token":
        g[60, 1, 17] = 1000.0
    elif kind == "some channels":
        g[:, :, 60:70] += 40.0
    elif kind == "jumps":  # between tokens that decay little
        random = torch.Generator().manual_seed(7)
        g[(torch.rand(g.shape, generator=random) < 0.04).to(g.device)] = 800.0
    for x in inputs[:4]:
        x.copy_(x.bfloat16())
    low, high = KINDS[kind]
    assert low <= steep_warps(inputs, sequences) <= high
    return inputs, sequences


def steep_warps(inputs, sequences):
    """Share of the warps (a chunk of one head, 16 channels) of which some group of 16 tokens decays by 2^115.5."""
    g, A_log, dt_bias = (inputs[i].double() for i in (3, 5, 6))
    logs = A_log.exp()[:, None] * softplus(g + dt_bias) / math.log(2)
    steep = []
    for base, first, end in layout(sequences, g.device).table.tolist():
        first, end = max(first, base), min(end, base + 64)
        rows = logs.new_zeros(64, *g.shape[1:])
        rows[first - base : end - base] = logs[first:end]
        steep.append(rows.reshape(4, 16, g.shape[1], 8, 16).sum(1).gt(115.5).any(0).any(-1))
    return torch.stack(steep).double().mean().item()


def compare(found, exact, gate, bounds):
    """Gradients against those of the float64 leaves, relative Frobenius; the bound of most is 1e-2.

    d A_log is a sum over all tokens that nearly cancels: 5e-2, and of steep gates, which leave hardly anything of it,
    1e-2 of the norm of its terms, whose errors are independent.
    """
    for name, a, b in zip(NAMES, found, exact, strict=False):
        off = error(a, b.grad)
        if name == "A_log" and gate is not SAFE:
            x = exact[3] + exact[6]
            terms = exact[3].grad * softplus(x) / torch.sigmoid(x)
            off *= (b.grad.norm() / terms.norm()).item()
        elif name == "A_log":
            bounds = {name: 5e-2} | bounds
        assert off < bounds.get(name, 1e-2), f"{name}: {off}"


__all__ = ["KINDS", "compare", "softplus_inputs", "steep_warps"]
