"""What is bitwise on CPU in fp32: causality, packing, cuts on the 64-grid, replay of a tail, repetition."""

from __future__ import annotations

import pytest
import torch
from kda_oracle import draw

from perilune import Sequences
from perilune.config import Gate
from perilune.ops.kda import chunk, kda, prepare, table

SAFE, SOFTPLUS = Gate("safe", -5.0), Gate("softplus")
both_gates = pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
dims = pytest.mark.parametrize(("H", "K", "V"), [(1, 16, 24), (3, 20, 20), (2, 32, 32)])


def fp32(lengths: list[int], H: int = 2, K: int = 16, V: int = 24) -> list[torch.Tensor]:
    return [x.float() for x in draw(lengths, H, K, V)]


def run(inputs: list[torch.Tensor], gate: Gate, sequences: Sequences, **options: object) -> tuple[torch.Tensor, ...]:
    return kda(*inputs[:7], gate, inputs[7], sequences, **options)  # type: ignore[arg-type]


def cut(inputs: list[torch.Tensor], begin: int, end: int, state: torch.Tensor) -> list[torch.Tensor]:
    return [*(x[begin:end] for x in inputs[:5]), inputs[5], inputs[6], state]


@both_gates
@pytest.mark.parametrize("t", [1, 7, 15, 16, 31, 33, 63, 64, 100, 129])
def test_later_tokens_do_not_change_earlier_outputs(gate: Gate, t: int) -> None:
    inputs = fp32([130])
    sequences = Sequences.from_lengths([130])
    before = run(inputs, gate, sequences)[0]
    for changed in range(5):
        other = [x.clone() for x in inputs]
        other[changed][t:] = other[changed][t:] * -3 + 1
        assert torch.equal(run(other, gate, sequences)[0][:t], before[:t])


@both_gates
@dims
def test_packed_equals_separate(gate: Gate, H: int, K: int, V: int) -> None:
    lengths, starts = [130, 0, 1, 64, 200, 15, 63], [0, 3, 5, 64, 100, 0, 1]
    inputs = fp32(lengths, H, K, V)
    packed = Sequences.from_lengths(lengths, starts)
    o, final = run(inputs, gate, packed)
    for n, length in enumerate(lengths):
        alone = cut(inputs, packed.offsets[n], packed.offsets[n + 1], inputs[7][n : n + 1])
        o_n, final_n = run(alone, gate, Sequences.from_lengths([length], [starts[n]]))
        assert torch.equal(o[packed.offsets[n] : packed.offsets[n + 1]], o_n)
        assert torch.equal(final[n], final_n[0])


def test_a_poisoned_document_stays_alone() -> None:
    """NaN in one document reaches neither the values nor the gradients of its neighbours."""
    lengths = [70, 15, 49]
    inputs = fp32(lengths)
    inputs[2][70:85] = float("nan")
    inputs[7][1] = float("nan")
    leaves = [x.requires_grad_() for x in inputs]
    for gate in (SAFE, SOFTPLUS):
        o, final = run(leaves, gate, Sequences.from_lengths(lengths))
        gradients = torch.autograd.grad(o.sum() + final.sum(), [leaves[i] for i in (0, 1, 2, 3, 4)])
        for x in (o, *gradients):
            assert x[:70].isfinite().all()
            assert x[85:].isfinite().all()
        assert final[[0, 2]].isfinite().all()


@both_gates
@dims
@pytest.mark.parametrize("at", [64, 128, 192])
def test_a_cut_on_the_grid_equals_no_cut(gate: Gate, H: int, K: int, V: int, at: int) -> None:
    inputs = fp32([230], H, K, V)
    o, final, states = run(inputs, gate, Sequences.from_lengths([230]), checkpoints=((at,),))
    first_o, carried = run(cut(inputs, 0, at, inputs[7]), gate, Sequences.from_lengths([at]))
    second_o, last = run(cut(inputs, at, 230, carried), gate, Sequences.from_lengths([230 - at], [at]))
    assert torch.equal(torch.cat((first_o, second_o)), o)
    assert torch.equal(states, carried)
    assert torch.equal(last, final)


@both_gates
def test_a_replayed_tail_equals_one_pass(gate: Gate) -> None:
    """Decoding in exact mode: the tokens since the boundary, activated one by one, run again with each new token."""
    inputs = fp32([150])
    o, _, states = run(inputs, gate, Sequences.from_lengths([150]), checkpoints=((64, 128),))
    rows = [prepare(*(x[t : t + 1] for x in inputs[:2]), inputs[3][t : t + 1], inputs[4][t : t + 1], *inputs[5:7], gate)
            for t in range(150)]  # fmt: skip
    for n, boundary in enumerate((64, 128)):
        for end in range(boundary + 1, min(boundary + 64, 150) + 1, 3):
            q, k, g, beta = (torch.cat(parts) for parts in zip(*rows[boundary:end], strict=True))
            tail = Sequences.from_lengths([end - boundary], [boundary])
            again, _, _ = chunk(q, k, inputs[2][boundary:end], g, beta, states[n : n + 1], tail, gate.lower_bound)
            assert torch.equal(again, o[boundary:end])


@both_gates
def test_a_cut_off_the_grid_is_close(gate: Gate) -> None:
    """The second part starts inside a chunk: a shortened first chunk, tolerance 1e-6 (rounding of one state)."""
    inputs = fp32([230])
    o, final = run(inputs, gate, Sequences.from_lengths([230]))
    for at in (1, 63, 65, 100, 229):
        first_o, carried = run(cut(inputs, 0, at, inputs[7]), gate, Sequences.from_lengths([at]))
        second_o, last = run(cut(inputs, at, 230, carried), gate, Sequences.from_lengths([230 - at], [at]))
        assert (torch.cat((first_o, second_o)) - o).norm() <= 1e-6 * o.norm()
        assert (last - final).norm() <= 1e-6 * final.norm()


@both_gates
def test_activation_does_not_depend_on_the_place(gate: Gate) -> None:
    inputs = fp32([301], 3, 20, 8)
    whole = prepare(*inputs[:2], *inputs[3:7], gate)
    for begin, end in [(0, 1), (5, 6), (7, 24), (100, 131), (3, 301)]:
        part = prepare(*(x[begin:end] for x in inputs[:2]), *(x[begin:end] for x in inputs[3:5]), *inputs[5:7], gate)
        assert all(torch.equal(x, y[begin:end]) for x, y in zip(part, whole, strict=True))


@both_gates
@pytest.mark.parametrize("elements", [1, 2**15])
def test_the_grouping_of_steps_changes_no_bit(gate: Gate, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one step and of a few, with sequences and checkpoints that end inside them."""
    lengths = [500, 64, 0, 200, 201, 450]
    sequences, marks = Sequences.from_lengths(lengths), ((448, 64), (64,), (), (), (192,), ())
    leaves = [x.requires_grad_() for x in fp32(lengths)]

    def everything() -> list[torch.Tensor]:
        outputs = run(leaves, gate, sequences, checkpoints=marks)
        rng = torch.Generator().manual_seed(1)
        loss = sum((y * torch.randn(y.shape, generator=rng)).sum() for y in outputs)
        return [*outputs, *torch.autograd.grad(loss, leaves)]  # type: ignore[arg-type]

    whole = everything()
    table.chunk_table.cache_clear()
    monkeypatch.setattr(table, "GROUP_ELEMENTS", elements)
    pieces = everything()
    table.chunk_table.cache_clear()
    assert all(torch.equal(x, y) for x, y in zip(whole, pieces, strict=True))


def test_repetition_and_untouched_inputs() -> None:
    lengths = [100, 29]
    inputs = [x.requires_grad_() for x in fp32(lengths)]
    copies = [x.detach().clone() for x in inputs]
    sequences = Sequences.from_lengths(lengths)
    results = []
    for _ in range(20):
        o, final = run(inputs, SAFE, sequences)
        results.append([o, final, *torch.autograd.grad(o.square().sum() + final.sum(), inputs)])
    assert all(torch.equal(x, y) for later in results[1:] for x, y in zip(results[0], later, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(inputs, copies, strict=True))


def test_non_contiguous_inputs() -> None:
    lengths = [100, 29]
    inputs = fp32(lengths)
    sequences = Sequences.from_lengths(lengths)
    strided = [torch.stack((x, torch.full_like(x, float("nan"))), dim=-1)[..., 0] for x in inputs]
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x for x in inputs]
    plain = [x.clone().requires_grad_() for x in inputs]
    o, final = run(plain, SAFE, sequences)
    # A gradient that is a broadcast, with stride 0 everywhere.
    gradients = torch.autograd.grad(o.sum() + final.sum(), plain)
    for variant in (strided, heads_first):
        leaves = [x.requires_grad_() for x in variant]
        other_o, other_final = run(leaves, SAFE, sequences)
        assert torch.equal(o, other_o)
        assert torch.equal(final, other_final)
        others = torch.autograd.grad(other_o.sum() + other_final.sum(), leaves)
        assert all(torch.equal(x, y) for x, y in zip(gradients[:5], others[:5], strict=True))
