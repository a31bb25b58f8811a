"""KDA's Triton kernels against an independent float64 recurrence, in Triton's interpreter and on a GPU.

In the interpreter the kernels run in float32 without rounding of matrix operands, so the bound there (2e-5 forward,
5e-5 gradients, relative Frobenius) checks the mathematics. On the GPU operands are bfloat16 (7e-3 forward, gradients
1e-2, similar keys 3e-2 in dv and dbeta, where (I + L)^-1 amplifies rounding).
"""

import pytest
import torch
from kda_kernels import NAMES, SAFE, SOFTPLUS, check, error, gpu, interpreted, kernels, make, recurrence, run

from perilune.ops.kda import Raw
from perilune.ops.kda.triton_forward import forward
from perilune.ops.sequences import Sequences


@interpreted
@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
def test_one_sequence(gate):
    check(*make([70]), gate, 2e-5, 5e-5)


@interpreted
def test_lengths_zero_and_one_and_starts_off_the_grid():
    check(*make([1, 0, 66, 3], [0, 7, 100, 64], K=16), SAFE, 2e-5, 5e-5)


@interpreted
@pytest.mark.parametrize("kind", ["strong", "identical"])
def test_hard_inputs(kind):
    check(*make([66], kind=kind), SAFE, 2e-5, 1e-4, save="all")


@interpreted
def test_later_gates_do_not_change_earlier_outputs():
    (q, k, v, g, beta, A_log, dt_bias, initial), sequences = make([70], K=16)
    first = run((q, k, v, g, beta, A_log, dt_bias, initial), SAFE, sequences)[0]
    for t in (20, 40, 65):
        changed = g.clone()
        changed[t:] = 3.0
        again = run((q, k, v, changed, beta, A_log, dt_bias, initial), SAFE, sequences)[0]
        assert torch.equal(again[:t], first[:t])


@interpreted
def test_cut_on_the_grid_and_packing_give_the_same_bits():
    (q, k, v, g, beta, A_log, dt_bias, initial), whole = make([130], K=16)
    o, final, states = run((q, k, v, g, beta, A_log, dt_bias, initial), SAFE, whole, checkpoints=((64, 128),))
    state, pieces = initial, []
    for a, b in ((0, 64), (64, 130)):
        part = Sequences.from_lengths([b - a], [a])
        x = (y[a:b] for y in (q, k, v, g, beta))
        piece, state = run((*x, A_log, dt_bias, state), SAFE, part)
        pieces.append(piece)
        if b == 64:
            assert torch.equal(state[0], states[0])
    assert torch.equal(torch.cat(pieces), o)
    assert torch.equal(state, final)
    twice = [torch.cat((y[:10], y)) for y in (q, k, v, g, beta)]
    packed = run((*twice, A_log, dt_bias, torch.cat((initial, initial))), SAFE, Sequences.from_lengths([10, 130]))
    assert torch.equal(packed[0][10:], o)
    assert torch.equal(packed[1][1], final[0])


@interpreted
def test_non_contiguous_inputs_and_poisoned_neighbours():
    inputs, sequences = make([65], H=2, K=16, V=16)
    plain = run(inputs, SAFE, sequences)
    wide = torch.full((70, 2, 40), torch.nan)
    strided = []
    for x in inputs[:4]:
        y = wide.clone()
        y[3:68, :, 4:36:2] = x
        strided.append(y[3:68, :, 4:36:2])
    again = run((*strided, *inputs[4:]), SAFE, sequences)
    assert torch.equal(again[0], plain[0])
    assert torch.equal(again[1], plain[1])


@interpreted
@pytest.mark.parametrize("hold", [False, True])
def test_pieces_give_the_same_bits(hold):
    """K1 and K2 by turns on pieces of the batch: cuts inside a sequence, at its ends, and over empty ones."""
    lengths, starts = [0, 130, 0, 70, 3, 200], [0, 10, 5, 0, 64, 0]
    inputs, sequences = make(lengths, starts, K=16, V=16)
    marks = ((), (128,), (), (64,), (), (64, 192))
    cut = (lengths, starts)
    x = kernels.inputs(Raw(*inputs[:7]), SAFE, sequences)
    slots, count = kernels.checkpoint_slots(*(tuple(y) for y in cut), marks, inputs[0].device)
    _, whole = forward(x, inputs[7], slots, count, keep=True)
    for size in (64, 128, 192):
        _, again = forward(x, inputs[7], slots, count, keep=True, hold=hold, size=size)
        for name in ("o", "final", "states", "S", "U"):
            assert torch.equal(getattr(again, name), getattr(whole, name)), name


@interpreted
@pytest.mark.parametrize("save", ["inputs", "all"])
def test_segmented_scan(save):
    """A tile's end inside, an empty sequence, gradients; tiles are 1024 tokens from the document's start."""
    check(*make([66, 0, 3], [1000, 7, 0], K=16, V=16), SAFE, 2e-5, 5e-5, scan="segmented", save=save)


@interpreted
def test_segmented_scan_cut_on_a_tile_gives_the_same_bits():
    (*x, A_log, dt_bias, initial), whole = make([130], [960], K=16, V=16)
    marks = ((1024, 1088),)
    inputs = (*x, A_log, dt_bias, initial)
    o, final, states = run(inputs, SAFE, whole, checkpoints=marks, scan="segmented")
    _, final_exact, at = recurrence(*inputs, SAFE, whole, at=marks[0])
    assert error(final, final_exact) < 2e-5
    assert all(error(a, b) < 2e-5 for a, b in zip(states, at, strict=True))
    head = (*(y[:64] for y in x), A_log, dt_bias, initial)
    head = run(head, SAFE, Sequences.from_lengths([64], [960]), scan="segmented")
    assert torch.equal(head[1][0], states[0])
    rest = (*(y[64:] for y in x), A_log, dt_bias, head[1])
    tail = run(rest, SAFE, Sequences.from_lengths([66], [1024]), checkpoints=((1088,),), scan="segmented")
    assert torch.equal(torch.cat((head[0], tail[0])), o)
    assert torch.equal(tail[1], final)
    assert torch.equal(tail[2][0], states[1])


@interpreted
def test_maps_of_segments_from_raw_inputs():
    """M S + B is the final state for any S, fold of two runs included; gradients as through the recurrence."""
    inputs, sequences = make([70, 0, 1], K=16, V=16)
    *raw, initial = inputs
    M, B = kernels.kda_maps(Raw(*raw), SAFE, sequences)
    assert torch.equal(M[1], torch.eye(16).expand_as(M[1]))
    assert not B[1].any()
    _, final, _ = recurrence(*inputs, SAFE, sequences)
    assert error(M @ initial + B, final) < 2e-5
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    M_taped, B_taped = kernels.kda_maps(Raw(*ours[:7]), SAFE, sequences)
    assert torch.equal(M_taped, M)
    assert torch.equal(B_taped, B)
    (M_taped @ ours[7] + B_taped).square().sum().backward()
    recurrence(*exact, SAFE, sequences)[1].square().sum().backward()
    for name, a, b in zip(NAMES[1:], ours[1:], exact[1:], strict=True):
        assert error(a.grad, b.grad) < 5e-5, name


KINDS = ("random", "slow", "middle", "strong", "similar", "identical")


@gpu
@pytest.mark.parametrize("save", ["inputs", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_gradients(kind, save):
    inputs, sequences = make(
        [70, 0, 1, 129, 63], [0, 0, 5, 100, 64], H=3, K=128, V=128, kind=kind, dtype=torch.bfloat16
    )
    assert kernels.prepare_name(*inputs[:2], inputs[3]) == kernels.scan_name(inputs[2], 128) == "hopper"
    check(inputs, sequences, SAFE, 7e-3, 1e-2, loose=3e-2, save=save)


@gpu
@pytest.mark.parametrize("K", [64, 128])
def test_gpu_plain_triton(K):
    inputs, sequences = make([70, 1, 129], H=2, K=K, V=64, dtype=torch.bfloat16)
    # dt_bias: a sum over tokens of what this kernel rounds to bfloat16 on the way.
    check(inputs, sequences, SOFTPLUS, 7e-3, 1e-2, loose=3e-2, sums=5e-2)


@gpu
@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 127, 1000, 8192])
def test_gpu_lengths(T):
    inputs, sequences = make([T], H=5, K=128, V=128, dtype=torch.bfloat16)
    o, final = run(inputs, SAFE, sequences)
    o_exact, final_exact, _ = recurrence(*inputs, SAFE, sequences)
    assert error(o, o_exact) < 7e-3
    assert error(final, final_exact) < 7e-3


@gpu
def test_gpu_same_bits_cut_packed_repeated_and_replayed():
    inputs, whole = make([1000], H=3, K=128, V=128, dtype=torch.bfloat16)
    *x, A_log, dt_bias, initial = inputs
    o, final = run(inputs, SAFE, whole)
    state, pieces = initial, []
    for a, b in ((0, 192), (192, 1000)):
        part = Sequences.from_lengths([b - a], [a], "cuda")
        piece, state = run((*(y[a:b] for y in x), A_log, dt_bias, state), SAFE, part)
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces), o)
    assert torch.equal(state, final)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_graph, final_graph = run(inputs, SAFE, whole)
    for _ in range(2):
        graph.replay()
        assert torch.equal(o_graph, o)
        assert torch.equal(final_graph, final)

    def gradients():
        leaves = [y.clone().requires_grad_() for y in inputs]
        run(leaves, SAFE, whole)[0].float().square().sum().backward()
        return [y.grad for y in leaves]

    first = gradients()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@gpu
@pytest.mark.parametrize("hold", [False, True])
def test_gpu_pieces_give_the_same_bits(hold):
    """Two streams; what K1 hands over is written again every third piece."""
    inputs, sequences = make([2500, 0, 700, 3000], [0, 5, 100, 64], H=24, K=128, V=128, dtype=torch.bfloat16)
    marks = ((64, 2496), (), (128,), (1024,))
    slots, count = kernels.checkpoint_slots(sequences.lengths, sequences.starts, marks, inputs[0].device)
    x = kernels.inputs(Raw(*inputs[:7]), SAFE, sequences)
    _, whole = forward(x, inputs[7], slots, count, keep=True)
    for size in (256, 1024) * 5:
        _, again = forward(x, inputs[7], slots, count, keep=True, hold=hold, size=size)
        for name in ("o", "final", "states", "S", "U"):
            assert torch.equal(getattr(again, name), getattr(whole, name)), name


@gpu
def test_gpu_many_heads_give_the_bits_of_few():
    last, one = make([129], [70], H=96, K=128, V=128, dtype=torch.bfloat16)
    for keep in (False, True):
        _, out = forward(kernels.inputs(Raw(*last[:7]), SAFE, one), last[7], keep=keep)
        few = [x[:, 8:12] for x in last[:5]] + [x[8:12] for x in last[5:7]]
        _, some = forward(kernels.inputs(Raw(*few), SAFE, one), last[7][:, 8:12].contiguous(), keep=keep)
        for name in ("o", "final", "S", "U")[: 4 if keep else 2]:
            assert torch.equal(getattr(out, name)[:, 8:12], getattr(some, name)), name
    o, final = run(last, SAFE, one)
    o_exact, final_exact, _ = recurrence(*last, SAFE, one)
    assert error(o, o_exact) < 7e-3
    assert error(final, final_exact) < 7e-3


@gpu
def test_gpu_segmented_close_to_serial():
    inputs, sequences = make([3000, 100], [500, 0], H=2, K=128, V=128, kind="slow", dtype=torch.bfloat16)
    serial = run(inputs, SAFE, sequences)
    tiled = run(inputs, SAFE, sequences, scan="segmented")
    # Same operands, another order of bfloat16 roundings.
    assert error(tiled[0], serial[0]) < 7e-3
    assert error(tiled[1], serial[1]) < 7e-3


@gpu
@pytest.mark.parametrize("given", [True, False])
def test_gpu_segmented_replayed_on_new_inputs(given):
    lengths = [3000, 0, 100]
    inputs, sequences = make(lengths, [500, 0, 0], H=2, K=128, V=128, dtype=torch.bfloat16)
    inputs = inputs if given else [*inputs[:7], None]
    run(inputs, SAFE, sequences, scan="segmented")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final = run(inputs, SAFE, sequences, scan="segmented")
    for x, new in zip(inputs, make(lengths, H=2, K=128, V=128, dtype=torch.bfloat16, seed=1)[0], strict=True):
        if x is not None:
            x.copy_(new)
    graph.replay()
    again = run(inputs, SAFE, sequences, scan="segmented")
    assert torch.equal(o, again[0])
    assert torch.equal(final, again[1])


@gpu
def test_gpu_a_million_tokens():
    inputs, sequences = make([1 << 20], H=32, K=128, V=128, dtype=torch.bfloat16)
    o, final = run((*inputs[:7], None), SAFE, sequences)
    tail = 512
    start = (1 << 20) - tail
    x = [y[-tail:] for y in inputs[:5]]
    short = run((*x, *inputs[5:7], None), SAFE, Sequences.from_lengths([tail], [start], "cuda"))
    # With these decays nothing of the first million tokens is left after a few hundred.
    assert error(o[-64:], short[0][-64:]) < 1e-3
    assert error(final, short[1]) < 1e-3
