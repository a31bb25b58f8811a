"""Where stages begin, what a hop carries, and what is refused: by hand. Runs with stages are in test_layouts."""

from __future__ import annotations

import dataclasses

import pytest

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.parallel.mesh import Axes, fill_axes
from perilune.parallel.stages import blocks_before, check_micro_batches, hop_blocks, places_of, rank_of
from perilune.train.config import ParallelConfig

K3 = ModelConfig.from_pretrained("kimi-k3")


def test_blocks_of_k3_by_hand() -> None:
    # A block begins at layers 0, 12, ..., 84: the embedding is finished before layer 1.
    assert [blocks_before(K3, layer) for layer in (0, 1, 12, 13, 24, 25, 92, 93)] == [0, 1, 1, 2, 2, 3, 8, 8]
    linear = ModelConfig.from_pretrained("kimi-linear-48b-a3b")
    assert blocks_before(linear, 20) == 0


def test_a_hop_carries_only_blocks_that_its_receiver_does_not_hold() -> None:
    # 8 ranks, one stage each, of 11 or 12 layers: everything that is finished.
    plain = places_of(K3, 8, "1F1B", 1)
    assert [p.first for p in plain] == [0, 11, 23, 34, 46, 58, 69, 81]
    assert [hop_blocks(K3, p) for p in plain] == [0, 1, 2, 3, 4, 5, 6, 7]
    # 4 ranks with two stages each at the same cuts: stage 4 is on rank 0, which saw layers 0 .. 10 (one block).
    twice = places_of(K3, 4, "Interleaved1F1B", 2)
    assert [p.first for p in twice] == [p.first for p in plain]
    assert [hop_blocks(K3, p) for p in twice] == [0, 1, 2, 3, 3, 3, 3, 3]
    # By hand for stage 7 (layer 81, 7 blocks): its rank saw layers 34 .. 45, of which block 3 began at 36.
    assert blocks_before(K3, 81) - blocks_before(K3, 46) == 3
    # There and back again: the last stage is on the first rank, and blocks travel with it.
    back = places_of(K3, 4, "ZBVZeroBubble", 2)
    assert [rank_of(p.index, 4, "ZBVZeroBubble") for p in back] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [hop_blocks(K3, p) for p in back] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_stages_cover_every_layer_once() -> None:
    for ranks in (1, 2, 5, 16, 31):
        for schedule, virtual in (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("ZBVZeroBubble", 2)):
            places = places_of(K3, ranks, schedule, virtual)  # type: ignore[arg-type]
            layers = [layer for p in places for layer in range(p.first, p.last)]
            assert layers == list(range(93))
            assert all(p.last > p.first for p in places)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(Error, match=r"parallel\.pp is 32, virtual 3: 96 stages for 93 layers"):
        places_of(K3, 32, "Interleaved1F1B", 3)
    with pytest.raises(Error, match=r"parallel\.virtual is 2; schedule '1F1B' needs 1"):
        places_of(K3, 4, "1F1B", 2)
    with pytest.raises(Error, match=r"accumulate gives a rank 1 micro-batches; schedule '1F1B' needs parallel\.pp = 2"):
        check_micro_batches(1, 2, "1F1B")
    with pytest.raises(Error, match=r"a rank 5 micro-batches; .* needs a multiple of 2, or fewer than 4"):
        check_micro_batches(5, 2, "Interleaved1F1B")
    check_micro_batches(3, 2, "Interleaved1F1B")
    for name in ("pp", "virtual", "cp", "tp"):
        with pytest.raises(Error, match=rf"parallel\.{name} is 0; must be >= 1"):
            ParallelConfig(**{name: 0})
    with pytest.raises(Error, match=r"parallel\.pp is 3; must divide the 8 processes of the run"):
        fill_axes(8, Axes(pp=3))
    with pytest.raises(Error, match=r"parallel\.cp is 3; must divide the 4 of the 8 processes .* that the axes before"):
        fill_axes(8, Axes(pp=2, cp=3))
    with pytest.raises(Error, match=r"parallel\.ep is 8; must divide the 4 processes of a stage"):
        fill_axes(8, Axes(pp=2, ep=8))
    assert fill_axes(16, Axes(pp=2, cp=2, tp=2, shard=1)) == ((2, 2, 1, 2, 2), 8)
    assert fill_axes(16, Axes(ep=4)) == ((1, 1, 16, 1, 1), 4)


def test_a_model_without_attention_residuals_hands_on_the_sum_alone() -> None:
    plain = dataclasses.replace(K3, attn_res=None)
    assert {hop_blocks(plain, p) for p in places_of(plain, 8, "1F1B", 1)} == {0}
