"""The chunk form of KDA against the token-by-token recurrence of kda_oracle, in fp32 and fp64.

Tolerances are relative Frobenius errors: fp64 1e-12 (it is the same algebra); fp32 5e-6 for o and S and 5e-5 for
gradients: ten times what was seen in each, the largest being dA_log, a sum over all tokens.
"""

from __future__ import annotations

import pytest
import torch
from kda_oracle import NAMES, draw, kda_oracle, relative, values_and_gradients

from perilune import Sequences
from perilune.config import Gate
from perilune.ops.kda import chunk, kda, prepare, recurrence

SAFE, SOFTPLUS = Gate("safe", -5.0), Gate("softplus")
LIMITS = {torch.float64: (1e-12, 1e-12), torch.float32: (5e-6, 5e-5)}
both_gates = pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])


def run(inputs: list[torch.Tensor], gate: Gate, sequences: Sequences, **options: object) -> tuple[torch.Tensor, ...]:
    return kda(*inputs[:7], gate, inputs[7], sequences, **options)  # type: ignore[arg-type]


def compare(
    inputs: list[torch.Tensor],
    gate: Gate,
    lengths: list[int],
    dtype: torch.dtype,
    starts: list[int] | None = None,
    scale: float = 1.0,
    skip: tuple[str, ...] = (),
) -> None:
    """Outputs and all gradients of `kda` against the oracle."""
    # The oracle sees the same rounded inputs, so that only the arithmetic differs.
    inputs = [x.to(dtype).double() for x in inputs]
    sequences = Sequences.from_lengths(lengths, starts)
    values, gradients = values_and_gradients(lambda x: run(x, gate, sequences), inputs, dtype, scale)
    expected, slopes = values_and_gradients(
        lambda x: kda_oracle(x, gate.lower_bound, lengths), inputs, torch.float64, scale
    )
    limit, slope_limit = LIMITS[dtype]
    for name, y, reference in zip(("o", "S"), values, expected, strict=True):
        assert relative(y, reference) <= limit, name
    for name, y, reference in zip(NAMES, gradients, slopes, strict=True):
        assert y.isfinite().all(), name
        if name not in skip:
            assert relative(y, reference) <= slope_limit, name


@both_gates
@both_dtypes
@pytest.mark.parametrize("level", [0.0, 4.0, -9.0], ids=["mixed", "strong", "slow"])
def test_values_and_gradients(gate: Gate, dtype: torch.dtype, level: float) -> None:
    lengths = [130, 1, 64, 0, 79, 15]
    compare(draw(lengths, level=level), gate, lengths, dtype)


@both_gates
@both_dtypes
def test_every_length_from_0_to_130(gate: Gate, dtype: torch.dtype) -> None:
    lengths = list(range(131))
    compare(draw(lengths, H=1, K=8, V=8), gate, lengths, dtype)


@both_gates
@both_dtypes
def test_starts_off_the_grid_with_a_state(gate: Gate, dtype: torch.dtype) -> None:
    lengths, starts = [130, 1, 63, 0, 5, 64], [1, 63, 65, 100, 62, 1000]
    compare(draw(lengths), gate, lengths, dtype, starts)


@pytest.mark.parametrize(("K", "V"), [(96, 32), (100, 7), (192, 16), (1, 1), (33, 130)])
@both_gates
def test_dims_that_are_no_power_of_two(gate: Gate, K: int, V: int) -> None:
    lengths = [70, 3]
    compare(draw(lengths, H=1, K=K, V=V), gate, lengths, torch.float32)


@both_dtypes
def test_all_gates_at_the_bound(dtype: torch.dtype) -> None:
    """g = -5 in every row: 64 rows span 320 nats. dg is a difference of near-equal terms if P's diagonal enters it."""
    lengths = [130]
    inputs = draw(lengths)
    q, k, v, state = inputs[0], inputs[1], inputs[2], inputs[7]
    g, beta = torch.full_like(q, -5.0), torch.sigmoid(inputs[4])
    activated = [q / 4, torch.nn.functional.normalize(k, dim=-1), v, g, beta, state]
    sequences = Sequences.from_lengths(lengths)
    values, gradients = values_and_gradients(lambda x: chunk(*x, sequences, -5.0)[:2], activated, dtype)
    expected, slopes = values_and_gradients(lambda x: recurrence(*x, sequences), activated, torch.float64)
    limit, slope_limit = LIMITS[dtype]
    assert max(relative(*pair) for pair in zip(values, expected, strict=True)) <= limit
    assert max(relative(*pair) for pair in zip(gradients, slopes, strict=True)) <= slope_limit


def test_the_float64_oracle_of_the_package_is_the_recurrence() -> None:
    lengths = [9, 0, 20]
    inputs = draw(lengths)
    sequences = Sequences.from_lengths(lengths)
    for gate in (SAFE, SOFTPLUS):
        q, k, g, beta = prepare(inputs[0], inputs[1], *inputs[3:7], gate)
        o, final = recurrence(q, k, inputs[2], g, beta, inputs[7], sequences)
        expected_o, expected_final = kda_oracle(inputs, gate.lower_bound, lengths)
        assert relative(o, expected_o) <= 1e-14
        assert relative(final, expected_final) <= 1e-14


@both_gates
def test_no_initial_state_is_a_zero_state(gate: Gate) -> None:
    lengths = [70, 0, 5]
    inputs = [x.float() for x in draw(lengths)]
    sequences = Sequences.from_lengths(lengths)
    absent = kda(*inputs[:7], gate, None, sequences)
    zeros = run([*inputs[:7], torch.zeros_like(inputs[7])], gate, sequences)
    assert all(torch.equal(x, y) for x, y in zip(absent, zeros, strict=True))


@both_gates
def test_identical_keys(gate: Gate) -> None:
    """The triangular system is at its worst: every key the same, beta near 1, almost no decay."""
    lengths = [200]
    inputs = draw(lengths, level=-12.0)
    inputs[1] = inputs[1][:1].expand_as(inputs[1]).contiguous()
    inputs[4].fill_(8.0)
    compare(inputs, gate, lengths, torch.float32)


def test_a_long_document_of_identical_keys_stays_finite_and_right() -> None:
    """16,384 tokens; against the same form in fp64, which the other tests tie to the recurrence."""
    lengths = [16384]
    inputs = draw(lengths, H=1, K=16, V=16, level=-12.0)
    inputs[1] = inputs[1][:1].expand_as(inputs[1]).contiguous()
    inputs[4].fill_(8.0)
    sequences = Sequences.from_lengths(lengths)
    o, final = run([x.float() for x in inputs], SAFE, sequences)
    exact_o, exact_final = run([x.float().double() for x in inputs], SAFE, sequences)
    assert relative(o, exact_o) <= 2e-5
    assert relative(final, exact_final) <= 2e-5


@both_dtypes
def test_strong_next_to_slow_gates_across_a_document_boundary(dtype: torch.dtype) -> None:
    """A running sum over the packed axis would jump by hundreds of nats between the documents."""
    lengths = [70, 70, 70]
    inputs = draw(lengths)
    inputs[3][:70], inputs[3][70:140], inputs[3][140:] = 40.0, -40.0, 40.0
    # The gates are saturated by a raw value of 40, so its own slope is rounding noise around 1e-17.
    compare(inputs, SAFE, lengths, dtype, skip=("g_raw", "A_log", "dt_bias"))


@both_dtypes
def test_softplus_gates_that_wipe_the_state(dtype: torch.dtype) -> None:
    """Rows of e^-3000 between rows of almost no decay, inside one chunk."""
    lengths = [100]
    inputs = draw(lengths, level=-6.0)
    inputs[3][10::17] = 3000.0
    # dA_log = sum dg g multiplies the rounding of a dg that is 0 there by a g of -3000.
    compare(inputs, SOFTPLUS, lengths, dtype, skip=("A_log",))


@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
@pytest.mark.parametrize("A_log", [10.0, 100.0, -100.0])
@both_dtypes
def test_saturated_gates_have_finite_gradients(gate: Gate, A_log: float, dtype: torch.dtype) -> None:
    lengths = [40]
    inputs = draw(lengths)
    inputs[3] = torch.where(inputs[3] > 0, 1e4, -1e4)
    inputs[5].fill_(A_log)
    sequences = Sequences.from_lengths(lengths)
    values, gradients = values_and_gradients(lambda x: run(x, gate, sequences), inputs, dtype)
    assert all(x.isfinite().all() for x in [*values, *gradients])


def test_write_strengths_at_the_ends() -> None:
    """beta of exactly 0 (logit -800) and of exactly 1 (logit 40): no division by zero, no lost 1 - beta."""
    lengths = [80]
    inputs = draw(lengths)
    inputs[4][::3], inputs[4][1::3] = -800.0, 40.0
    compare(inputs, SAFE, lengths, torch.float64)
    compare(inputs, SAFE, lengths, torch.float32)


@both_gates
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_tiny_and_huge_gradients_keep_their_digits(gate: Gate, scale: float) -> None:
    """Anchors of e^-80 in the backward would push small gradients into the subnormal range."""
    lengths = [130]
    compare(draw(lengths, level=-6.0), gate, lengths, torch.float32, scale=scale)


def test_gradients_agree_with_finite_differences() -> None:
    lengths = [2, 0, 2]
    inputs = [x.requires_grad_() for x in draw(lengths, H=1, K=2, V=2)]
    sequences = Sequences.from_lengths(lengths, [63, 5, 0])
    for gate in (SAFE, SOFTPLUS):
        assert torch.autograd.gradcheck(lambda *x, gate=gate: run(list(x), gate, sequences), inputs)


@both_gates
def test_checkpoints_are_the_states_of_shorter_passes_and_carry_gradients(gate: Gate) -> None:
    lengths, starts = [200, 40, 0, 64], [10, 0, 3, 64]
    inputs = draw(lengths)
    marks = ((128, 64, 192), (), (), (128,))
    sequences = Sequences.from_lengths(lengths, starts)

    def read(x: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (run(x, gate, sequences, checkpoints=marks)[2],)

    def prefix(x: list[torch.Tensor], n: int, p: int) -> torch.Tensor:
        begin, length = sequences.offsets[n], p - starts[n]
        part = [y[begin : begin + length] for y in x[:5]]
        return kda_oracle([*part, x[5], x[6], x[7][n : n + 1]], gate.lower_bound, [length])[1][0]

    values, gradients = values_and_gradients(read, inputs, torch.float64)
    wanted = [(n, p) for n, positions in enumerate(marks) for p in positions]
    expected, slopes = values_and_gradients(
        lambda x: (torch.stack([prefix(x, n, p) for n, p in wanted]),), inputs, torch.float64
    )
    assert relative(values[0], expected[0]) <= 1e-12
    for name, y, reference in zip(NAMES, gradients, slopes, strict=True):
        assert relative(y, reference) <= 1e-12 or reference.norm() == 0 == y.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_fp32(dtype: torch.dtype) -> None:
    lengths = [70, 3]
    inputs = [x.float() for x in draw(lengths)]
    low = [x.to(dtype) for x in inputs[:5]] + inputs[5:]
    sequences = Sequences.from_lengths(lengths)
    o, final = run(low, SAFE, sequences)
    wide_o, wide_final = run([x.float() for x in low], SAFE, sequences)
    assert o.dtype == dtype
    assert final.dtype == torch.float32
    assert torch.equal(o, wide_o.to(dtype))
    assert torch.equal(final, wide_final)
