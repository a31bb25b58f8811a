"""Bits a byte of whole files: of a model, and of the compressors everyone has."""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from perilune.model import Transformer
from perilune.train.data import Encoder, encode_document, pack
from perilune.train.loss import cross_entropy


@dataclass(frozen=True)
class FileBits:
    """One text: its bytes, and the bits each method needs for it, by the method's name."""

    name: str
    bytes: int
    bits: dict[str, float]


def model_bits(model: Transformer, tokenizer: Encoder, text: str) -> float:
    """Bits of a whole text, read as one sequence: every token, the first (from BOS) and the end included."""
    batch = pack([encode_document(text, tokenizer)[0]]).to(model.lm_head.weight.device)
    with torch.no_grad():
        x_TD = model.hidden(batch.tokens_T, batch.sequences).x_TD
        loss, _ = cross_entropy(x_TD, model.lm_head.weight, batch.targets_T)
    return loss.item() / math.log(2)


def compressor_bits(text: str) -> dict[str, float]:
    """Bits of a text alone in a `gzip -9` and in an `xz -9` file."""
    data = text.encode()
    return {"gzip -9": 8.0 * len(gzip.compress(data, 9, mtime=0)), "xz -9": 8.0 * len(lzma.compress(data, preset=9))}


def measure(texts: Mapping[str, str], methods: Mapping[str, Callable[[str], float]]) -> list[FileBits]:
    """Every text by gzip, xz and each of `methods` (name -> bits of a text)."""
    return [
        FileBits(name, len(text.encode()), compressor_bits(text) | {key: of(text) for key, of in methods.items()})
        for name, text in texts.items()
    ]


def bits_per_byte(files: list[FileBits], method: str) -> float:
    """All bits over all bytes."""
    return sum(file.bits[method] for file in files) / max(1, sum(file.bytes for file in files))


__all__ = ["FileBits", "bits_per_byte", "compressor_bits", "measure", "model_bits"]
