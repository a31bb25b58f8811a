"""The forward of KDA on the GPU: K1 `prepare` (chunks in parallel), K2 `scan` (serial over chunks), and their order.

Long batches are cut into pieces: while K2 walks one piece on a second stream, K1 prepares the next. That saves the
waves of programs that do not fill the GPU, and what K1 hands over needs memory for a few pieces only.

Legend: T tokens, N sequences, H heads, K key dim, V value dim, C rows of a chunk (64), X chunks of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

import torch

from perilune.config import Gate
from perilune.ops.kda.triton_fold import fold_kernel
from perilune.ops.kda.triton_layout import Layout, Piece, Tiles, pieces
from perilune.ops.kda.triton_prepare import prepare_kernel
from perilune.ops.kda.triton_scan import scan_kernel
from perilune.ops.kda.triton_streams import Streams

EPS = 1e-6
# Token-heads of a piece, and how many pieces' worth of K1's results are in memory at once.
PIECE, RING = 96 * 8192, 3
# Of a walk that leaves only states: two programs a multiprocessor, where more results take the memory of one.
MAP_REGISTERS = 128


@dataclass(frozen=True)
class Inputs:
    """The raw tensors of one call and where its chunks lie."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    gate: Gate
    layout: Layout

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """N, X, T, H, K, V."""
        T, H, K = self.q.shape
        return len(self.layout.shift), self.layout.chunks, T, H, K, self.v.shape[2]

    @property
    def lower_bound(self) -> float:
        return 0.0 if self.gate.lower_bound is None else self.gate.lower_bound

    def part(self, piece: Piece) -> Inputs:
        rows = {name: getattr(self, name)[piece.tokens] for name in ("q", "k", "v", "g", "beta")}
        return replace(self, layout=piece.layout, **rows)


@dataclass(frozen=True)
class Prepared:
    """What K1 hands to the scans: -w, q~, k- [X, H, C, K]; A beta, P [X, H, C, C].

    In float32: e^(G_C) [X, H, K]; 1 / |k| and K^-0.5 / |q| of each row [X, H, 2, C].
    """

    w: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    A: torch.Tensor
    P: torch.Tensor
    decay: torch.Tensor
    norms: torch.Tensor

    def part(self, chunks: slice) -> Prepared:
        return Prepared(*(getattr(self, field.name)[chunks] for field in fields(self)))


@dataclass(frozen=True)
class Scanned:
    """What K2 returns: outputs, final and requested states, and, if kept, each chunk's entry state S^T and U."""

    o: torch.Tensor | None
    final: torch.Tensor
    states: torch.Tensor | None
    S: torch.Tensor | None
    U: torch.Tensor | None

    def part(self, piece: Piece) -> Scanned:
        def cut(x: torch.Tensor | None, where: slice) -> torch.Tensor | None:
            return None if x is None else x[where]

        S, U = cut(self.S, piece.chunks), cut(self.U, piece.chunks)
        return Scanned(cut(self.o, piece.tokens), self.final[piece.sequences], self.states, S, U)


@lru_cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def prepare_name(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> Literal["hopper", "triton"]:
    """Which K1 runs: the Gluon kernel where its fixed layout fits, the plain Triton kernel elsewhere."""
    if not (is_hopper(q.device) and q.shape[2] == 128):
        return "triton"
    vectors = all(x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 for x in (q, k, g))
    same = all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in (q, k, g))
    return "hopper" if vectors and same else "triton"


def scan_name(v: torch.Tensor, K: int) -> Literal["hopper", "triton"]:
    """Which K2 runs: the Gluon kernel where sizes fit and the tensor memory accelerator can read v."""
    if not (is_hopper(v.device) and v.dtype == torch.bfloat16 and K == v.shape[2] == 128):
        return "triton"
    rows = v.stride(2) == 1 and v.stride(1) == 128 and v.stride(0) % 8 == 0
    return "hopper" if rows and v.data_ptr() % 16 == 0 else "triton"


def room(x: Inputs, X: int) -> Prepared:
    """Memory for what K1 writes for X chunks."""
    _, _, _, H, K, _ = x.sizes
    w, q, k = x.q.new_empty(3, X, H, 64, K).unbind()
    A, P = x.q.new_empty(2, X, H, 64, 64).unbind()
    decay = x.q.new_empty(X, H, K, dtype=torch.float32)
    return Prepared(w, q, k, A, P, decay, decay.new_empty(X, H, 2, 64))


def prepare(x: Inputs, out: Prepared | None = None) -> Prepared:
    """K1 over all chunks and heads (into `out`, if given)."""
    _, X, _, H, K, _ = x.sizes
    out = room(x, X) if out is None else out
    results = (out.w, out.q, out.k, out.A, out.P, out.decay, out.norms)
    tensors = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.layout.table, *results)
    scalars = (K**-0.5, x.lower_bound, EPS, H)
    safe = x.gate.mode == "safe"
    if X and prepare_name(x.q, x.k, x.g) == "hopper":
        from perilune.ops.kda.triton_prepare_hopper import prepare_hopper_kernel

        strides = (*x.q.stride()[:2], *x.k.stride()[:2], *x.g.stride()[:2], *x.beta.stride())
        same = x.q.stride() == x.k.stride() == x.g.stride()
        options = {"SAME": same, "SAFE": safe, "num_warps": 4}
        # 168 registers leave room for three programs a multiprocessor.
        prepare_hopper_kernel[(X * H,)](*tensors, *strides, *scalars, **options, maxnreg=168)
    elif X:
        strides = (*x.q.stride(), *x.k.stride(), *x.g.stride(), *x.beta.stride())
        prepare_kernel[(X * H,)](*tensors, *strides, *scalars, K=K, B=min(K, 32), SAFE=safe, num_warps=4)
    return out


def outputs(x: Inputs, N: int, V: int, output: bool, slots: int | None, keep: bool) -> Scanned:
    """Memory for what K2 writes."""
    _, X, T, H, K, _ = x.sizes
    final = x.q.new_empty(N, H, K, V, dtype=torch.float32)
    return Scanned(
        o=x.v.new_empty(T, H, V) if output else None,
        final=final,
        states=None if slots is None else final.new_empty(slots, H, K, V),
        S=x.q.new_empty(X, H, V, K) if keep else None,
        U=x.q.new_empty(X, H, 64, V) if keep else None,
    )


def scan(
    x: Inputs,
    p: Prepared,
    initial: torch.Tensor | Literal["identity"] | None,
    slots: torch.Tensor | None = None,
    slot_count: int = 0,
    output: bool = True,
    keep: bool = False,
    lay: Layout | None = None,
    out: Scanned | None = None,
) -> Scanned:
    """K2 over all sequences (of `lay`, if given); an initial "identity" walks them without v, on a square state.

    `out`: where to write; its final state may be the initial one. Which results are wanted follows from it then.
    """
    _, X, _, H, K, V = x.sizes
    lay = x.layout if lay is None else lay
    N = len(lay.shift)
    values = not isinstance(initial, str)
    V = V if values else K
    if out is None:
        out = outputs(x, N, V, output, None if slots is None else slot_count, keep)
    if not N:
        return out
    given = initial if isinstance(initial, torch.Tensor) else None
    tensors = (out.o, given, out.final, out.states, out.S, out.U, lay.first_chunk, lay.cu, lay.shift, slots)
    options = {
        "INITIAL": "identity" if not values else "zero" if given is None else "given",
        "VALUES": values,
        "OUTPUT": out.o is not None,
        "STATES": slots is not None,
        "KEEP": out.S is not None,
    }
    if X and scan_name(x.v, K) == "hopper":
        from perilune.ops.kda.triton_scan_hopper import descriptors, scan_hopper_kernel

        # Registers a thread at launch; the multiplying warps take over most of the loading warps'.
        registers = MAP_REGISTERS if out.o is None and out.S is None else 168
        scan_hopper_kernel[(2 * H * N,)](*descriptors(p, x.v), *tensors, H, **options, num_warps=4, maxnreg=registers)
    else:
        BV = min(64, V)
        operands = (p.w, p.q, p.k, p.A, p.P, p.decay, x.v)
        scan_kernel[(V // BV * H * N,)](
            *operands, *tensors, *x.v.stride(), H, K=K, V=V, BV=BV, **options, STAGES=3, num_warps=4
        )
    return out


def maps(x: Inputs, p: Prepared, lay: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """M [N, H, K, K] and B [N, H, K, V] of the sequences of `lay`: S -> M S + B. The two walks run side by side."""
    _, _, _, _, K, V = x.sizes
    N = len(lay.shift)
    M, B = (outputs(x, N, width, False, None, False) for width in (K, V))
    streams = Streams(x.q.device)
    with streams.scanning():
        scan(x, p, "identity", lay=lay, out=M)
    scan(x, p, None, lay=lay, out=B)
    streams.join()
    return M.final, B.final


def scan_segmented(
    x: Inputs,
    p: Prepared,
    initial: torch.Tensor | None,
    tiles: Tiles,
    marks: torch.Tensor | None,
    slots: torch.Tensor | None,
    slot_count: int,
    keep: bool,
) -> Scanned:
    """K2 over 1024-token tiles at once: each tile as a map S -> M S + B, the maps folded in order, then the outputs.

    States at the end of a whole tile are those of the fold, as the next tile's entry is: a cut there changes no bit.
    """
    N, _, _, H, K, V = x.sizes
    M, B = maps(x, p, tiles.layout)
    entry, after = torch.empty_like(B), torch.empty_like(B)
    if len(B):
        BV = min(32, V)
        fold_kernel[(V // BV * H * N,)](
            M, B, initial, entry, after, tiles.first_tile, H,
            K=K, V=V, BV=BV, BK=min(32, K), INITIAL=initial is not None, num_warps=4,
        )  # fmt: skip
    out = scan(x, p, entry, slots, slot_count, keep=keep, lay=tiles.layout)
    final = out.final[tiles.last] if len(B) else B.new_empty(N, H, K, V)
    final[tiles.whole[0]] = after[tiles.whole[1]]
    if initial is None:
        final.index_fill_(0, tiles.empty, 0.0)
    else:
        final[tiles.empty] = initial[tiles.empty]
    if out.states is not None and marks is not None:
        out.states[marks[0]] = after[marks[1]]
    return replace(out, final=final)


def forward(
    x: Inputs,
    initial: torch.Tensor | None,
    slots: torch.Tensor | None = None,
    slot_count: int = 0,
    output: bool = True,
    keep: bool = False,
    hold: bool = True,
    size: int | None = None,
) -> tuple[Prepared | None, Scanned]:
    """K1 and K2 in order, in pieces of `size` tokens where that is faster; K1's results are returned if `hold`."""
    N, X, _, _, _, V = x.sizes
    size = piece_size(x) if size is None else size
    if size is None:
        p = prepare(x)
        return p, scan(x, p, initial, slots, slot_count, output, keep)
    out = outputs(x, N, V, output, None if slots is None else slot_count, keep)
    if initial is None:
        out.final.zero_()
    else:
        out.final.copy_(initial)
    parts = pieces(x.layout.lengths, x.layout.starts, size, x.q.device)
    most = max(part.layout.chunks for part in parts)
    ring = not hold and RING * most < X
    p = room(x, RING * most if ring else X)
    streams = Streams(x.q.device)
    for i, piece in enumerate(parts):
        at = slice(i % RING * most, i % RING * most + piece.layout.chunks) if ring else piece.chunks
        part, prepared, scanned = x.part(piece), p.part(at), out.part(piece)
        if ring and i >= RING:
            streams.wait_for_scan(i - RING)
        prepare(part, prepared)
        with streams.scanning():
            some = None if slots is None else slots[piece.chunks]
            scan(part, prepared, scanned.final, some, out=scanned)
    streams.join()
    return p if hold else None, out


def piece_size(x: Inputs) -> int | None:
    """Tokens of a piece, or None where one piece is best."""
    _, _, T, H, _, _ = x.sizes
    return max(PIECE // H // 64, 1) * 64 if x.q.is_cuda and T * H >= 2 * PIECE else None
