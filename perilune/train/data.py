"""Packed training batches: text -> tokens -> pieces -> mixture -> batches of a fixed number of tokens.

Every stage is a function of its settings and of a small state of plain numbers, so a run continues at exactly the
token where it stopped. Legend: T tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from perilune.chat import Segment, render
from perilune.errors import Error
from perilune.ops.sequences import Sequences
from perilune.train.config import DataConfig
from perilune.train.files import Document, find_files, place, read_documents


class Encoder(Protocol):
    """What is needed of `perilune.chat.Tokenizer`."""

    bos_id: int | None
    text_end_id: int

    def encode(self, text: str) -> list[int]: ...

    def encode_segments(self, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]: ...


@dataclass(frozen=True)
class Batch:
    """T packed tokens: the model reads tokens_T and predicts targets_T where mask_T is true.

    bytes: UTF-8 bytes of the text that the counted targets stand for (known for held-out data, else 0).
    """

    tokens_T: Tensor
    targets_T: Tensor
    mask_T: Tensor
    sequences: Sequences
    bytes: int = 0

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        tokens_T, targets_T, mask_T = (t.to(device) for t in (self.tokens_T, self.targets_T, self.mask_T))
        return Batch(tokens_T, targets_T, mask_T, self.sequences.to(device), self.bytes)


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document: what is read, what follows each, and whether that counts."""

    tokens: list[int]
    targets: list[int]
    mask: list[bool]

    def split(self, count: int) -> tuple[Piece, Piece]:
        """The first `count` tokens and the others."""
        head = Piece(self.tokens[:count], self.targets[:count], self.mask[:count])
        return head, Piece(self.tokens[count:], self.targets[count:], self.mask[count:])


def encode_document(content: str | dict[str, Any], tokenizer: Encoder) -> tuple[Piece, int]:
    """One document as one piece, and the bytes of text its counted targets stand for.

    Text is BOS (the end token where there is none), tokens, end: the first token is predicted too, from BOS. A chat
    is rendered by `perilune.chat.render` and only what the model wrote counts.
    """
    if isinstance(content, str):
        end = tokenizer.text_end_id
        ids = [end if tokenizer.bos_id is None else tokenizer.bos_id, *tokenizer.encode(content), end]
        return Piece(ids[:-1], ids[1:], [True] * (len(ids) - 1)), len(content.encode())
    segments = render(content["messages"], content.get("tools"), add_generation_prompt=False)
    ids, mask = tokenizer.encode_segments(segments)
    return Piece(ids[:-1], ids[1:], mask[1:]), sum(len(s.text.encode()) for s in segments if s.by_model)


def _encode(document: Document, path: Path, tokenizer: Encoder) -> tuple[Piece, int]:
    """`encode_document` of a document of the file `path`, which an Error then names."""
    try:
        return encode_document(document.content, tokenizer)
    except Error as cause:
        raise Error(f"data: {place(path, document.offset)}: {cause}") from cause


def cut(piece: Piece, limit: int) -> list[Piece]:
    """The piece in parts of at most `limit` tokens; parts in which nothing counts are left out."""
    parts = []
    while piece.tokens:
        head, piece = piece.split(limit)
        if any(head.mask):
            parts.append(head)
    return parts


def pack(pieces: Sequence[Piece], size: int = 0) -> Batch:
    """Pieces one after the other as one batch; each is a sequence of its own."""
    return Batch(
        torch.tensor([t for piece in pieces for t in piece.tokens], dtype=torch.int64),
        torch.tensor([t for piece in pieces for t in piece.targets], dtype=torch.int64),
        torch.tensor([m for piece in pieces for m in piece.mask], dtype=torch.bool),
        Sequences.from_lengths(len(piece.tokens) for piece in pieces),
        size,
    )


class Source:
    """The pieces of one path, for ever: epoch after epoch, files shuffled, pieces shuffled within windows."""

    def __init__(self, path: str | Path, tokenizer: Encoder, limit: int, window: int, seed: int) -> None:
        self.path, self.files = path, find_files(path)
        self.known = _fingerprint(Path(path), self.files)
        self.tokenizer, self.limit, self.window, self.seed = tokenizer, limit, window, seed
        # Where the current window begins (file counted in the epoch's order), and how many of its pieces are used.
        self.epoch, self.file, self.offset, self.used = 0, 0, 0, 0
        self._open()

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain numbers, and of which files it is."""
        place = {"epoch": self.epoch, "file": self.file, "offset": self.offset, "used": self.used}
        return place | {"files": self.known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` returned. Raises Error if it is of other files."""
        if state.get("files", self.known) != self.known:
            raise Error(
                f"data: {self.path} holds other files, or files of other sizes, than when the position was saved, so "
                "documents would be left out or repeated; put the old ones back, or start a new run"
            )
        self.epoch, self.file, self.offset = state["epoch"], state["file"], state["offset"]
        self._open()
        self.used = state["used"]

    def __next__(self) -> Piece:
        while self.used >= len(self.pieces):
            self.epoch, self.file, self.offset = self.next_window
            self._open()
        self.used += 1
        return self.pieces[self.used - 1]

    def _open(self) -> None:
        """Read the window that begins at the current position, and note where the next one does."""
        epoch, file, offset = self.epoch, self.file, self.offset
        order = list(range(len(self.files)))
        if self.window > 1:
            random.Random(f"files {self.seed} {epoch}").shuffle(order)
        pieces: list[Piece] = []
        while file < len(order) and len(pieces) < self.window:
            path = self.files[order[file]]
            for document in read_documents(path, offset):
                pieces += cut(_encode(document, path, self.tokenizer)[0], self.limit)
                offset = document.next_offset
                if len(pieces) >= self.window:
                    break
            else:
                file, offset = file + 1, 0
        if not pieces and self.file == self.offset == 0:
            raise Error(f"data: {self.path} holds no text to train on")
        if self.window > 1:
            random.Random(f"pieces {self.seed} {epoch} {self.file} {self.offset}").shuffle(pieces)
        self.pieces, self.used = pieces, 0
        self.next_window = (epoch, file, offset) if file < len(order) else (epoch + 1, 0, 0)


class Batches:
    """An endless iterator of training batches of exactly `batch_tokens` tokens.

    Sources take turns so that each one's share of the tokens stays as close as can be to its weight. A piece that
    does not fit is cut, and its rest begins the next batch as a sequence of its own. Raises Error for missing paths,
    empty folders, unreadable files (when they are reached) and paths without text.
    """

    def __init__(self, config: DataConfig, tokenizer: Encoder, seed: int = 0) -> None:
        if not config.train:
            raise Error("data.train is empty; name at least one file or folder")
        self.size = config.batch_tokens
        self.weights = config.weights or (1.0,) * len(config.train)
        self.sources = [
            Source(path, tokenizer, config.sequence_tokens, config.shuffle_pieces, seed + i)
            for i, path in enumerate(config.train)
        ]
        self.given = [0] * len(self.sources)
        self.rest: Piece | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        pieces: list[Piece] = []
        room = self.size
        while room:
            head, rest = (self.rest or self._draw()).split(room)
            # A part in which nothing counts would be computed for nothing, and could be all of a step.
            self.rest = rest if any(rest.mask) else None
            if any(head.mask):
                pieces.append(head)
                room -= len(head.tokens)
        return pack(pieces)

    def _draw(self) -> Piece:
        chosen = min(range(len(self.sources)), key=lambda i: self.given[i] / self.weights[i])
        piece = next(self.sources[chosen])
        self.given[chosen] += len(piece.tokens)
        return piece

    def state_dict(self) -> dict[str, Any]:
        """The exact position, as plain numbers and lists (JSON)."""
        rest = None if self.rest is None else [self.rest.tokens, self.rest.targets, self.rest.mask]
        return {"sources": [s.state_dict() for s in self.sources], "given": list(self.given), "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position that `state_dict` returned. Raises Error if it is of another number of sources."""
        if len(state["sources"]) != len(self.sources):
            raise Error(f"data: the position is of {len(state['sources'])} sources; data.train has {len(self.sources)}")
        if len(state["given"]) != len(self.sources):
            raise Error(f"data: the position counts {len(state['given'])} sources; data.train has {len(self.sources)}")
        for source, inner in zip(self.sources, state["sources"], strict=True):
            source.load_state_dict(inner)
        self.given = list(state["given"])
        self.rest = None if state["rest"] is None else Piece(*state["rest"])


def _fingerprint(root: Path, files: Sequence[Path]) -> str:
    """Of the files' names below `root` and of their sizes."""
    names = ((file.relative_to(root).as_posix(), file.stat().st_size) for file in files)
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]


def held_out_batches(config: DataConfig, tokenizer: Encoder) -> Iterator[Batch]:
    """The held-out documents in the order of their files, whole, up to the one that reaches `held_out_tokens`.

    Pieces of at most `sequence_tokens` are packed uncut into batches of at most `batch_tokens`. Each batch carries the
    bytes of the documents that end in it. Raises Error as `Batches`.
    """
    limit = min(config.sequence_tokens, config.batch_tokens)
    waiting: list[Piece] = []
    total = filled = size = 0
    files = (file for path in config.held_out for file in find_files(path))
    for file, document in ((f, d) for f in files for d in read_documents(f)):
        whole, length = _encode(document, file, tokenizer)
        for piece in cut(whole, limit):
            if filled + len(piece.tokens) > config.batch_tokens:
                yield pack(waiting, size)
                waiting, filled, size = [], 0, 0
            waiting.append(piece)
            filled += len(piece.tokens)
        size += length
        total += len(whole.tokens)
        if total >= config.held_out_tokens:
            break
    if waiting:
        yield pack(waiting, size)


__all__ = ["Batch", "Batches", "Encoder", "Piece", "encode_document", "held_out_batches", "pack"]
