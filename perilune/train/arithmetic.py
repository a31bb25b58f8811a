"""Arithmetic coding with a model's probabilities: bits a byte made into real bytes, and back into the same text.

Source: Witten, Neal, Cleary, "Arithmetic coding for data compression" (1987), in integers of 32 bits.
Encoder and decoder must see the same bits in every logit, so both ask the model one token at a time.

Legend: V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from perilune.errors import Error
from perilune.model import SequenceState, Transformer
from perilune.ops.sequences import Sequences

_TOP = 1 << 32
_HALF, _QUARTER = _TOP >> 1, _TOP >> 2
# Frequencies add up to this; it must stay well below a quarter of the range.
TOTAL = 1 << 24


class Predictor(Protocol):
    """Something that gives the logits [V] of the next token, and is then told which it was."""

    def logits(self) -> Tensor: ...

    def push(self, token: int) -> None: ...


class ModelPredictor:
    """A model read one token at a time, from a first token (BOS) on."""

    def __init__(self, model: Transformer, first: int) -> None:
        weight = model.lm_head.weight
        self.model = model
        self.state = SequenceState.empty(model.config, device=weight.device, dtype=weight.dtype)
        self.push(first)

    def logits(self) -> Tensor:
        """Of the token after the last one pushed."""
        return self._logits_V

    @torch.inference_mode()
    def push(self, token: int) -> None:
        """The next token is `token`."""
        tokens_T = torch.tensor([token], device=self.model.lm_head.weight.device)
        self._logits_V: Tensor = self.model(tokens_T, Sequences.from_lengths([1]), [self.state])[0]


def frequencies(logits_V: Tensor) -> list[int]:
    """Cumulative integer frequencies, V + 1 numbers from 0 to TOTAL, every token at least 1 wide."""
    share_V = torch.softmax(logits_V.detach().to("cpu", torch.float64), dim=-1)
    count_V = (share_V * (TOTAL - share_V.numel())).floor().to(torch.int64) + 1
    count_V[int(count_V.argmax())] += TOTAL - int(count_V.sum())
    return [0, *count_V.cumsum(0).tolist()]


def encode(tokens: Sequence[int], predictor: Predictor) -> bytes:
    """The tokens as bytes; the last one must be what `decode` is told to stop at."""
    low, width, waiting = 0, _TOP, 0
    bits: list[int] = []

    def put(bit: int) -> None:
        nonlocal waiting
        bits.extend([bit] + [1 - bit] * waiting)
        waiting = 0

    for token in tokens:
        steps = frequencies(predictor.logits())
        if not 0 <= token < len(steps) - 1:
            raise Error(f"arithmetic coding: token {token} is outside the vocabulary of {len(steps) - 1}")
        low, width = _narrow(low, width, steps[token], steps[token + 1])
        while True:
            if low + width <= _HALF:
                put(0)
            elif low >= _HALF:
                put(1)
                low -= _HALF
            elif low >= _QUARTER and low + width <= _HALF + _QUARTER:
                waiting += 1
                low -= _QUARTER
            else:
                break
            low, width = low * 2, width * 2
        predictor.push(token)
    # One more bit and its followers pick a quarter that lies inside the interval; zeros after it do no harm.
    waiting += 1
    put(0 if low < _QUARTER else 1)
    bits += [0] * (-len(bits) % 8)
    return bytes(int("".join(map(str, bits[i : i + 8])), 2) for i in range(0, len(bits), 8))


def decode(data: bytes, end: int, predictor: Predictor, limit: int) -> list[int]:
    """The tokens that `encode` was given, up to and with the first `end`.

    Raises Error when there is no `end` within `limit` tokens (damaged data, or another model).
    """
    position = 0

    def take() -> int:
        nonlocal position
        byte = data[position >> 3] if position >> 3 < len(data) else 0
        position += 1
        return byte >> (7 - ((position - 1) & 7)) & 1

    low, width, code = 0, _TOP, 0
    for _ in range(32):
        code = code * 2 + take()
    tokens: list[int] = []
    while len(tokens) < limit:
        steps = frequencies(predictor.logits())
        token = _find(steps, ((code - low + 1) * TOTAL - 1) // width)
        low, width = _narrow(low, width, steps[token], steps[token + 1])
        while True:
            if low + width <= _HALF:
                pass
            elif low >= _HALF:
                low, code = low - _HALF, code - _HALF
            elif low >= _QUARTER and low + width <= _HALF + _QUARTER:
                low, code = low - _QUARTER, code - _QUARTER
            else:
                break
            low, width, code = low * 2, width * 2, code * 2 + take()
        tokens.append(token)
        if token == end:
            return tokens
        predictor.push(token)
    raise Error(f"arithmetic coding: no end after {limit} tokens; the data is damaged or was made by another model")


def _narrow(low: int, width: int, below: int, upto: int) -> tuple[int, int]:
    start, stop = width * below // TOTAL, width * upto // TOTAL
    return low + start, stop - start


def _find(steps: list[int], value: int) -> int:
    """The token whose interval holds `value`."""
    return bisect_right(steps, value) - 1


__all__ = ["TOTAL", "ModelPredictor", "Predictor", "decode", "encode", "frequencies"]
