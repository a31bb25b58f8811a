"""Decoding against a boundary matrix and a tail of writes, compared with the float64 recurrence.

Tolerances (prefill against decode): 5e-5 in fp32, 1e-10 in fp64, relative Frobenius.
"""

from __future__ import annotations

import pytest
import torch
from kda_oracle import activate, draw, recur, relative

from perilune.config import Gate
from perilune.ops.kda import fold_tail, tail_step

SAFE, SOFTPLUS = Gate("safe", -5.0), Gate("softplus")
LIMITS = {torch.float64: 1e-10, torch.float32: 5e-5}
cases = pytest.mark.parametrize(
    ("gate", "level"), [(SAFE, 0.0), (SAFE, 40.0), (SAFE, -12.0), (SOFTPLUS, 0.0), (SOFTPLUS, 500.0)]
)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])


def activated(T: int, gate: Gate, level: float) -> tuple[torch.Tensor, ...]:
    inputs = draw([T], level=level)
    q, k, g, beta = activate(inputs[0], inputs[1], *inputs[3:7], gate.lower_bound)
    return q, k, inputs[2], g, beta, inputs[7]


@cases
@both_dtypes
@pytest.mark.parametrize("steps", [[1] * 70, [8] * 8, [63, 1, 4], [0, 5, 0, 2]])
def test_steps_of_any_size_equal_the_recurrence(gate: Gate, level: float, dtype: torch.dtype, steps: list[int]) -> None:
    T = sum(steps)
    q, k, v, g, beta, state = activated(T, gate, level)
    expected, final = recur(q, k, v, g, beta, state, [T])
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    S = state[0].to(dtype)
    before = S.clone()
    u, outputs, done = v[:0], [], 0
    for n in steps:
        new = slice(done, done + n)
        o_n, u_n = tail_step(S, k[:done], u, g[:done], q[new], k[new], v[new], g[new], beta[new])
        outputs.append(o_n)
        u, done = torch.cat((u, u_n)), done + n
    assert torch.equal(S, before)
    assert relative(torch.cat(outputs), expected) <= LIMITS[dtype]
    assert relative(fold_tail(S, k, u, g), final[0]) <= LIMITS[dtype]


@both_dtypes
def test_folding_in_the_middle_changes_nothing_after_it(dtype: torch.dtype) -> None:
    T, fold = 100, 64
    q, k, v, g, beta, state = activated(T, SAFE, -3.0)
    expected, _ = recur(q, k, v, g, beta, state, [T])
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    S, nothing = state[0].to(dtype), k[:0]
    o, u = tail_step(S, nothing, v[:0], nothing, q, k, v, g, beta)
    moved = fold_tail(S, k[:fold], u[:fold], g[:fold])
    again, u_again = tail_step(moved, nothing, v[:0], nothing, q[fold:], k[fold:], v[fold:], g[fold:], beta[fold:])
    assert relative(o, expected) <= LIMITS[dtype]
    assert relative(again, expected[fold:]) <= LIMITS[dtype]
    assert relative(u_again, u[fold:]) <= LIMITS[dtype]


def test_rollback_is_forgetting() -> None:
    """Outputs after a rejected draft are those without the draft, bitwise: the ring holds nothing of it."""
    q, k, v, g, beta, state = (x.float() for x in activated(40, SAFE, -3.0))
    S, nothing = state[0], k[:0]
    _, u = tail_step(S, nothing, v[:0], nothing, q[:30], k[:30], v[:30], g[:30], beta[:30])
    _, drafted = tail_step(S, k[:30], u, g[:30], q[30:38], k[30:38], v[30:38], g[30:38], beta[30:38])
    kept = torch.cat((u, drafted[:3]))
    accepted, _ = tail_step(S, k[:33], kept, g[:33], q[38:], k[38:], v[38:], g[38:], beta[38:])
    _, plain = tail_step(S, k[:30], u, g[:30], q[30:33], k[30:33], v[30:33], g[30:33], beta[30:33])
    alone, _ = tail_step(S, k[:33], torch.cat((u, plain)), g[:33], q[38:], k[38:], v[38:], g[38:], beta[38:])
    assert torch.equal(drafted[:3], plain)
    assert torch.equal(accepted, alone)


def test_an_empty_ring_is_the_matrix_itself() -> None:
    _, k, v, g, _, state = (x.float() for x in activated(4, SAFE, 0.0))
    assert torch.equal(fold_tail(state[0], k[:0], v[:0], g[:0]), state[0])
