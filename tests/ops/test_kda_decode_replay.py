"""The replay of all layers in one call against decode steps, layer by layer, bit for bit."""

from __future__ import annotations

import pytest
import torch
from kda_decode_world import LIVE, SAFE, SLOTS, Kernel, World, same, split

from perilune.errors import Error
from perilune.ops.kda import decode
from perilune.ops.kda.decode_replay import Replay

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS, DRAFTS = 3, 4


def worlds(device: str, dtype: torch.dtype = torch.float32) -> list[World]:
    kernel = Kernel("torch", device, 16 if device == "cpu" else 128, None)
    return [World(kernel, SAFE, dtype) for _ in range(LAYERS)]


@pytest.mark.parametrize("device", DEVICES)
def test_all_layers_equal_steps_bitwise(device: str) -> None:
    layers = worlds(device)
    recorded = [world.tokens(DRAFTS) for world in layers]
    before = [world.copies() for world in layers]
    accepted = layers[0].lengths(4, 3, 2)
    states = [(x, world.weights, world.matrix, world.window) for x, world in zip(recorded, layers, strict=True)]
    replay = Replay(states, layers[0].slots, accepted, DRAFTS)
    assert replay.one_launch == (device == "cuda")
    replay.run_inplace()
    for world, x, (matrix, window) in zip(layers, recorded, before, strict=True):
        kept = {}
        for i, one in enumerate(split(x, DRAFTS)):
            decode.decode_step_inplace(one, world.weights, matrix, window, world.slots)
            kept[i + 1] = matrix.clone(), window.clone()
        for n in LIVE:
            want_matrix, want_window = kept[int(accepted[n])]
            assert torch.equal(world.matrix[SLOTS[n]], want_matrix[SLOTS[n]])
            assert torch.equal(world.window[SLOTS[n]], want_window[SLOTS[n]])
        free = [slot for slot in range(len(world.matrix)) if slot not in SLOTS]
        assert world.matrix[free].isnan().all()
    # Nothing accepted: nothing moves.
    accepted.zero_()
    before = [world.copies() for world in layers]
    replay.run_inplace()
    for world, (matrix, window) in zip(layers, before, strict=True):
        assert same(world.matrix, matrix)
        assert same(world.window, window)


@pytest.mark.gpu
def test_graph_reads_what_is_recorded_later() -> None:
    """One captured replay, new drafts copied into its tensors: the bits of an eager replay of them."""
    layers = worlds("cuda", torch.bfloat16)
    recorded = [world.tokens(DRAFTS) for world in layers]
    accepted = layers[0].lengths(4, 3, 2)
    states = [(x, world.weights, world.matrix, world.window) for x, world in zip(recorded, layers, strict=True)]
    replay = Replay(states, layers[0].slots, accepted, DRAFTS)
    replay.run_inplace()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replay.run_inplace()
    for world, x in zip(layers, recorded, strict=True):
        for old, new in zip(vars(x).values(), vars(world.tokens(DRAFTS)).values(), strict=True):
            old.copy_(new)
    accepted.copy_(layers[0].lengths(1, 0, 3))
    eager = [world.copies() for world in layers]
    graph.replay()
    for world, x, (matrix, window) in zip(layers, recorded, eager, strict=True):
        decode.replay_inplace(x, world.weights, matrix, window, world.slots, accepted, DRAFTS)
        assert same(world.matrix, matrix)
        assert same(world.window, window)


def test_errors() -> None:
    with pytest.raises(Error, match="layers is empty"):
        Replay([], torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 2)
    world = worlds("cpu")[0]
    with pytest.raises(Error, match="3 sequences of 2"):
        Replay(
            [(world.tokens(), world.weights, world.matrix, world.window)], world.slots, world.lengths(1, 1, 1), drafts=2
        )
