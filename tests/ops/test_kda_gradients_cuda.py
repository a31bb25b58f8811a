"""gradients.cu on the CPU (see warp_on_cpu.h) against the float64 recurrence.

Inputs and what K1 and the scans leave are rounded to bfloat16, as on the GPU; the rest follows in float32. Relative
Frobenius 1e-2 (found: 3e-3), 3e-2 where (I + L)^-1 amplifies rounding; d A_log as `kda_steep.compare` says.
"""

import ctypes
from dataclasses import replace

import pytest
import torch
from kda_kernels import SAFE, SOFTPLUS, interpreted, make, recurrence
from kda_steep import KINDS, compare, softplus_inputs
from warp_on_cpu import build, needs_compiler

from perilune.ops.kda import gradients_cuda
from perilune.ops.kda.triton_backward import entry_states, reverse_scan
from perilune.ops.kda.triton_forward import Inputs, prepare
from perilune.ops.kda.triton_layout import layout

HEADS, STRIDE = 2, 3 * 256
pytestmark = [interpreted, needs_compiler]


@pytest.fixture(scope="module")
def libraries():
    """The kernel of each gate for two heads, and tokens of q, k and g three times as far apart as packed ones."""
    defines = {"BETA": "float", "HEADS": HEADS, **dict.fromkeys(("Q_TOKEN", "K_TOKEN", "G_TOKEN"), STRIDE)}
    return {g.mode: build(gradients_cuda.sources(g.mode), "gradients", defines) for g in (SAFE, SOFTPLUS)}


def spread(x):
    """x with other tensors between its tokens, NaN like the tokens around it."""
    wide = torch.full((len(x) + 2, 6, 128), torch.nan, dtype=torch.bfloat16)
    wide[1:-1, 2:4] = x
    return wide[1:-1, 2:4]


def gradients(libraries, inputs, sequences, gate, wild=None):
    """dq, dk, dv, dg, d beta, d A_log and d dt_bias of the kernel; the gradients of outputs and final states.

    wild: raw gates and A_log in the place of those that K1 and the scans had.
    """
    *tensors, initial = inputs
    random = torch.Generator().manual_seed(5)
    d_o = torch.randn(inputs[2].shape, generator=random).bfloat16()
    d_final = 0.1 * torch.randn(initial.shape, generator=random)

    x = Inputs(*tensors, gate, layout(sequences, d_o.device))
    p = prepare(x)
    p = replace(p, **{name: getattr(p, name).bfloat16().float() for name in ("w", "q", "k", "A", "P")})
    S, U = entry_states(x, p, initial)
    _, dS, dU = reverse_scan(x, p, d_o.float(), d_final, None, None)
    q, k, v, g, *rest = tensors
    if wild is not None:
        g, rest[1] = wild
    low = Inputs(spread(q), spread(k), v.bfloat16(), spread(g), *rest, gate, x.layout)
    A, S, U, dS, dU = (y.bfloat16() for y in (p.A, S, U, dS, dU))
    arguments, outputs = gradients_cuda.arguments(low, A, p.norms, S, U, dS, dU, d_o)
    for y in outputs:
        y.fill_(torch.nan)
    library = libraries[gate.mode]
    assert library.shared_bytes() == gradients_cuda.SHARED_BYTES
    library.run(2, ctypes.byref(arguments))
    return (*outputs[:5], outputs[5].sum((0, 2)), outputs[6].sum(0)), d_o, d_final


def check(libraries, inputs, sequences, gate, **bounds):
    """Every gradient against autograd of the recurrence in float64."""
    found, d_o, d_final = gradients(libraries, inputs, sequences, gate)
    exact = [y.double().requires_grad_() for y in inputs]
    o, final, _ = recurrence(*exact, gate, sequences)
    ((o * d_o.double()).sum() + (final * d_final.double()).sum()).backward()
    compare(found, exact, gate, bounds)


@pytest.mark.parametrize(
    ("kind", "lengths", "starts"),
    [
        ("random", [130], [0]),
        ("strong", [1, 0, 66, 15], [0, 7, 100, 64]),
        ("slow", [65], [0]),
        ("identical", [66], [0]),
    ],
)
def test_gradients(libraries, kind, lengths, starts):
    inputs, sequences = make(lengths, starts, H=HEADS, K=128, V=128, kind=kind)
    for x in inputs[:4]:
        x.copy_(x.bfloat16())
    check(libraries, inputs, sequences, SAFE, **({"v": 3e-2, "beta": 3e-2} if kind == "identical" else {}))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "similar"])
def test_softplus(libraries, kind):
    """Steep warps beside others, in documents that fill no chunk."""
    inputs, sequences = softplus_inputs(kind, [1, 0, 66, 15], [0, 7, 100, 64], H=HEADS, K=128, V=128)
    check(libraries, inputs, sequences, SOFTPLUS)


@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
def test_saturated_gates(libraries, gate):
    """Raw gates of +-10^4 times e^10: nothing but finite numbers."""
    inputs, sequences = make([66], H=HEADS, K=128, V=128)
    inputs[3] = torch.where(inputs[3] > 0, 1e4, -1e4)
    inputs[5] = torch.full_like(inputs[5], 10.0)
    found = gradients(libraries, inputs, sequences, gate)[0]
    assert all(torch.isfinite(x.float()).all() for x in found)


def test_softplus_of_what_is_no_number_of_use(libraries):
    """Infinite raw gates and rates: a decay of 0 or 1, whose gradient is 0."""
    inputs, sequences = make([66], H=HEADS, K=128, V=128)
    g, A_log = inputs[3].clone(), inputs[5].clone()
    A_log[1] = 95.0
    g[::7], g[1::7], g[2::7] = torch.inf, -torch.inf, torch.finfo(torch.bfloat16).max
    found = gradients(libraries, inputs, sequences, SOFTPLUS, (g, A_log))[0]
    assert all(torch.isfinite(x.float()).all() for x in found)
    assert not any(found[3][i::7].any() for i in range(3))


def test_a_gate_that_is_no_number_stays_one(libraries):
    """It hides in none of its own gradients, and shows in no document that it has nothing to do with."""
    inputs, sequences = make([2, 1, 3], [0, 5, 64], H=HEADS, K=128, V=128)
    for x in inputs[:4]:
        x.copy_(x.bfloat16())
    inputs[3][2, 1, 17] = torch.nan
    found = gradients(libraries, inputs, sequences, SOFTPLUS)[0]
    assert found[3][2, 1, 17].isnan()
    assert found[6][1, 17].isnan()
    for x in found[:5]:
        assert torch.isfinite(x[:2].float()).all()
        assert torch.isfinite(x[3:].float()).all()
