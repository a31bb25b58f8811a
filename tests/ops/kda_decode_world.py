"""Shared by the tests of KDA decode: its implementations, slot pools full of NaN, tokens to feed, a float64 oracle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from perilune.config import Gate
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
