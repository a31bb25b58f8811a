"""Segment maps: the affine algebra of runs of tokens, and the scan over 1024-token tiles that is built on it."""

from __future__ import annotations

import pytest
import torch
from kda_oracle import activate, draw, kda_oracle, recur, relative, values_and_gradients

from perilune import Sequences
from perilune.config import Gate
from perilune.ops.kda import compose, fold, kda, segment_maps

SAFE, SOFTPLUS = Gate("safe", -5.0), Gate("softplus")
both_gates = pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
# Tolerances as for the chunk form: fp64 1e-12, fp32 2e-5 for states.


def activated(lengths: list[int], gate: Gate, **options: int) -> tuple[torch.Tensor, ...]:
    inputs = draw(lengths, level=-4.0, **options)
    q, k, g, beta = activate(inputs[0], inputs[1], *inputs[3:7], gate.lower_bound)
    return q, k, inputs[2], g, beta, inputs[7]


@both_gates
def test_a_map_is_what_the_recurrence_does_to_any_state(gate: Gate) -> None:
    lengths = [130, 0, 1, 64]
    q, k, v, g, beta, state = activated(lengths, gate)
    expected = recur(q, k, v, g, beta, state, lengths)[1]
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        cut = Sequences.from_lengths(lengths, [5, 0, 63, 0])
        M, B = segment_maps(*(x.to(dtype) for x in (k, v, g, beta)), cut, gate.lower_bound)
        assert relative(M.double() @ state + B.double(), expected) <= limit
    assert torch.equal(M[1], torch.eye(16).expand(2, 16, 16))
    assert not B[1].any()
    assert torch.linalg.matrix_norm(M, 2).max() <= 1 + 1e-5


@both_gates
def test_64_fragments_fold_to_the_serial_state(gate: Gate) -> None:
    """The chain of products must not drift: fp32 against the float64 recurrence after 64 maps."""
    lengths = [20] * 64
    q, k, v, g, beta, _ = activated([sum(lengths)], gate)
    state = torch.ones(1, 2, 16, 24, dtype=torch.float64)
    expected = recur(q, k, v, g, beta, state, [sum(lengths)])[1][0]
    M, B = segment_maps(*(x.float() for x in (k, v, g, beta)), Sequences.from_lengths(lengths), gate.lower_bound)
    maps = list(zip(M, B, strict=True))
    assert relative(fold(maps, state[0].float()), expected) <= 2e-5
    one = maps[0]
    for later in maps[1:]:
        one = compose(later, one)
    assert relative(one[0].double() @ state[0] + one[1].double(), expected) <= 2e-5


def test_composition_is_associative() -> None:
    _, k, v, g, beta, _ = activated([30, 40, 50], SAFE)
    M, B = segment_maps(k, v, g, beta, Sequences.from_lengths([30, 40, 50]), -5.0)
    a, b, c = zip(M, B, strict=True)
    left, right = compose(compose(c, b), a), compose(c, compose(b, a))
    assert all(relative(x, y) <= 1e-14 for x, y in zip(left, right, strict=True))


@both_gates
def test_gradients_flow_through_maps_as_through_the_recurrence(gate: Gate) -> None:
    lengths = [70, 33]
    _, k, v, g, beta, state = activated([103], gate)

    def mapped(x: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        M, B = segment_maps(*x[:4], Sequences.from_lengths(lengths, [0, 70]), gate.lower_bound)
        return (fold(list(zip(M, B, strict=True)), x[4][0]),)

    def serial(x: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (recur(x[0], *x[:4], x[4], [103])[1][0],)

    inputs = [k, v, g, beta, state]
    _, gradients = values_and_gradients(mapped, inputs, torch.float64)
    _, slopes = values_and_gradients(serial, inputs, torch.float64)
    assert max(relative(*pair) for pair in zip(gradients, slopes, strict=True)) <= 1e-12


def run(inputs: list[torch.Tensor], gate: Gate, sequences: Sequences, **options: object) -> tuple[torch.Tensor, ...]:
    return kda(*inputs[:7], gate, inputs[7], sequences, scan="segmented", **options)  # type: ignore[arg-type]


def test_the_segmented_scan_equals_the_recurrence() -> None:
    lengths, starts = [1100, 0, 30, 1024, 100], [1000, 5, 1010, 0, 0]
    inputs = draw(lengths, H=1, K=8, V=8, level=-8.0)
    sequences = Sequences.from_lengths(lengths, starts)
    values, gradients = values_and_gradients(lambda x: run(x, SAFE, sequences), inputs, torch.float64)
    expected, slopes = values_and_gradients(lambda x: kda_oracle(x, -5.0, lengths), inputs, torch.float64)
    assert max(relative(*pair) for pair in zip(values, expected, strict=True)) <= 1e-12
    assert max(relative(*pair) for pair in zip(gradients, slopes, strict=True)) <= 1e-11
    o, final = run([x.float() for x in inputs], SAFE, sequences)
    assert relative(o, expected[0]) <= 2e-5
    assert relative(final, expected[1]) <= 2e-5


@both_gates
@pytest.mark.parametrize("cuts", [(1024,), (2048,), (1024, 2048, 3072)])
def test_cuts_between_tiles_change_no_bit(gate: Gate, cuts: tuple[int, ...]) -> None:
    T = 3300
    inputs = [x.float() for x in draw([T], level=-8.0)]
    marks = ((64, 1024, 1088, 3072),)
    o, final, states = run(inputs, gate, Sequences.from_lengths([T]), checkpoints=marks)
    outputs, kept, state = [], [], inputs[7]
    for begin, end in zip((0, *cuts), (*cuts, T), strict=True):
        part = [*(x[begin:end] for x in inputs[:5]), *inputs[5:7], state]
        here = (tuple(p for p in marks[0] if begin < p <= end),)
        part_o, state, part_states = run(part, gate, Sequences.from_lengths([end - begin], [begin]), checkpoints=here)
        outputs.append(part_o)
        kept.append(part_states)
    assert torch.equal(torch.cat(outputs), o)
    assert torch.equal(torch.cat(kept), states)
    assert torch.equal(state, final)


def test_the_segmented_scan_does_not_see_the_rest_of_the_batch() -> None:
    lengths = [1500, 40, 2048]
    inputs = [x.float() for x in draw(lengths, level=-8.0)]
    sequences = Sequences.from_lengths(lengths)
    o, final = run(inputs, SAFE, sequences)
    for n, (begin, end) in enumerate(zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)):
        part = [*(x[begin:end] for x in inputs[:5]), *inputs[5:7], inputs[7][n : n + 1]]
        o_n, final_n = run(part, SAFE, Sequences.from_lengths([lengths[n]]))
        assert torch.equal(o[begin:end], o_n)
        assert torch.equal(final[n], final_n[0])
