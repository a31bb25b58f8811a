"""KDA decode in its two forms, by every kernel that this machine runs, against a float64 recurrence.

On a CPU: the torch reference, and the Triton kernels in Triton's interpreter at small dims. On a GPU (marker gpu): the
Triton and the CUDA kernels at the shipped dims.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops.kda import decode
from perilune.ops.kda.decode_call import Call

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

SAFE, SOFTPLUS = Gate("safe", -5.0), Gate("softplus")
H = 3  # not a power of two
POOL = 9
SLOTS = (4, -1, 2)
LIVE = (0, 2)


@dataclass(frozen=True)
class Kernel:
    """One implementation: `step` and `tail_step` with the arguments of decode_triton, on a device, at some K = V."""

    name: str
    device: str
    dim: int
    module: Any

    @property
    def interpreted(self) -> bool:
        """Triton's interpreter takes about 0.2 s a launch: such tests take fewer tokens."""
        return self.name == "triton" and self.device == "cpu"

    def step(self, inputs, weights, matrix, window, slots, tokens=1, counts=None, store=True):
        if self.module is not None:
            return self.module.step(Call(inputs, weights, matrix, window, slots, tokens, store, counts))
        if not store:
            return decode.verify(inputs, weights, matrix, window, slots, tokens)
        if counts is not None:
            return decode.replay_inplace(inputs, weights, matrix, window, slots, counts, tokens)
        return decode.decode_step_inplace(inputs, weights, matrix, window, slots)

    def tail_step(self, inputs, weights, matrix, window, tail, lengths, slots, tokens=1, shift=True, target=None):
        if self.module is not None:
            pool = (inputs, weights, matrix, window, slots, tokens, shift)
            return self.module.tail_step(Call(*pool, counts_N=lengths, tail=tail, target_N=target))
        arguments = (inputs, weights, matrix, window, tail, lengths, slots)
        if shift:
            return decode.tail_step_inplace(*arguments, target)
        return decode.tail_verify_inplace(*arguments, tokens)

    def fold(self, matrix, tail, lengths, slots, gate, target=None):
        target = slots if target is None else target
        if self.name == "triton":
            return self.module.fold(matrix, tail, lengths, slots, None, target, gate)
        return decode.fold_inplace(matrix, tail, lengths, slots, gate, target)


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


class World:
    """Random weights, a pool of slots full of NaN except those in use, and tokens to feed."""

    def __init__(self, kernel: Kernel, gate: Gate = SAFE, dtype: torch.dtype = torch.float32):
        self.kernel, self.gate, self.dtype, self.dim = kernel, gate, dtype, kernel.dim
        dim, device = self.dim, kernel.device
        self.weights = decode.Weights(
            *[torch.randn(H * dim, 4, device=device) / 2 for _ in range(3)],
            torch.randn(H, device=device) * 0.3,
            torch.randn(H, dim, device=device) * 0.5,
            1 + torch.randn(dim, device=device) * 0.1,
            1e-5,
            gate,
        )
        self.slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
        self.matrix = torch.full((POOL, H, dim, dim), float("nan"), device=device)
        self.window = torch.full((POOL, 3, 3 * H * dim), float("nan"), device=device, dtype=dtype)
        for slot in SLOTS:
            if slot >= 0:
                self.matrix[slot] = torch.randn(H, dim, dim, device=device)
                self.window[slot] = torch.randn(3, 3 * H * dim, device=device).to(dtype)

    def tail(self, dtype: torch.dtype = torch.float32) -> decode.Tail:
        """An empty tail whose memory is NaN."""
        tail = decode.Tail.empty(POOL, H, self.dim, self.dim, dtype=dtype, device=self.kernel.device)
        for ring in vars(tail).values():
            ring.fill_(float("nan"))
        return tail

    def tokens(self, count: int = 1) -> decode.Projected:
        """`count` random tokens for each sequence; those of padding are NaN."""
        rows = len(self.slots) * count

        def rand(*shape: int) -> torch.Tensor:
            x = torch.randn(rows, *shape, device=self.kernel.device)
            x.view(len(self.slots), count, -1)[self.slots < 0] = float("nan")
            return x.to(self.dtype)

        wide = [rand(H, self.dim) for _ in range(5)]
        return decode.Projected(wide[0], wide[1], wide[2], wide[3] * 2, rand(H), wide[4])

    def copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.matrix.clone(), self.window.clone()

    def lengths(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.kernel.device)


def warm(world: World, tail: decode.Tail, count: int, oracle: Oracle | None = None) -> torch.Tensor:
    """Feed `count` tokens to empty tails; by the reference on a CPU, as Triton's interpreter is slow. The lengths."""
    kernel = Kernel("torch", "cpu", world.dim, None) if world.kernel.device == "cpu" else world.kernel
    for i in range(count):
        inputs = world.tokens()
        if oracle:
            oracle.step(inputs)
        kernel.tail_step(inputs, world.weights, world.matrix, world.window, tail, world.lengths(i, i, i), world.slots)
    return world.lengths(count, count, count)


def split(inputs: decode.Projected, count: int) -> list[decode.Projected]:
    """The tokens of a call with `count` tokens a sequence, one call each."""
    return [decode.Projected(*[x[i::count] for x in vars(inputs).values()]) for i in range(count)]


class Oracle:
    """The layer in float64 on the CPU, sequence by sequence, with the whole past kept for the convolution."""

    def __init__(self, world: World) -> None:
        self.weights = [x.double().cpu() for x in vars(world.weights).values() if isinstance(x, torch.Tensor)]
        self.gate, self.dim = world.gate, world.dim
        self.state = {n: world.matrix[SLOTS[n]].double().cpu() for n in LIVE}
        self.past = {n: list(world.window[SLOTS[n]].double().cpu()) for n in LIVE}

    def step(self, inputs: decode.Projected) -> torch.Tensor:
        """Outputs [len(LIVE), H, V] of one token of each live sequence."""
        conv_q, conv_k, conv_v, A_log, dt_bias, norm = self.weights
        outputs = []
        for n in LIVE:
            q, k, v, g_raw, beta_logit, out_gate = (x[n].double().cpu() for x in vars(inputs).values())
            self.past[n].append(torch.cat([q.flatten(), k.flatten(), v.flatten()]))
            taps = torch.cat([conv_q, conv_k, conv_v])
            mixed = sum(self.past[n][-4 + j] * taps[:, j] for j in range(4))
            q, k, v = (mixed * torch.sigmoid(mixed)).view(3, H, self.dim)
            q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / self.dim**0.5
            k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            x, rate = g_raw + dt_bias, A_log.exp()[:, None]
            if self.gate.lower_bound is not None:
                g = self.gate.lower_bound * torch.sigmoid(rate * x)
            else:
                g = -rate * torch.log1p(x.exp())
            S = self.state[n] * g.exp()[..., None]
            u = torch.sigmoid(beta_logit)[:, None] * (v - (S * k[..., None]).sum(1))
            self.state[n] = S = S + k[..., None] * u[:, None]
            o = (S * q[..., None]).sum(1)
            o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm * torch.sigmoid(out_gate)
            outputs.append(o)
        return torch.stack(outputs)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; NaN never passes a comparison."""
    return float((got.double().cpu() - want).norm() / want.norm())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0))


# fp32 sums over 128 terms and a state carried over a few tokens: 1e-6 is seen, 2e-5 is the promise.
FP32 = 2e-5
# o is rounded to bf16 (relative 2^-9 at most, twice that in Triton's interpreter, which truncates).
BF16 = 6e-3


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
