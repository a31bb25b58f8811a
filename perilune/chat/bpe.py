"""Byte-level BPE: two file formats behind one small interface that knows nothing of special tokens."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import tiktoken
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from perilune.chat.specials import STRUCTURE
from perilune.errors import Error

# Where text may be cut before merges: Han runs; two forms of a cased word (letters other than Han, an optional sign
# before it, an optional English contraction after it); digits by three; punctuation with the line ends after it; line
# ends; spaces before a word's own space; spaces.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_HEAD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_TAIL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_TAIL}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_TAIL}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# Longer text is encoded in pieces: the merge loop is quadratic in a run without a cut, and the regex engine recursive.
PIECE, RUN = 400_000, 25_000
_RUNS = re.compile(r"\s+|\S+")


class Bpe(Protocol):
    """Ordinary text <-> ids 0..size-1; every byte has an id, so any text goes through."""

    @property
    def size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, id_: int) -> bytes: ...

    def save(self, directory: Path, specials: Mapping[str, int]) -> None: ...


class TiktokenBpe:
    """Ranks as in a `*.model` file of tiktoken: one `base64-of-bytes rank` a line."""

    def __init__(self, ranks: dict[bytes, int], name: str = "tiktoken.model") -> None:
        if set(ranks.values()) != set(range(len(ranks))):
            raise Error(f"{name}: the ranks of {len(ranks)} tokens must be 0 to {len(ranks) - 1}, each once")
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise Error(f"{name}: {len(missing)} single bytes have no token, first {missing[0]:#04x}; all 256 must")
        self._ranks = ranks
        self._bytes = [b""] * len(ranks)
        for token, rank in ranks.items():
            self._bytes[rank] = token
        self._encoding = tiktoken.Encoding(
            "perilune", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=len(ranks)
        )

    @classmethod
    def load(cls, path: Path) -> TiktokenBpe:
        """Read a `*.model` file; Error for a line that is not a token and its rank."""
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line:
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise Error(f"{path}:{number}: expected a base64 token and its rank") from None
        return cls(ranks, str(path))

    @property
    def size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def token_bytes(self, id_: int) -> bytes:
        return self._bytes[id_]

    def save(self, directory: Path, specials: Mapping[str, int]) -> None:
        """Write `tiktoken.model`; the names of the special tokens go into tokenizer_config.json, not here."""
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self._bytes)]
        write(directory / "tiktoken.model", b"".join(lines))


class JsonBpe:
    """A Hugging Face tokenizer.json whose model is byte-level BPE, stripped of its added tokens."""

    def __init__(self, spec: dict[str, Any], name: str = "tokenizer.json") -> None:
        self._spec = spec
        model = spec.get("model")
        if (
            not isinstance(model, dict)
            or model.get("type", "BPE") != "BPE"
            or '"ByteLevel"' not in json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")])
        ):
            raise Error(f"{name}: model and pre_tokenizer must be byte-level BPE, which alone can encode any text")
        added = {token["content"] for token in spec.get("added_tokens", ())}
        vocab: dict[str, int] = {token: id_ for token, id_ in model["vocab"].items() if token not in added}
        of_byte = byte_alphabet()
        missing = [byte for byte in range(256) if of_byte[byte] not in vocab]
        if missing:
            raise Error(f"{name}: {len(missing)} single bytes have no token, first {missing[0]:#04x}; all 256 must")
        # Nothing is added on encoding, and an added token left in the model's vocabulary could come out of plain text.
        off: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        plain = {**spec, **off, "model": {**model, "vocab": vocab}}
        byte_of = {char: byte for byte, char in enumerate(of_byte)}
        try:
            self._bytes = {id_: bytes(byte_of[char] for char in token) for token, id_ in vocab.items()}
            self._hf = HfTokenizer.from_str(json.dumps(plain))
        except KeyError as problem:
            raise Error(f"{name}: a token holds {problem}, which is not in the byte alphabet") from None
        except Exception as problem:  # the library raises bare Exception
            raise Error(f"{name}: {problem}") from None

    @property
    def size(self) -> int:
        return max(self._bytes) + 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._hf.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, id_: int) -> bytes:
        return self._bytes.get(id_, b"")

    def save(self, directory: Path, specials: Mapping[str, int]) -> None:
        """Write `tokenizer.json` with the special tokens added, readable by transformers and tokenizers."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [
            {"id": id_, "content": name, **flags, "special": name not in STRUCTURE}
            for name, id_ in sorted(specials.items(), key=lambda item: item[1])
        ]
        text = json.dumps({**self._spec, "added_tokens": added}, ensure_ascii=False, indent=1)
        write(directory / "tokenizer.json", text.encode())


def train(texts: Iterable[str], size: int) -> JsonBpe:
    """Learn a byte-level BPE of at most `size` tokens; fewer when the texts have no more pairs to merge."""
    hf = HfTokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    hf.train_from_iterator((piece for text in texts for piece in pieces(whole(text))), trainer)
    return JsonBpe(json.loads(hf.to_str()))


def pieces(text: str) -> Iterator[str]:
    """Cut text into pieces of <= 400,000 characters without a run of > 25,000 spaces or non-spaces."""
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE]
        if len(piece) <= RUN:
            yield piece
            continue
        cut = 0
        for run in _RUNS.finditer(piece):
            for end in range(run.start() + RUN, run.end(), RUN):
                yield piece[cut:end]
                cut = end
        yield piece[cut:]


def whole(text: str) -> str:
    """Text that UTF-8 can hold: surrogate pairs joined, lone surrogates (from a JSON escape) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@lru_cache(maxsize=1)
def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return tuple(chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256))


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


__all__ = ["PATTERN", "Bpe", "JsonBpe", "TiktokenBpe", "byte_alphabet", "pieces", "train", "whole", "write"]
