"""Arithmetic operations of a model, counted from its config: what MFU is measured with.

Counted is what the method needs, each multiplication and addition as one: the products with weights (only the experts
a token is routed to, so their load does not change the count), KDA in its chunk form, MLA over the tokens a token
really sees, the convolutions, and the mixtures of AttnRes. Recomputation, padding and optimizer are not counted.

Legend: T tokens, C chunk, K key dim, V value dim, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.config import ModelConfig
from perilune.ops.sequences import Sequences
from perilune.sizes import count

_CHUNK = 64
# Dense peaks in operations a second by a part of the device's name (NVIDIA's data sheets, no sparsity).
_PEAKS = {
    "H200": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "H100 80GB HBM3": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "A100": {torch.bfloat16: 312e12, torch.float32: 19.5e12},
}


@dataclass(frozen=True)
class Flops:
    """Operations of one forward pass: a part that grows with tokens, and one with (token, token it sees) pairs."""

    per_token: int
    per_pair: int

    def forward(self, sequences: Sequences) -> int:
        """Of a forward pass over packed documents from their beginning."""
        pairs = sum(n * (n + 1) // 2 for n in sequences.lengths)
        return self.per_token * sequences.total + self.per_pair * pairs

    def train(self, sequences: Sequences) -> int:
        """Of a forward and a backward pass: three times the forward."""
        return 3 * self.forward(sequences)


def count_flops(config: ModelConfig) -> Flops:
    """The counts for a model. Vision is left out."""
    kda, mla = config.kda, config.mla
    width = kda.head_dim
    # Per token and head: two triangles of scores, a triangular solve for keys and values, the inner product with the
    # corrected values; then reading the state for the keys and the queries, and writing it.
    head = _CHUNK * width * 2 + _CHUNK * 2 * width + _CHUNK * width + 6 * width * width
    conv = 3 * kda.num_heads * width * 2 * kda.conv_size
    mixing = 0
    if config.attn_res is not None:
        for layer in range(config.num_layers):
            blocks = layer // config.attn_res.block_size
            # Scores, norms and weighted sum: six operations a source and channel; two mixtures a layer.
            first = blocks + 1 if layer else 0
            mixing += (first + blocks + 2) * 6 * config.hidden_size
        mixing += (2 + (config.num_layers - 1) // config.attn_res.block_size) * 6 * config.hidden_size
    return Flops(
        per_token=2 * count(config).active + len(kda.layers) * (kda.num_heads * head + conv) + mixing,
        per_pair=len(mla.layers) * mla.num_heads * 2 * (mla.qk_head_dim + mla.v_head_dim),
    )


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second the device can do in `dtype`; None where we do not know (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks.get(dtype) for part, peaks in _PEAKS.items() if part in name), None)


__all__ = ["Flops", "count_flops", "device_peak"]
