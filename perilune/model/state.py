"""What a sequence leaves behind for its next token: explicit, forkable, and able to forget its last few tokens.

A KDA layer keeps its matrix at a multiple of 64 tokens (never changed once made, so forks share it) and a tail with
the inputs of the tokens since. An MLA layer keeps one latent row a token.

Legend: R tail tokens, H heads, K key dim, V value dim, W conv rows, C conv channels, L latent row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model.paged_rows import PagedRows

GRID = 64
# The longest draft that can be taken back; the tail holds up to 63 + ROLLBACK tokens.
ROLLBACK = 8


def boundary_after(length: int) -> int:
    """The matrix position for a sequence of `length` tokens: on the grid, with ROLLBACK tokens still in the tail."""
    return max(length - ROLLBACK, 0) // GRID * GRID


@dataclass(frozen=True)
class KdaState:
    """One sequence's state of one KDA layer; every tensor is treated as immutable.

    boundary: tokens folded into the matrix, a multiple of 64.
    matrix_HKV: float32 (float64 in a float64 model), None stands for zeros.
    k_RHK, v_RHV, u_RHV, g_RHK, beta_RH: the tail: normalised keys, values, written corrections
        u = beta * (v - S^T k), log decays (nats) and betas. u is None in exact mode, which recomputes the chunk.
    conv_WC: pre-convolution inputs of the last up to 3 + ROLLBACK tokens, channels in the order q, k, v.
    origin: how the matrix was made: "exact" (always the chunk arithmetic), "prefill" (so far), or "decode".
    """

    boundary: int
    matrix_HKV: torch.Tensor | None
    k_RHK: torch.Tensor
    v_RHV: torch.Tensor
    u_RHV: torch.Tensor | None
    g_RHK: torch.Tensor
    beta_RH: torch.Tensor
    conv_WC: torch.Tensor
    origin: Literal["exact", "prefill", "decode"]

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.boundary + self.k_RHK.shape[0]

    def folded(self, matrix_HKV: torch.Tensor, count: int) -> KdaState:
        """The same tokens with the tail's first `count` of them in `matrix_HKV`."""
        return replace(
            self,
            boundary=self.boundary + count,
            matrix_HKV=matrix_HKV,
            k_RHK=self.k_RHK[count:],
            v_RHV=self.v_RHV[count:],
            u_RHV=None if self.u_RHV is None else self.u_RHV[count:],
            g_RHK=self.g_RHK[count:],
            beta_RH=self.beta_RH[count:],
        )

    def rollback(self, count: int) -> KdaState:
        """This state without its last `count` tokens."""
        keep = self.k_RHK.shape[0] - count
        return replace(
            self,
            k_RHK=self.k_RHK[:keep],
            v_RHV=self.v_RHV[:keep],
            u_RHV=None if self.u_RHV is None else self.u_RHV[:keep],
            g_RHK=self.g_RHK[:keep],
            beta_RH=self.beta_RH[:keep],
            conv_WC=self.conv_WC[: self.conv_WC.shape[0] - count],
        )


@dataclass(frozen=True)
class MlaState:
    """One sequence's cache of one MLA layer: rows [normed latent | shared key part], in a buffer with room to grow."""

    buffer_SL: torch.Tensor
    length: int

    @property
    def rows_SL(self) -> torch.Tensor:
        """The valid rows."""
        return self.buffer_SL[: self.length]

    def append(self, rows_TL: torch.Tensor) -> MlaState:
        """The cache with `rows_TL` after its last row; writes into spare room, which only the newest state owns."""
        length = self.length + rows_TL.shape[0]
        buffer = self.buffer_SL
        if length > buffer.shape[0]:
            buffer = torch.empty(max(length, 2 * buffer.shape[0], 64), rows_TL.shape[1]).to(rows_TL)
            buffer[: self.length] = self.rows_SL
        buffer[self.length : length] = rows_TL
        return MlaState(buffer, length)

    def rollback(self, count: int) -> MlaState:
        """The cache without its last `count` rows."""
        return replace(self, length=self.length - count)

    def fork(self) -> MlaState:
        """A copy with rows of its own."""
        return MlaState(self.rows_SL.clone(), self.length)


LayerState = KdaState | MlaState | PagedRows


@dataclass
class SequenceState:
    """All layers' states of one sequence; a model call with `state=[...]` advances it by the call's tokens.

    exact: compute every token by the chunk arithmetic of prefill, so that, with `Parts` EXACT, logits are the same
        bits from any split of the sequence into calls.
    """

    layers: list[LayerState]
    exact: bool = False
    _floor: int = field(default=0, repr=False)

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        exact: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> SequenceState:
        """The state before the first token. dtype is the model's; KDA matrices are at least float32."""
        return cls([_empty_layer(config, layer, exact, device, dtype) for layer in range(config.num_layers)], exact)

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.layers[0].length

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens. Raises Error beyond ROLLBACK tokens before the longest length reached."""
        self._floor = max(self._floor, self.length - ROLLBACK)
        if count < 0 or self.length - count < max(self._floor, 0):
            raise Error(f"rollback of {count} tokens at length {self.length}; allowed: 0..{self.length - self._floor}")
        self.layers = [layer.rollback(count) for layer in self.layers]

    def fork(self) -> SequenceState:
        """An independent continuation from this token: KDA tensors are shared, MLA rows copied."""
        layers = [layer.fork() if isinstance(layer, MlaState) else layer for layer in self.layers]
        return SequenceState(layers, self.exact, self._floor)

    def advance(self, layers: Sequence[LayerState]) -> None:
        """Replace every layer's state by its successor."""
        self.layers = list(layers)
        self._floor = max(self._floor, self.length - ROLLBACK)


def _empty_layer(
    config: ModelConfig, layer: int, exact: bool, device: torch.device | str, dtype: torch.dtype
) -> LayerState:
    def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=kind)

    if config.is_mla(layer):
        return MlaState(zeros(0, config.mla.kv_lora_rank + config.mla.qk_rope_head_dim), 0)
    heads, dim = config.kda.num_heads, config.kda.head_dim
    wide = torch.promote_types(dtype, torch.float32)
    return KdaState(
        boundary=0,
        matrix_HKV=None,
        k_RHK=zeros(0, heads, dim, kind=wide),
        v_RHV=zeros(0, heads, dim, kind=wide),
        u_RHV=None if exact else zeros(0, heads, dim, kind=wide),
        g_RHK=zeros(0, heads, dim, kind=wide),
        beta_RH=zeros(0, heads, kind=wide),
        conv_WC=zeros(0, 3 * heads * dim),
        origin="exact" if exact else "prefill",
    )
