"""What public KDA kernels got wrong, tried on ours: the bug reports that can apply to the chunk kernels, on a GPU.

Each test names the report. Those that need no GPU are tested where the code is: head groups (fla #624, #848), state
layouts (vLLM #41292) and refused options in test_kda_adapter; explicit gate modes (FlashKDA #3) in test_kda_api;
segment maps as a float32 chain (fla #740) and gradients across segments (fla #1115) in test_kda_segments; slots,
padding indices and rings (vLLM #51039, flashinfer #5042, sglang #37837) in test_kda_decode; halos of the convolution
(fla #774) in test_conv. Tail chunks, chunk shapes and D = 64 (fla #673, #876, cuLA #38, #41), gradients at g = -5
(attention-gym #461), NaN-poisoned neighbours and every configuration's numbers (fla #727, #984) are in test_kda_triton.
"""

import pytest
import torch
from kda_kernels import SAFE, SOFTPLUS, check, error, gpu, make, recurrence, run

from perilune.ops.kda import Raw, fold, kda_maps, reference
from perilune.ops.sequences import Sequences

pytestmark = gpu


def large(lengths, starts=None, H=2, **options):
    return make(lengths, starts, H=H, K=128, V=128, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
def test_later_gates_do_not_change_earlier_outputs(gate):
    """fla #1240, #1242: an anchor in the middle of a block."""
    inputs, sequences = large([200])
    first = run(inputs, gate, sequences)[0]
    for t in (1, 20, 40, 63, 64, 100):
        changed = inputs[3].clone()
        changed[t:] = 3.0
        again = run((*inputs[:3], changed, *inputs[4:]), gate, sequences)[0]
        assert torch.equal(again[:t], first[:t])


def test_poisoned_neighbours_and_strides():
    """fla #673, npu #242, cuDNN #1056: rows and channels around the views are NaN."""
    inputs, sequences = large([130, 1, 63], [5, 0, 64])
    plain = run(inputs, SAFE, sequences)
    for offset, step in ((0, 1), (8, 1), (3, 1), (4, 2)):
        strided = []
        for x in inputs[:4]:
            wide = torch.full((x.shape[0] + 90, 3, 300), torch.nan, dtype=x.dtype, device=x.device)
            view = wide[40 : 40 + x.shape[0], :2, offset : offset + 128 * step : step]
            view.copy_(x)
            strided.append(view)
        o, final = run((*strided, *inputs[4:]), SAFE, sequences)
        # Other strides take other kernels: the same operands, other instructions.
        assert error(o, plain[0]) < 4e-3
        assert error(final, plain[1]) < 4e-3


def test_a_fused_projection_is_read_in_place():
    """q, k, v as views of one [T, 3, H, K] tensor: the same bits as separate tensors."""
    inputs, sequences = large([130])
    fused = torch.stack(inputs[:3], dim=1)
    again = run((*fused.unbind(1), *inputs[3:]), SAFE, sequences)
    for a, b in zip(again, run(inputs, SAFE, sequences), strict=True):
        assert error(a, b) < 4e-3


def test_strong_decay_next_to_none_across_a_boundary():
    """fla #652, transformers #48455: exponents before masks at a packed boundary; gradients too."""
    inputs, sequences = large([70, 70, 40], [0, 30, 0])
    inputs[3][:70] = 20.0
    inputs[3][70:140] = -20.0
    check(inputs, sequences, SAFE, 7e-3, 1.5e-2, loose=3e-2)


@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_saturated_gates(gate, sign):
    """fla #1007: 0 * inf in the gate's gradient."""
    inputs, sequences = large([100])
    inputs[3] = torch.full_like(inputs[3], sign * 1e4)
    inputs[5] = torch.full_like(inputs[5], 10.0)
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, final = run(leaves, gate, sequences)
    (o.float().square().sum() + final.square().sum()).backward()
    exact = recurrence(*(x.cpu() for x in inputs), gate, sequences)
    assert error(o, exact[0]) < 7e-3
    assert all(x.grad.isfinite().all() for x in leaves)
    # Exactly it is 0; kernels leave the rounding of what cancels, times the gate's slope.
    assert leaves[3].grad.abs().max() < 1e-1 * leaves[2].grad.abs().max()


def test_many_fragments_fold_to_the_serial_state():
    """fla #740: the chain of maps in low precision drifts. 64 runs of one document, one of them empty."""
    lengths = [64] * 31 + [0] + [64] * 32
    starts = [sum(lengths[:n]) for n in range(64)]
    inputs, whole = large([sum(lengths)], kind="slow")
    M, B = kda_maps(*inputs[:7], SAFE, Sequences.from_lengths(lengths, starts, "cuda"))
    assert torch.equal(M[31], torch.eye(128, device="cuda").expand_as(M[31]))
    folded = fold(zip(M, B, strict=True), inputs[7][0])
    _, final, _ = recurrence(*inputs, SAFE, whole)
    assert error(folded, final[0]) < 7e-3
    assert error(run(inputs, SAFE, whole)[1][0], final[0]) < 7e-3


@pytest.mark.parametrize("T", [4096, 16384])
def test_near_collinear_keys_for_long(T):
    """FlashKDA 7afb9f4, vLLM fork 10: identical keys, slow decay, beta near 1. The state wanders, outputs do not."""
    inputs, sequences = large([T], H=1, kind="identical")
    o, final = run(inputs, SAFE, sequences)
    exact, state, _ = recurrence(*inputs, SAFE, sequences)
    assert o.isfinite().all()
    assert error(o, exact) < 3e-2
    assert error(final, state) < 1e-1


def test_a_thousand_runs_give_the_same_bits():
    """FlashKDA #25, fla #984: races that show now and then."""
    inputs, sequences = large([300, 65, 1000], [0, 10, 0], H=8)
    first = run(inputs, SAFE, sequences)
    for _ in range(1000):
        o, final = run(inputs, SAFE, sequences)
        assert torch.equal(o, first[0])
        assert torch.equal(final, first[1])


def test_four_thousand_sequences():
    """FlashKDA #13, vLLM #50649: many short sequences, lengths 0 and 1 among them."""
    lengths = [(7 * n) % 6 for n in range(4096)]
    inputs, sequences = large(lengths, H=1)
    o, final = run(inputs, SAFE, sequences)
    o_exact, final_exact = reference.kda(Raw(*(x.float() for x in inputs[:7])), SAFE, inputs[7], sequences)
    assert error(o, o_exact) < 7e-3
    assert error(final, final_exact) < 7e-3
    empty = torch.tensor([n for n in range(4096) if lengths[n] == 0], device="cuda")
    assert torch.equal(final[empty], inputs[7][empty])


@pytest.mark.parametrize("t", [1, 63, 65, 100])
def test_cuts_off_the_grid(t):
    """vLLM #41292, maxtext #5128: prefill cut at any token, the chunk grid regained."""
    inputs, whole = large([200])
    *x, A_log, dt_bias, initial = inputs
    o, final = run(inputs, SAFE, whole)
    state, pieces = initial, []
    for a, b in ((0, t), (t, 200)):
        part = Sequences.from_lengths([b - a], [a], "cuda")
        piece, state = run((*(y[a:b] for y in x), A_log, dt_bias, state), SAFE, part)
        pieces.append(piece)
    assert error(torch.cat(pieces), o) < 7e-3
    assert error(state, final) < 7e-3


def test_views_beyond_two_to_the_31():
    """fla #964: offsets in 32 bits."""
    inputs, sequences = large([130], H=1)
    wide = torch.empty(130, 1, 1 << 24, dtype=torch.bfloat16, device="cuda")
    for i in range(4):
        view = wide[:, :, 128 * i : 128 * (i + 1)]
        view.copy_(inputs[i])
        inputs[i] = view
    o, final = run(inputs, SAFE, sequences)
    again = run([x.contiguous() for x in inputs], SAFE, sequences)
    # Another K2 runs where the tensor memory accelerator cannot read v.
    assert error(o, again[0]) < 4e-3
    assert error(final, again[1]) < 4e-3


def test_inputs_are_left_as_they_were():
    """GLM #4, miles #2790."""
    inputs, sequences = large([130])
    copies = [x.clone() for x in inputs]
    leaves = [x.requires_grad_() for x in inputs]
    o, final = run(leaves, SAFE, sequences)
    (o.float().sum() + final.sum()).backward()
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_a_packed_batch_and_its_sequences_alone_give_the_same_bits():
    inputs, sequences = large([300, 0, 65, 1000, 1], [0, 3, 10, 64, 63], H=3)
    *x, A_log, dt_bias, initial = inputs
    o, final = run(inputs, SAFE, sequences)
    for n in range(sequences.count):
        a, b = sequences.offsets[n : n + 2]
        one = Sequences.from_lengths([b - a], [sequences.starts[n]], "cuda")
        o_n, final_n = run((*(y[a:b] for y in x), A_log, dt_bias, initial[n : n + 1]), SAFE, one)
        assert torch.equal(o_n, o[a:b])
        assert torch.equal(final_n[0], final[n])


@pytest.mark.parametrize("save", ["inputs", "all"])
def test_segmented_scan_cut_on_tiles_gives_the_same_bits(save):
    inputs, whole = large([4000, 100], [500, 0], kind="slow")
    *x, A_log, dt_bias, initial = inputs
    o, final, states = run(inputs, SAFE, whole, checkpoints=((2048, 2112), ()), scan="segmented", save=save)
    state, pieces = initial[:1], []
    for a, b in ((0, 1548), (1548, 4000)):
        part = Sequences.from_lengths([b - a], [500 + a], "cuda")
        piece, state = run((*(y[a:b] for y in x), A_log, dt_bias, state), SAFE, part, scan="segmented")
        if b == 1548:
            assert torch.equal(state[0], states[0])
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces), o[:4000])
    assert torch.equal(state[0], final[0])
    serial = run(inputs, SAFE, whole, checkpoints=((2048, 2112), ()))
    # Same operands, another order of bfloat16 roundings.
    assert all(error(a, b) < 7e-3 for a, b in zip((o, final, states), serial, strict=True))
