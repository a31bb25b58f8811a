"""The CUDA kernels of KDA decode without a GPU, thread by thread on the CPU: numbers, equalities, hangs, stray writes.

The tests of test_kda_decode.py at small counts; on a GPU those run the compiled kernel itself.
"""

from __future__ import annotations

import pytest
import test_kda_decode as gpu_tests
import torch
from cuda_on_cpu import cuda_on_cpu
from kda_decode_world import FP32, LIVE, SAFE, SLOTS, SOFTPLUS, Kernel, Oracle, World, off, same, split, warm

from perilune.config import Gate
from perilune.ops.kda import decode_cuda
from perilune.ops.kda.decode_call import Call

__all__ = ["cuda_on_cpu"]
pytestmark = pytest.mark.usefixtures("cuda_on_cpu")
KERNEL = Kernel("cuda", "cpu", 128, decode_cuda)


@pytest.mark.parametrize(("gate", "dtype"), [(SAFE, torch.bfloat16), (SOFTPLUS, torch.float32)])
def test_step(gate: Gate, dtype: torch.dtype) -> None:
    gpu_tests.test_step_against_float64(KERNEL, gate, dtype)


def test_verify() -> None:
    gpu_tests.test_verify_equals_steps_bitwise(KERNEL, 2, torch.float32)


@pytest.mark.parametrize("ring", [torch.float32, torch.bfloat16])
def test_tail_verify(ring: torch.dtype) -> None:
    """Eight drafts from entry 12 on: they meet old entries, each other, and the next 16-entry block."""
    world = World(KERNEL)
    tail = world.tail(ring)
    lengths = warm(world, tail, 12)
    twin, (matrix, window) = type(tail)(*[x.clone() for x in vars(tail).values()]), world.copies()
    inputs = world.tokens(8)
    o = KERNEL.tail_step(inputs, world.weights, matrix, window, tail, lengths, world.slots, 8, False)
    assert same(matrix, world.matrix)
    assert same(window, world.window)
    for i, one in enumerate(split(inputs, 8)):
        want = KERNEL.tail_step(one, world.weights, world.matrix, world.window, twin, lengths + i, world.slots)
        assert torch.equal(o[i::8], want)
    for got, want in zip(vars(tail).values(), vars(twin).values(), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS])
def test_tail_over_a_fold(gate: Gate) -> None:
    """The last tokens of a tail, the fold by the step itself and by a call of its own, and the token after it."""
    world = World(KERNEL, gate)
    oracle, tail = Oracle(world), world.tail()
    lengths = warm(world, tail, 62, oracle)
    twin, pools = type(tail)(*[x.clone() for x in vars(tail).values()]), world.copies()
    for i in range(3):
        inputs, at = world.tokens(), (lengths + i) % 64
        want = oracle.step(inputs)
        o = KERNEL.tail_step(
            inputs, world.weights, world.matrix, world.window, tail, at, world.slots, target=world.slots
        )
        again = KERNEL.tail_step(inputs, world.weights, *pools, twin, at, world.slots)
        if i == 1:
            KERNEL.fold(pools[0], twin, at + 1, world.slots, gate)
            for n in LIVE:
                assert off(world.matrix[SLOTS[n]], oracle.state[n]) <= FP32
                assert off(pools[0][SLOTS[n]], oracle.state[n]) <= FP32
        assert off(o[list(LIVE)], want) <= FP32
        assert off(again[list(LIVE)], want) <= FP32
        assert i == 2 or torch.equal(o, again)  # the two folds sum in different orders


def test_all_layers_at_once() -> None:
    """The replay of three layers in one launch is three replays."""
    worlds = [World(KERNEL) for _ in range(3)]
    inputs, accepted = [world.tokens(2) for world in worlds], worlds[0].lengths(2, 1, 1)
    calls = [
        Call(x, world.weights, *world.copies(), worlds[0].slots, 2, counts_N=accepted)
        for x, world in zip(inputs, worlds, strict=True)
    ]
    decode_cuda.step_layers(calls[0], decode_cuda.table(calls), len(calls))
    for x, world, call in zip(inputs, worlds, calls, strict=True):
        KERNEL.step(x, world.weights, world.matrix, world.window, world.slots, 2, accepted)
        assert same(world.matrix, call.matrix_SHKV)
        assert same(world.window, call.window_S3C)
