"""KDA decode in its two forms, by every kernel that this machine runs, against a float64 recurrence.

On a CPU: the torch reference, and the Triton kernels in Triton's interpreter at small dims. On a GPU (marker gpu): the
Triton and the CUDA kernels at the shipped dims.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kda_decode_world import (
    BF16,
    FP32,
    GPU,
    LIVE,
    POOL,
    SAFE,
    SLOTS,
    SOFTPLUS,
    H,
    Kernel,
    Oracle,
    World,
    off,
    same,
    split,
    warm,
)  # fmt: skip

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops.kda import decode


def interpreter_reads_loop_bounds() -> None:
    """numpy 2.4 refuses int() of a one-element array, which Triton 3.6's interpreter takes of a loop bound."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "patched", False):
        return

    def patched(tensor, scope):
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patched.patched = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched


KERNELS = ["torch", "triton", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=KERNELS)
def kernel(request) -> Kernel:
    """Each implementation; on a machine with a GPU, Triton runs there."""
    if request.param == "torch":
        return Kernel("torch", "cpu", 16, None)
    if request.param == "cuda":
        from perilune.ops import nvrtc
        from perilune.ops.kda import decode_cuda

        if nvrtc.missing() or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the CUDA kernels need a Hopper GPU and NVRTC")
        return Kernel("cuda", "cuda", 128, decode_cuda)
    pytest.importorskip("triton")
    from perilune.ops.kda import decode_triton

    if not GPU:
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(decode_triton.step_kernel, InterpretedFunction):
            pytest.skip("triton was imported without TRITON_INTERPRET=1")
        interpreter_reads_loop_bounds()
    return Kernel("triton", "cuda" if GPU else "cpu", 128 if GPU else 16, decode_triton)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS])
def test_step_against_float64(kernel: Kernel, gate: Gate, dtype: torch.dtype) -> None:
    world = World(kernel, gate, dtype)
    oracle = Oracle(world)
    for _ in range(2 if kernel.interpreted else 5):
        inputs = world.tokens()
        o = kernel.step(inputs, world.weights, world.matrix, world.window, world.slots)
        assert o.dtype == dtype
        assert off(o[list(LIVE)], oracle.step(inputs)) <= (FP32 if dtype == torch.float32 else BF16)
        assert (o[1] == 0).all()  # padding
    for n in LIVE:
        assert off(world.matrix[SLOTS[n]], oracle.state[n]) <= FP32
        assert torch.equal(world.window[SLOTS[n]].double().cpu(), torch.stack(oracle.past[n][-3:]))
    free = [slot for slot in range(POOL) if slot not in SLOTS]
    assert world.matrix[free].isnan().all()
    assert world.window[free].isnan().all()


def test_reference_in_float64() -> None:
    world = World(Kernel("torch", "cpu", 16, None))
    double = replace(world.weights, **{k: v.double() for k, v in vars(world.weights).items() if torch.is_tensor(v)})
    matrix, window, oracle = world.matrix.double(), world.window.double(), Oracle(world)
    for _ in range(3):
        inputs = decode.Projected(*[x.double() for x in vars(world.tokens()).values()])
        o = decode.decode_step_inplace(inputs, double, matrix, window, world.slots)
        assert off(o[list(LIVE)], oracle.step(inputs)) <= 1e-12


@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS])
@pytest.mark.parametrize("fused", [False, True])
def test_tail_against_float64(kernel: Kernel, gate: Gate, fused: bool) -> None:
    """Over a fold, folded by the step itself or by a call of its own, into another slot."""
    world = World(kernel, gate)
    oracle, tail = Oracle(world), world.tail()
    skipped = decode.GRID - 1 if kernel.interpreted else 0
    lengths = warm(world, tail, skipped, oracle)
    target = world.lengths(7, -1, 8) if not fused else world.slots
    target = world.slots if fused else world.lengths(7, -1, 8)
    for token in range(skipped, decode.GRID + 1):
        inputs = world.tokens()
        before = world.matrix.clone()
        o = kernel.tail_step(
            inputs, world.weights, world.matrix, world.window, tail, lengths, world.slots, 1, True,
            world.slots if fused else None,
        )  # fmt: skip
        assert off(o[list(LIVE)], oracle.step(inputs)) <= FP32
        lengths = lengths + 1
        if token + 1 < decode.GRID:
            assert same(before, world.matrix)
        elif token + 1 == decode.GRID:
            if not fused:
                assert same(before, world.matrix)
                kernel.fold(world.matrix, tail, lengths, world.slots, gate, target)
            for n in LIVE:
                assert off(world.matrix[int(target[n])], oracle.state[n]) <= FP32
            # The old matrices may be shared with a fork: they are as they were.
            assert fused or same(before[list(SLOTS)[::2]], world.matrix[list(SLOTS)[::2]])
            if not fused:
                for n in LIVE:
                    world.matrix[SLOTS[n]] = world.matrix[int(target[n])]
            lengths = lengths - decode.GRID


@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS])
def test_tail_strong_decay(kernel: Kernel, gate: Gate) -> None:
    """Every gate at its strongest: nothing overflows, at any place in the 16-token blocks."""
    world = World(kernel, gate)
    oracle, tail, lengths = Oracle(world), world.tail(), world.lengths(0, 0, 0)
    for token in range(35):
        steps = Kernel("torch", "cpu", world.dim, None) if kernel.interpreted and token not in (15, 16, 34) else kernel
        inputs = world.tokens()
        inputs = replace(inputs, g_raw_THK=torch.full_like(inputs.g_raw_THK, -40.0 if gate is SOFTPLUS else 40.0))
        if gate is SOFTPLUS:
            inputs = replace(inputs, g_raw_THK=-inputs.g_raw_THK)
        o = steps.tail_step(inputs, world.weights, world.matrix, world.window, tail, lengths, world.slots)
        assert off(o[list(LIVE)], oracle.step(inputs)) <= FP32
        lengths = lengths + 1


@pytest.mark.parametrize("drafts", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_equals_steps_bitwise(kernel: Kernel, drafts: int, dtype: torch.dtype) -> None:
    """Verification writes nothing; replaying what was accepted leaves the bits of as many decode steps."""
    if kernel.interpreted:
        drafts = min(drafts, 2)
    world = World(kernel, dtype=dtype)
    inputs = world.tokens(drafts)
    matrix, window = world.copies()
    o = kernel.step(inputs, world.weights, matrix, window, world.slots, drafts, None, False)
    assert same(matrix, world.matrix)
    assert same(window, world.window)
    steps = []
    states = [world.copies()]
    for one in split(inputs, drafts):
        steps.append(kernel.step(one, world.weights, world.matrix, world.window, world.slots))
        states.append(world.copies())
    assert torch.equal(o, torch.stack(steps, 1).flatten(0, 1))
    accepted = world.lengths(drafts, 0, drafts // 2)
    again = kernel.step(inputs, world.weights, matrix, window, world.slots, drafts, accepted, True)
    assert torch.equal(again.view(len(SLOTS), drafts, H, -1)[0], o.view(len(SLOTS), drafts, H, -1)[0])
    for n in LIVE:
        slot, (want_matrix, want_window) = SLOTS[n], states[int(accepted[n])]
        assert torch.equal(matrix[slot], want_matrix[slot])
        assert torch.equal(window[slot], want_window[slot])


@pytest.mark.parametrize("drafts", [1, 8])
@pytest.mark.parametrize("ring", [torch.float32, torch.bfloat16])
def test_tail_verify_rollback_bitwise(kernel: Kernel, drafts: int, ring: torch.dtype) -> None:
    """Drafts as entries: outputs and entries of as many steps; rejected drafts leave no trace; 71 entries fit."""
    if kernel.interpreted:
        drafts = min(drafts, 2)
    world = World(kernel)
    tail = world.tail(ring)
    start = 20 if not GPU else 59
    lengths = warm(world, tail, start)
    twin, (matrix, window) = decode.Tail(*[x.clone() for x in vars(tail).values()]), world.copies()
    # A first verification, all of it rejected.
    wrong = world.tokens(drafts)
    kernel.tail_step(wrong, world.weights, matrix, window, tail, lengths, world.slots, drafts, False)
    assert same(matrix, world.matrix)
    assert same(window, world.window)
    inputs = world.tokens(drafts)
    o = kernel.tail_step(inputs, world.weights, matrix, window, tail, lengths, world.slots, drafts, False)
    steps = []
    for i, one in enumerate(split(inputs, drafts)):
        steps.append(kernel.tail_step(one, world.weights, world.matrix, world.window, twin, lengths + i, world.slots))
    assert torch.equal(o, torch.stack(steps, 1).flatten(0, 1))
    for got, want in zip(vars(tail).values(), vars(twin).values(), strict=True):
        assert same(got[..., : start + drafts, :], want[..., : start + drafts, :])
    decode.shift_window_inplace(inputs, window, world.slots, world.lengths(drafts, drafts, drafts), drafts)
    assert same(window, world.window)


def test_fold_moves_the_rest(kernel: Kernel) -> None:
    """Entries past the 64th come first afterwards, and decoding goes on as if they had been written there."""
    world = World(kernel)
    oracle, tail = Oracle(world), world.tail()
    lengths = warm(world, tail, 60, oracle)
    drafts = world.tokens(8)
    steps = Kernel("torch", "cpu", world.dim, None) if kernel.interpreted else kernel
    steps.tail_step(drafts, world.weights, world.matrix, world.window, tail, lengths, world.slots, 8, False)
    for one in split(drafts, 8):
        oracle.step(one)
    decode.shift_window_inplace(drafts, world.window, world.slots, world.lengths(8, 8, 8), 8)
    kernel.fold(world.matrix, tail, lengths + 8, world.slots, world.gate)
    inputs = world.tokens()
    o = kernel.tail_step(inputs, world.weights, world.matrix, world.window, tail, lengths - 56, world.slots)
    assert off(o[list(LIVE)], oracle.step(inputs)) <= FP32


def test_inputs_unchanged_and_strided(kernel: Kernel) -> None:
    """Views into one fused projection give the same bits, and nothing but state is written."""
    world = World(kernel)
    inputs = world.tokens()
    fused = torch.cat([inputs.q_THK, inputs.k_THK, inputs.v_THV], 1)
    views = replace(inputs, q_THK=fused[:, :H], k_THK=fused[:, H : 2 * H], v_THV=fused[:, 2 * H :])
    before = [x.clone() for x in (*vars(inputs).values(), *vars(world.weights).values()) if torch.is_tensor(x)]
    matrix, window = world.copies()
    o = kernel.step(inputs, world.weights, matrix, window, world.slots)
    again = kernel.step(views, world.weights, world.matrix, world.window, world.slots)
    assert torch.equal(o, again)
    assert same(matrix, world.matrix)
    after = [x for x in (*vars(inputs).values(), *vars(world.weights).values()) if torch.is_tensor(x)]
    assert all(same(a, b) for a, b in zip(before, after, strict=True))


def test_reused_slot_starts_afresh(kernel: Kernel) -> None:
    """A slot given to a new sequence (zeroed) forgets the old one; batch neighbours do not matter."""
    world = World(kernel)
    kernel.step(world.tokens(), world.weights, world.matrix, world.window, world.slots)
    world.matrix[4], world.window[4] = 0, 0
    inputs = world.tokens()
    alone = decode.Projected(*[x[:1] for x in vars(inputs).values()])
    matrix, window = torch.zeros_like(world.matrix), torch.zeros_like(world.window)
    want = kernel.step(alone, world.weights, matrix, window, world.lengths(6))
    got = kernel.step(inputs, world.weights, world.matrix, world.window, world.slots)
    assert torch.equal(got[:1], want)
    assert torch.equal(world.matrix[4], matrix[6])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["step", "tail"])
def test_graph_replay_twice_bitwise(form: str, kernel: Kernel) -> None:
    """A captured step, replayed twice, leaves the bits of two eager steps."""
    if kernel.device != "cuda":
        pytest.skip("a CUDA graph needs the GPU")
    world = World(kernel)
    inputs, tail, lengths = world.tokens(), world.tail(), world.lengths(0, 0, 0)

    def run(matrix, window, tail, lengths):
        if form == "step":
            return kernel.step(inputs, world.weights, matrix, window, world.slots)
        o = kernel.tail_step(inputs, world.weights, matrix, window, tail, lengths, world.slots)
        lengths += 1
        return o

    matrix, window = world.copies()
    eager_tail, eager_lengths = decode.Tail(*[x.clone() for x in vars(tail).values()]), lengths.clone()
    eager = [run(matrix, window, eager_tail, eager_lengths).clone() for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = run(world.matrix, world.window, tail, lengths)
    for want in eager:
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, want)
    assert same(matrix, world.matrix)
    assert same(window, world.window)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [1, 2, 8])
def test_full_size_equals_sequences_alone(kernel: Kernel, drafts: int) -> None:
    """64 sequences of 96 heads, more items than blocks, in both forms: the bits of a few sequences run alone."""
    if kernel.device != "cuda":
        pytest.skip("96 heads of 128 are for the GPU")
    N, heads, dim = 64, 96, 128

    def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    taps = [rand(heads * dim, 4, dtype=torch.float32) / 2 for _ in range(3)]
    small = (rand(heads, dtype=torch.float32) * 0.3, rand(heads, dim, dtype=torch.float32) - 1)
    weights = decode.Weights(*taps, *small, 1 + rand(dim, dtype=torch.float32) / 10, 1e-5, SAFE)
    inputs = decode.Projected(*rand(4, N * drafts, heads, dim), rand(N * drafts, heads), rand(N * drafts, heads, dim))
    matrix, window = rand(N, heads, dim, dim, dtype=torch.float32), rand(N, 3, 3 * heads * dim)
    tail = decode.Tail.empty(N, heads, dim, dim, device="cuda")
    for ring, scale in zip(vars(tail).values(), (1e-17, 1.0, -1.0), strict=True):
        ring.normal_().abs_().mul_(scale)
    slots = torch.randperm(N, device="cuda").to(torch.int32)
    lengths = (torch.arange(N, device="cuda") % 64).to(torch.int32)

    def run(x: decode.Projected, slots: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        m, w, t = matrix.clone(), window.clone(), decode.Tail(*[ring.clone() for ring in vars(tail).values()])
        o = [kernel.tail_step(x, weights, m, w, t, lengths, slots, drafts, False)]
        o += [kernel.step(x, weights, m, w, slots, drafts, None, store) for store in (False, True)]
        return [*o, m[slots], w[slots], *(ring[slots] for ring in vars(t).values())]

    full = run(inputs, slots, lengths)
    assert all(x.isfinite().all() for x in full)
    for n in (0, 13, 63):
        rows = slice(n * drafts, (n + 1) * drafts)
        one = decode.Projected(*[x[rows] for x in vars(inputs).values()])
        alone = run(one, slots[n : n + 1], lengths[n : n + 1])
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone[:3], full[:3], strict=True))
        assert all(torch.equal(a[0], b[n]) for a, b in zip(alone[3:], full[3:], strict=True))


def test_errors_name_the_field() -> None:
    world = World(Kernel("torch", "cpu", 16, None))
    inputs = world.tokens()
    call = (world.weights, world.matrix, world.window, world.slots)
    with pytest.raises(Error, match="k_THK"):
        decode.decode_step_inplace(replace(inputs, k_THK=inputs.k_THK[:, :2]), *call)
    with pytest.raises(Error, match="drafts is 9"):
        decode.verify(inputs, *call, drafts=9)
    with pytest.raises(Error, match="int32"):
        decode.decode_step_inplace(inputs, *call[:3], world.slots.long())
    with pytest.raises(Error, match="3 sequences of 2"):
        decode.verify(inputs, *call, drafts=2)
    with pytest.raises(Error, match="window_S3C"):
        decode.decode_step_inplace(inputs, world.weights, world.matrix, world.window[:, :2], world.slots)
    assert decode.kernel_for(inputs, *call[:3]) == "torch (reference)"
