"""The arithmetic coder gives back what it was given, in as many bits as the probabilities promise."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import Error
from perilune.train.arithmetic import TOTAL, decode, encode, frequencies


class Fixed:
    """The same kind of logits each time, drawn anew from a seed and the number of tokens so far."""

    def __init__(self, seed: int, vocab: int, sharpness: float) -> None:
        self.seed, self.vocab, self.sharpness, self.seen = seed, vocab, sharpness, 0

    def logits(self) -> torch.Tensor:
        gen = torch.Generator().manual_seed(1000 * self.seed + self.seen)
        return self.sharpness * torch.randn(self.vocab, generator=gen)

    def push(self, token: int) -> None:
        self.seen = (self.seen * 31 + token + 1) % 9973


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.integers(0, 18), max_size=60),
    st.integers(0, 5),
    st.sampled_from([0.0, 1.0, 8.0, 60.0]),
)
def test_round_trip_and_length(tokens: list[int], seed: int, sharpness: float) -> None:
    tokens = [*tokens, 19]
    data = encode(tokens, Fixed(seed, 20, sharpness))
    assert decode(data, 19, Fixed(seed, 20, sharpness), limit=1000) == tokens
    predictor, bits = Fixed(seed, 20, sharpness), 0.0
    for token in tokens:
        steps = frequencies(predictor.logits())
        bits -= math.log2((steps[token + 1] - steps[token]) / TOTAL)
        predictor.push(token)
    # At most two bits for the end and seven to fill the byte; rounding of the 32-bit range costs far less than 0.01.
    assert bits - 0.01 <= 8 * len(data) <= 1.001 * bits + 9


def test_frequencies_cover_everything() -> None:
    for logits in (torch.zeros(7), torch.tensor([300.0, 0.0, -300.0]), torch.randn(2048)):
        steps = frequencies(logits)
        assert steps[0] == 0
        assert steps[-1] == TOTAL
        assert all(b > a for a, b in pairwise(steps))


def test_damage_and_strangers_are_noticed() -> None:
    data = encode([1, 2, 3, 4, 5, 6, 19], Fixed(0, 20, 1.0))
    with pytest.raises(Error, match="no end after 3 tokens"):
        decode(data, 19, Fixed(0, 20, 1.0), limit=3)
    with pytest.raises(Error, match="token 20 is outside"):
        encode([20], Fixed(0, 20, 1.0))
