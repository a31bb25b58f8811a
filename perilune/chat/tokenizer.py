"""Text <-> tokens. Ordinary text never becomes a special token; special tokens come from segments only."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perilune.chat.bpe import Bpe, JsonBpe, TiktokenBpe, pieces, train, whole, write
from perilune.chat.segment import Segment
from perilune.chat.specials import (
    END_OF_TURN,
    FAMILIES,
    K3,
    SPAN,
    STRUCTURE,
    compact_names,
    family_names,
    special_names,
)
from perilune.errors import Error


class Tokenizer:
    """A byte-level BPE vocabulary with special tokens: lossless for any text.

    specials: name -> id of every special token.
    vocab_size: ids run from 0 to vocab_size - 1.
    eos_id: ends an assistant turn (`<|end_of_msg|>`, `<|im_end|>`, else what the files say).
    text_end_id: ends a plain document (`[EOS]`, else eos_id).
    bos_id, pad_id: None where the vocabulary has none. Chat rendering adds no BOS.
    """

    def __init__(self, bpe: Bpe, specials: dict[str, int], eos: str | None = None) -> None:
        self._bpe = bpe
        self.specials = dict(specials)
        self._names = {id_: name for name, id_ in specials.items()}
        self.vocab_size = max(bpe.size, max(self._names, default=-1) + 1)
        ends = [name for name in (*END_OF_TURN, eos, "[EOS]") if name in self.specials]
        if not ends:
            raise Error(f"no token ends a turn: the special tokens hold none of {', '.join(END_OF_TURN)}, [EOS]")
        self.eos_token = str(ends[0])
        self.eos_id = self.specials[self.eos_token]
        self.text_end_id = self.specials.get("[EOS]", self.eos_id)
        self.bos_id = self.specials.get("[BOS]")
        self.pad_id = self.specials.get("[PAD]")

    @classmethod
    def load(cls, path: str | Path, family: str = "k3") -> Tokenizer:
        """Read a tiktoken `*.model` file, a tokenizer.json, or a directory that holds one of them.

        The names of the special tokens beside a `*.model` file come from tokenizer_config.json where it lists them,
        else from `family` ("k3", or "k2" for Kimi-K2 and Kimi-Linear). Error for anything that cannot be read.
        """
        if family not in FAMILIES:
            raise Error(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
        path = Path(path)
        if path.is_dir():
            found = [path / name for name in ("tokenizer.json", "tiktoken.model") if (path / name).is_file()]
            if not found:
                raise Error(f"{path} holds neither tokenizer.json nor tiktoken.model")
            path = found[0]
        if not path.is_file():
            raise Error(f"tokenizer file {path} does not exist")
        config = _read_json(path.with_name("tokenizer_config.json"))
        eos = config.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if path.suffix == ".json":
            spec = _read_json(path)
            names = {token["content"]: int(token["id"]) for token in spec.get("added_tokens", ())}
            return cls(JsonBpe(spec, str(path)), names, eos)
        bpe = TiktokenBpe.load(path)
        listed = config.get("added_tokens_decoder") or {}
        named = {int(id_): token["content"] for id_, token in listed.items()} or family_names(bpe.size, family)
        names = special_names(bpe.size, named)
        if len(names) != SPAN:
            raise Error(f"{path.with_name('tokenizer_config.json')}: added_tokens_decoder names a token twice")
        return cls(bpe, names, eos)

    def encode(self, text: str) -> list[int]:
        """Ordinary tokens of any text; nothing in it is recognised as a special token.

        Surrogates that UTF-8 cannot hold become U+FFFD; everything else comes back from `decode` unchanged.
        """
        text = whole(text)
        return [id_ for piece in pieces(text) for id_ in self._bpe.encode(piece)]

    def encode_segments(self, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
        """Encode segment by segment: (ids, by_model of each id), both of the same length.

        Raises Error for a special segment that is not a special token of this vocabulary.
        """
        ids: list[int] = []
        by_model: list[bool] = []
        for segment in segments:
            if segment.special:
                id_ = self.specials.get(segment.text)
                if id_ is None:
                    raise Error(f"segment {segment.text!r} is not a special token of this vocabulary")
                ids.append(id_)
            else:
                ids += self.encode(segment.text)
            by_model += [segment.by_model] * (len(ids) - len(by_model))
        return ids, by_model

    def token_bytes(self, id_: int) -> bytes:
        """The bytes of one token (a special token: its name). Error for an id outside the vocabulary."""
        if not 0 <= id_ < self.vocab_size:
            raise Error(f"token id {id_} is outside the vocabulary; must be 0 to {self.vocab_size - 1}")
        name = self._names.get(id_)
        if name is not None:
            return name.encode()
        return self._bpe.token_bytes(id_) if id_ < self._bpe.size else b""

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """Concatenated bytes of the tokens.

        skip_special leaves special tokens out, except the markers that give output its structure (open, close, sep).
        """
        return b"".join(self.token_bytes(id_) for id_ in ids if not (skip_special and self.is_hidden(id_)))

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """`decode_bytes` as text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def is_special(self, id_: int) -> bool:
        """Whether an id is a special token."""
        return id_ in self._names

    def is_hidden(self, id_: int) -> bool:
        """Whether `skip_special` leaves this id out."""
        name = self._names.get(id_)
        return name is not None and name not in STRUCTURE

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json (or tiktoken.model) and tokenizer_config.json, which `load` and transformers read."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._bpe.save(directory, self.specials)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        listed = {
            str(id_): {"content": name, **flags, "special": name not in STRUCTURE}
            for id_, name in sorted(self._names.items())
        }
        config: dict[str, object] = {"added_tokens_decoder": listed, "eos_token": self.eos_token}
        for key, name in (("bos_token", "[BOS]"), ("pad_token", "[PAD]"), ("unk_token", "[UNK]")):
            if name in self.specials:
                config[key] = name
        config["clean_up_tokenization_spaces"] = False
        config["model_max_length"] = 1_048_576
        if isinstance(self._bpe, JsonBpe):
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        text = json.dumps(config, ensure_ascii=False, indent=1)
        write(directory / "tokenizer_config.json", text.encode())


class StreamDecoder:
    """Turns ids into text as they come, holding back bytes that are not yet a whole character.

    The pieces, joined, equal `tokenizer.decode` of all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids, self._skip_special))

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE tokenizer of exactly `vocab_size` ids from texts.

    All 256 bytes are tokens, so any text can be encoded; the named special tokens of Kimi-K3 are the last ids, so that
    a small model can speak the same chat format. Ids left over when the texts have too few pairs to merge are reserved
    special tokens. The same texts in the same order give the same vocabulary.

    Raises Error when vocab_size leaves no room for bytes and special tokens.
    """
    least = 256 + len(K3)
    if vocab_size < least:
        raise Error(f"vocab_size is {vocab_size}; must be at least {least} (256 bytes and {len(K3)} special tokens)")
    bpe = train(texts, vocab_size - len(K3))
    return Tokenizer(bpe, compact_names(bpe.size, vocab_size))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as problem:
        raise Error(f"{path}: {problem}") from None
    if not isinstance(value, dict):
        raise Error(f"{path} must hold a JSON object")
    return value


__all__ = ["StreamDecoder", "Tokenizer", "train_bpe"]
