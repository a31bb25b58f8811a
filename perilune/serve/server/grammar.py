"""Grammars of answers, compiled once, and the mask of tokens that a grammar allows next."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate

import torch
import xgrammar

from perilune.chat import Tokenizer
from perilune.errors import Error
from perilune.serve.config import MAX_DRAFTS
from perilune.serve.server.arguments import Format, patterns, reason
from perilune.serve.server.endings import ends
from perilune.serve.server.marks import K2, K3, RESERVED

_LONGEST = 1024  # tokens that the shortest way through a grammar is followed for
_KEPT = 1024  # grammars whose shortest way is remembered
_CACHE = 256 << 20  # bytes of compiled grammars
_ENDS = 4096  # tokens of the ends of a grammar's patterns, all together
_AT_ONCE = 4  # grammars that are compiled at once: a large one takes seconds, and others need not wait for it


@dataclass(frozen=True)
class Grammar:
    """reserve: tokens that are kept for bringing an answer to its end. ends: of its patterns, the shortest first."""

    compiled: xgrammar.CompiledGrammar
    reserve: int
    format: Format
    ends: Sequence[Sequence[int]] = ()


class Grammars:
    """Compiles formats for a tokenizer. vocabulary: of the model, whose masks are that long."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.ends = sorted({tokenizer.eos_id})
        marks = K3 if all(name in tokenizer.specials for name in K3) else K2
        words = [_word(tokenizer, id, marks) for id in range(min(tokenizer.vocab_size, vocabulary))]
        info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.RAW, vocab_size=vocabulary, stop_token_ids=self.ends)
        self._known: dict[bytes, tuple[int, list[list[int]]]] = {}  # reserve and ends
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE)
        self._pool = ThreadPoolExecutor(_AT_ONCE, "perilune-grammar")
        self._encode = tokenizer.encode
        self.vocabulary = vocabulary
        closes = [tokenizer.specials[name] for name in _CLOSES if name in tokenizer.specials]
        brackets = [id for id, word in enumerate(words) if word and set(word) <= set(b"}]")]
        quotes, commas = ([id for id, word in enumerate(words) if word == end] for end in (b'"', b","))
        self.all = self.bits(range(vocabulary))
        # Tokens that bring an answer nearer to its end, the best first: inside a text, and between texts.
        self.over, closing, self.quote = (self.bits(ids) for ids in (self.ends, closes, quotes))
        self.marks = [self.over, closing]
        self.in_text = [self.quote]
        self.between = [self.bits(brackets), self.quote, self.bits(commas)]
        self.both = [self.bits([id for id, word in enumerate(words) if word == end]) for end in (b"}", b"]")]

    async def compile(self, format: Format) -> Grammar:
        """Raises Error for a format that is no grammar."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.compiled, format)

    def compiled(self, format: Format) -> Grammar:
        """As `compile`, in this thread."""
        text = json.dumps({"type": "structural_tag", "format": format})
        try:
            compiled = self._compiler.compile_structural_tag(text)
        except (RuntimeError, ValueError, RecursionError) as problem:
            raise Error(f"grammar cannot be followed: {reason(problem)}") from None
        name = blake2b(text.encode()).digest()
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()  # other threads read it too
            made = self._ends(format)
            known = self._known[name] = 64 + self._shortest(compiled, made) * 3 // 2, made
        return Grammar(compiled, known[0], format, known[1])

    def _ends(self, format: Format) -> list[list[int]]:
        """Tokens of which some complete a pattern of the format wherever it is cut, the shortest first."""
        texts = {end for pattern in patterns(format) for end in ends(pattern) if end}
        made = sorted((self._encode(text) for text in texts), key=lambda tokens: (len(tokens), tokens))
        sums = accumulate(map(len, made))
        return [tokens for tokens, total in zip(made, sums, strict=True) if total <= _ENDS]

    def _shortest(self, compiled: xgrammar.CompiledGrammar, made: Sequence[Sequence[int]]) -> int:
        """Tokens of an answer that is brought to its end from its beginning on."""
        mask, tokens = Mask(self, Grammar(compiled, _LONGEST, {}, made), 0, 0), list[int]()
        while len(tokens) < _LONGEST and not mask.over:
            allowed = mask(tokens)
            (word,) = allowed.nonzero()[:1].flatten().tolist() or [-1]
            if word < 0:
                break
            bits = int(allowed[word])
            tokens.append(32 * word + (bits & -bits).bit_length() - 1)
        return len(tokens)

    def mask(self, grammar: Grammar, prompt: int, max_tokens: int) -> Mask:
        """The mask of one answer."""
        return Mask(self, grammar, prompt, max_tokens)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def bits(self, ids: Sequence[int]) -> torch.Tensor:
        """A mask of these tokens: int32 words [V / 32], the lowest bit first."""
        allowed_V = torch.zeros(-(-self.vocabulary // 32) * 32, dtype=torch.int64)
        allowed_V[list(ids)] = 1
        words = (allowed_V.view(-1, 32) << torch.arange(32)).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


class Mask:
    """Called with all tokens so far: the bits of those that may follow. From the engine's thread.

    Near max_tokens only tokens that bring the answer to its end are allowed, where the grammar allows one: what was
    asked for is then whole, if shorter. ending: whether that took a choice away. stuck: nothing could follow.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar, prompt: int, max_tokens: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._grammars = grammars
        self._prompt = prompt
        self._ends = grammar.ends
        self._seen: list[int] = []
        self._way: list[int] = []  # the answer as far as it was settled, of which `_seen` is a part
        self._last = max_tokens - min(grammar.reserve, max_tokens * 3 // 4)
        self.ending = self.stuck = False

    @property
    def over(self) -> bool:
        """Whether the answer is complete."""
        return bool(self._matcher.is_terminated())

    @cached_property
    def _begun(self) -> torch.Tensor:
        """By which an end may begin. Made when it is needed: 1 ms for a vocabulary of 160,000."""
        return self._grammars.bits([*{end[0] for end in self._ends}])

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        seen, length = self._seen, len(tokens) - self._prompt
        same = min(len(seen), length)
        # Committed tokens stay: only the last ones, which were drafts, can differ from what was seen.
        first = max(0, same - 2 * MAX_DRAFTS)
        same = next((i for i in range(first, same) if seen[i] != tokens[self._prompt + i]), same)
        if same < len(seen):
            self._matcher.rollback(len(seen) - same)
            del seen[same:]
        for i in range(self._prompt + same, len(tokens)):
            if self.over:
                break  # the matcher knows nothing of drafts behind the end
            if not self._matcher.accept_token(tokens[i]):
                return self._grammars.all  # after a draft that cannot be right, nothing matters
            seen.append(tokens[i])
        if self.over:
            return self._grammars.over
        allowed = self._allowed()
        if not allowed.any():
            self.stuck = True
        return self._closing(allowed) if length >= self._last else allowed

    def replay(self, tokens: Sequence[int]) -> None:
        """Look at an answer that was made under another mask of this grammar: sets `ending` and `stuck`."""
        begin = self._prompt + max(0, self._last)
        for end in range(min(begin, len(tokens)), len(tokens) + 1):
            self(tokens[:end])

    def _allowed(self) -> torch.Tensor:
        bits = torch.zeros((1, -(-self._grammars.vocabulary // 32)), dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(bits)
        return bits[0] & self._grammars.all

    def _closing(self, allowed: torch.Tensor) -> torch.Tensor:
        grammars, length = self._grammars, len(self._seen)
        in_text = all((allowed & bracket).any() for bracket in grammars.both)
        for closers in grammars.marks:
            if (closing := allowed & closers).any():
                self.ending |= bool((closing != allowed).any())
                return closing
        if self._way[:length] != self._seen or len(self._way) == length:
            self._way = [*self._seen, *self._end(allowed)]
        if len(self._way) > length:
            self.ending = True
            return grammars.bits([self._way[length]])
        # Both brackets may come next to each other in text only.
        for closers in grammars.in_text if in_text else grammars.between:
            if (closing := allowed & closers).any():
                self.ending |= bool((closing != allowed).any())
                return closing
        # What must follow comes in as few tokens as can be.
        forced = self._matcher.find_jump_forward_tokens()
        return grammars.bits(forced[:1]) if forced else allowed

    def _end(self, allowed: torch.Tensor) -> Sequence[int]:
        """Tokens that complete the pattern that is being written; none where no pattern is."""
        grammars = self._grammars
        if not self._ends or not (allowed & self._begun).any():
            return ()
        for aim in (grammars.marks[0] | grammars.marks[1], grammars.quote & ~allowed):
            for end in self._ends:
                taken = 0
                while taken < len(end) and self._matcher.accept_token(end[taken]):
                    taken += 1
                found = taken == len(end) and bool((self._allowed() & aim).any())
                if taken:
                    self._matcher.rollback(taken)
                if found:
                    return end
        return ()


@dataclass
class Portable:
    """A mask that can be sent to a process where `keep` was called."""

    format: Format
    prompt: int
    max_tokens: int
    mask: Mask | None = None

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        if self.mask is None:
            (grammars,) = _HERE
            self.mask = grammars.mask(grammars.compiled(self.format), self.prompt, self.max_tokens)
        return self.mask(tokens)


_HERE: list[Grammars] = []


def keep(grammars: Grammars) -> None:
    """What `Portable` masks of this process are made with."""
    _HERE[:] = [grammars]


# A section of calls that must come ends the text before it; where it may come, the answer's end is better.
_CLOSES = (
    *("<|close|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "</think>"),
    "<|tool_calls_section_begin|>",
)


def _word(tokenizer: Tokenizer, id: int, marks: Mapping[str, str]) -> bytes:
    """What a token is to a grammar: its text, the mark of a marker; nothing for what no answer has inside."""
    word = tokenizer.token_bytes(id)
    if tokenizer.is_special(id):
        return marks.get(word.decode(), "").encode()
    return b"" if any(byte in word for byte in RESERVED.encode()) else word


__all__ = ["Grammar", "Grammars", "Mask", "Portable", "keep"]
