"""A short piece of one prompt as a step of fixed shapes: where it lies is on the device, so it can be a CUDA graph.

The piece's tokens are the last rows of a bucket; the rows before them are padding, a document of its own whose state is
thrown away. KDA runs its chunks from index tensors of the bucket's size. MLA attends in the absorbed form, sixteen rows
as one sequence of `ops.mla.paged_attention`, which reads each row's whole past through the table.

Legend: T rows of the bucket, X chunks, H heads, K key and value dim, C convolution channels, N = 2 documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.model.kda import KdaLayer
from perilune.ops import kda as kda_ops
from perilune.ops.conv import short_conv
from perilune.ops.kda.prepare import Raw
from perilune.ops.sequences import Sequences

GRID = 64
ROWS = 16  # of a sequence of the absorbed form


@dataclass(frozen=True)
class Piece:
    """tokens of a prompt from position `start` on, in a bucket of `rows`; export: a position inside whose state is
    wanted, on the grid, or None."""

    rows: int
    tokens: int
    start: int
    export: int | None = None

    @property
    def padding(self) -> int:
        return self.rows - self.tokens

    def numbers(self) -> list[int]:
        """What `Static.of` takes apart: cu [3], first_chunk [3], shift [2], table [X, 3], slots [X], window [3]."""
        shift, count, padding = self.start % GRID, chunks(self.rows), self.padding
        mine = [-(-padding // GRID), -(-(shift + self.tokens) // GRID)]
        table = [(GRID * i, 0, padding) for i in range(mine[0])]
        table += [(padding - shift + GRID * i, padding, self.rows) for i in range(mine[1])]
        slots = [-1] * count
        window = [3, 4, 5]
        if self.export is not None:
            slots[mine[0] + (self.export - self.start // GRID * GRID) // GRID - 1] = 0
            # Of [the window before, the bucket's rows].
            window = [
                p - self.start + 3 + (padding if p >= self.start else 0) for p in range(self.export - 3, self.export)
            ]
        table += table[-1:] * (count - len(table))  # computed and not used; kernels read some row of every chunk
        return [
            *(0, padding, self.rows),
            *(0, mine[0], sum(mine)),
            *(0, shift),
            *(x for row in table for x in row),
            *slots,
            *window,
        ]

    def lengths(self) -> list[int]:
        """Of each sixteen rows: cached tokens up to the last of them; 0 where all lie before the document."""
        ends = range(self.start - self.padding + ROWS, self.start + self.tokens + 1, ROWS)
        return [max(end, 0) for end in ends]


def chunks(rows: int) -> int:
    """X: either document may begin and end inside a chunk."""
    return rows // GRID + 2


def size(rows: int) -> int:
    """How many numbers a `Piece` of so many rows has."""
    return 8 + 4 * chunks(rows) + 3


class Documents(Sequences):
    """Padding and piece as two documents whose lengths are on the device. Equal to itself alone."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @classmethod
    def of(cls, rows: int, cu_3: torch.Tensor) -> Documents:
        found = cls((0, rows), (0, 0), cu_3.device)
        ids_T = (torch.arange(rows, device=cu_3.device) >= cu_3[1]).long()
        # In the place of what the base class would compute from the host's numbers.
        found.__dict__.update(cu_seqlens=cu_3.int(), ids_T=ids_T)
        return found


@dataclass(frozen=True)
class Static:
    """The index tensors of a piece."""

    documents: Documents
    cu_3: torch.Tensor
    first_3: torch.Tensor
    shift_2: torch.Tensor
    table_X3: torch.Tensor
    slots_X: torch.Tensor
    window_3: torch.Tensor

    @classmethod
    def of(cls, rows: int, numbers: torch.Tensor) -> Static:
        """numbers: int64, on the device."""
        count = chunks(rows)
        cu_3, first_3, shift_2, table, slots_X, window_3 = numbers.split([3, 3, 2, 3 * count, count, 3])
        documents = Documents.of(rows, cu_3)
        return cls(documents, cu_3, first_3.int(), shift_2.int(), table.view(count, 3), slots_X.int(), window_3)


def static_kda(
    attn: KdaLayer,
    u_TC: torch.Tensor,
    g_raw_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    matrix_HKV: torch.Tensor,
    window_3C: torch.Tensor,
    static: Static,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """(o_THV, the matrix and window after the piece, those at the export), from the matrix and window before it."""
    before_N3C = window_3C.expand(2, -1, -1).contiguous()
    conv_TC, window_N3C = short_conv(u_TC, attn.conv_CW, static.documents, before_N3C)
    q_THK, k_THK, v_THK = (x.unflatten(-1, (attn.heads, attn.dim)) for x in conv_TC.chunk(3, dim=-1))
    raw = Raw(q_THK, k_THK, v_THK, g_raw_THK, beta_TH.contiguous(), attn.A_log_H, attn.dt_bias_HK)
    initial_NHKV = matrix_HKV.expand(2, -1, -1, -1).contiguous()
    if kda_ops.implementation(q_THK, v_THK) == "triton":
        o_THV, final_NHKV, export_HKV = _kernels(attn, raw, initial_NHKV, static)
    else:
        o_THV, final_NHKV, export_HKV = _reference(attn, raw, initial_NHKV, static)
    exported = export_HKV, torch.cat([window_3C, u_TC])[static.window_3]
    return o_THV, final_NHKV[1], window_N3C[1], exported


def _kernels(
    attn: KdaLayer, raw: Raw, initial_NHKV: torch.Tensor, static: Static
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from perilune.ops.kda.triton_forward import Inputs, forward
    from perilune.ops.kda.triton_layout import Layout

    count = len(static.slots_X)
    cut = static.documents
    layout = Layout(cut.lengths, cut.starts, count, static.table_X3, static.cu_3, static.first_3, static.shift_2)
    small = (raw.A_log_H.float().contiguous(), raw.dt_bias_HK.float().contiguous())
    inputs = Inputs(*raw[:5], *small, attn.gate, layout)
    _, out = forward(inputs, initial_NHKV.float(), static.slots_X, 1, hold=False)
    assert out.o is not None
    assert out.states is not None
    return out.o, out.final, out.states[0]


def _reference(
    attn: KdaLayer, raw: Raw, initial_NHKV: torch.Tensor, static: Static
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same from numbers that are read back, for machines without the kernels."""
    padding, rows = static.cu_3[1:].tolist()
    shift = int(static.shift_2[1])
    cut = Sequences.from_lengths([padding, rows - padding], [0, shift], raw[0].device)
    slot = [i for i, x in enumerate(static.slots_X.tolist()) if x == 0]
    marks = [GRID * (i + 1 - int(static.first_3[1])) for i in slot]
    wanted = ((), tuple(marks)) if marks else None
    o_THV, final_NHKV, *states = kda_ops.kda(*raw, attn.gate, initial_NHKV, cut, wanted)
    return o_THV, final_NHKV, states[0][0] if states else torch.full_like(final_NHKV[1], float("nan"))


__all__ = ["ROWS", "Documents", "Piece", "Static", "chunks", "size", "static_kda"]
