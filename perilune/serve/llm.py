"""A checkpoint that answers: prompts or token ids in, answers out, in one call or token by token.

llm = LLM("checkpoint")
[answer] = llm.generate(["def main():"], max_tokens=50, temperature=0)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from perilune.chat import StreamDecoder, Tokenizer
from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Reader, Transformer
from perilune.serve import control
from perilune.serve.answer import Answer, Stream
from perilune.serve.config import EngineConfig
from perilune.serve.engine import Engine, Hold
from perilune.serve.errors import EngineError
from perilune.serve.loading import Loaded, load_whole, report
from perilune.serve.request import Output, Params, token_ids
from perilune.serve.segment import Segment
from perilune.serve.speculate import Drafter

if TYPE_CHECKING:
    from perilune.serve.ranks import Ranks

Prompt = str | Sequence[int]


_DEFAULT = Params()


class LLM:
    """A model with its engine. checkpoint: a folder with weights and (for text) a tokenizer, or a Transformer.

    config: None serves on a quarter of the free memory. device: "auto" takes a GPU if there is one. dtype: None keeps
    that of the files. packed: experts that are stored as MXFP4 stay so in memory. reader: as in `perilune.model.load`.
    ranks: processes that share the model, on as many GPUs; this one starts and leads the others, and needs `config`,
    whose sizes are of each rank, and a folder that all can read. `close` ends them. loaded: what each read, how fast.
    Raises Error as `Engine`, `perilune.model.load` and `Tokenizer.load` do.
    """

    def __init__(
        self,
        checkpoint: str | Path | Transformer,
        config: EngineConfig | None = None,
        *,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | None = None,
        packed: bool = False,
        ranks: int = 1,
        reader: Reader = "safetensors",
    ) -> None:
        model = checkpoint if isinstance(checkpoint, Transformer) else None
        self.loaded = list[Loaded]()
        if not isinstance(checkpoint, Transformer):
            tokenizer = tokenizer or tokenizer_of(checkpoint)
            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            if ranks == 1:
                model, mine = load_whole(checkpoint, torch.device(device), dtype, packed, reader)
                self.loaded = [mine]
        self._ranks = None
        if ranks != 1:
            self._ranks = _start(checkpoint, config, ranks, device, dtype, packed, reader)
            model, config = self._ranks.model, self._ranks.config
            self.loaded = self._ranks.loaded
        report(self.loaded)
        assert model is not None
        self.tokenizer = tokenizer
        config = config or EngineConfig(_quarter(model.lm_head.weight.device))
        try:
            self.engine = Engine(model, config, drafter, ranks=self._ranks)
        except BaseException:
            self.close()
            raise
        self._streams: dict[int, Stream] = {}
        self._kept: tuple[list[tuple[str, Output]], list[Answer]] = ([], [])

    # --- answers

    def generate(
        self, prompts: Sequence[Prompt], params: Params | Sequence[Params] | None = None, **options: Any
    ) -> list[Answer]:
        """Answers to all prompts, in their order. params: one for all or one each; or its fields as `options`.

        A text begins with the beginning-of-sequence token and ends at the end-of-sequence token; token ids are taken
        as they are. Raises Error for a prompt that cannot be served, before anything is computed.
        """
        if options.get("remote"):
            raise Error("remote is True; allowed: in add, since generate would wait for itself")
        ids = self._add_all(prompts, params, options)
        answers: dict[int, Answer] = {}
        try:
            while len(answers) < len(ids):
                answers |= {answer.id: answer for answer in self._step_for(set(ids))[1]}
        except BaseException:
            self._forget(ids)
            raise
        return [answers[id] for id in ids]

    def stream(self, prompt: Prompt, params: Params | None = None, **options: Any) -> Iterator[tuple[str, Output]]:
        """The text and the output of every step for one prompt; closing the iterator aborts the request."""
        (id,) = self._add_all([prompt], params, options)
        try:
            # Another call's steps may have ended it: its last pieces are kept then.
            while id in self._streams or any(output.id == id for _, output in self._kept[0]):
                yield from self._step_for({id})[0]
        finally:
            self._forget([id])

    def add(
        self,
        prompt: Prompt,
        params: Params = _DEFAULT,
        stop: Sequence[str] = (),
        special: bool = False,
        **options: Any,
    ) -> int:
        """Put a request into the queue; its id. stop: texts that end the answer (not part of its text).

        special: whether the text keeps special tokens, which parsers of some formats need.
        options: those of `Engine.add`. Raises Error for a text without a tokenizer, and as `Engine.add` does.
        """
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a text prompt")
            begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            tokens = begin + tokenizer.encode(prompt)
            params = self._with_stops(params, tokenizer)
        else:
            tokens = token_ids("prompt", prompt)
        if isinstance(stop, str):
            raise Error(f"stop is {stop!r}; must be a list of texts")
        if any(not text for text in stop):
            raise Error("stop holds an empty text; needs at least one character")
        stream = Stream(Answer(-1, tokens), list(stop), params.stop_ids, options.get("salt", ""))
        if self.tokenizer is not None:
            stream.decoder, stream.vocabulary = StreamDecoder(self.tokenizer, not special), self.tokenizer.vocab_size
        if stop:
            stream.watcher = StreamDecoder(self._need_tokenizer("a stop text"), skip_special=not special)
            options = {**options, "stop": stream.watch}
        id = self.engine.add(tokens, params, **options)
        stream.answer.id = id
        self._streams[id] = stream
        return id

    def step(self) -> tuple[list[tuple[str, Output]], list[Answer]]:
        """One step of the engine: new text and output of each request that got something, and what is finished."""
        outputs = self.engine.step()  # first: if it raises, what is kept stays
        (pieces, finished), self._kept = self._kept, ([], [])
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is None:  # nobody waits for it any more
                if output.hold is not None:
                    with self.engine.alone():
                        self.engine.scheduler.holds.give_back(output.hold)
                continue
            pieces.append((stream.push(output), output))
            if output.finished is not None:
                if output.hold is not None:
                    tokens = stream.answer.prompt + stream.answer.tokens
                    with suppress(Error):  # new weights, or its time, may have ended it
                        stream.answer.hold = self.engine.held(output.hold, tokens, stream.salt)
                finished.append(stream.answer)
                del self._streams[output.id]
        return pieces, finished

    def _step_for(self, ids: set[int]) -> tuple[list[tuple[str, Output]], list[Answer]]:
        """A step; what concerns other requests is kept for the next `step`."""
        if self.engine.paused:
            raise EngineError("the engine is paused; resume it first", "unavailable")
        pieces, finished = self.step()
        if self.engine.idle:
            if self.engine.scheduler.stands_still():
                held = len(self.engine.scheduler.holds)
                raise Error(f"memory is full of {held} holds without an end; release some, or give them a time")
            time.sleep(0.001)  # something is being copied, or a hold is in the way
        others = [p for p in pieces if p[1].id not in ids], [f for f in finished if f.id not in ids]
        self._kept = (self._kept[0] + others[0], self._kept[1] + others[1])
        return [p for p in pieces if p[1].id in ids], [f for f in finished if f.id in ids]

    def _forget(self, ids: Iterable[int]) -> None:
        """End requests that nobody waits for. No step is made: iterators are closed wherever they are collected."""
        gone = set(ids)
        for id in gone:
            if self._streams.pop(id, None) is not None:
                self.engine.abort(id)
        pieces, finished = self._kept
        self._kept = [p for p in pieces if p[1].id not in gone], [f for f in finished if f.id not in gone]

    def abort(self, id: int) -> None:
        """End a request; its last output comes with the next step."""
        self.engine.abort(id)

    @property
    def failure(self) -> str | None:
        """Why this LLM never answers again: a rank that has ended. May be read from any thread."""
        return None if self._ranks is None else self._ranks.failure

    def close(self) -> None:
        """End the other ranks, if there are any; nothing can be asked of this LLM then."""
        if self._ranks is not None:
            self._ranks.close()

    # --- control: see `Engine` and `control`

    def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int,
        running: Literal["recompute", "keep", "abort"] = "recompute",
    ) -> int:
        """`control.update_weights`."""
        return control.update_weights(self.engine, weights, version, running)

    def pause(self) -> None:
        """Steps do nothing until `resume`."""
        self.engine.pause()

    def resume(self) -> None:
        """Go on."""
        self.engine.resume()

    def sleep(self, level: int = 1) -> None:
        """`control.sleep`."""
        control.sleep(self.engine, level)

    def wake(self) -> None:
        """`control.wake`."""
        control.wake(self.engine)

    def hold(self, tokens: Sequence[int], seconds: float = 60.0, salt: str = "") -> Hold:
        """`Engine.hold`: keep a cached prefix. An answer's own end is held by `generate(..., hold=seconds)`."""
        return self.engine.hold(tokens, seconds, salt)

    def fork(self, hold: Hold, copies: int) -> list[Hold]:
        """`Engine.fork`."""
        return self.engine.fork(hold, copies)

    def release(self, hold: Hold) -> None:
        """`Engine.release`."""
        self.engine.release(hold)

    def export(self, hold: Hold) -> Segment:
        """`Engine.export`."""
        return self.engine.export(hold)

    def put(self, segment: Segment) -> int:
        """`Engine.put`."""
        return self.engine.put(segment)

    def _add_all(
        self, prompts: Sequence[Prompt], params: Params | Sequence[Params] | None, options: dict[str, Any]
    ) -> list[int]:
        fields = {name: options.pop(name) for name in [*options] if name in Params.__dataclass_fields__}
        if params is not None and fields:
            raise Error(f"params and {', '.join(fields)} are both given; allowed: one of the two")
        if isinstance(prompts, str):
            raise Error("prompts is one text; must be a list of texts or of token id lists")
        if params is None:
            params = Params(**fields)
        each = [params] * len(prompts) if isinstance(params, Params) else list(params)
        if len(each) != len(prompts):
            raise Error(f"params holds {len(each)} items; must be {len(prompts)}, one a prompt")
        ids: list[int] = []
        try:
            for prompt, mine in zip(prompts, each, strict=True):
                ids.append(self.add(prompt, mine, **options))
        except BaseException:
            self._forget(ids)
            raise
        return ids

    @staticmethod
    def _with_stops(params: Params, tokenizer: Tokenizer) -> Params:
        """A text's answer ends where the tokenizer says a text ends."""
        if params.stop_ids:
            return params
        ends = [id for id in (tokenizer.eos_id, tokenizer.text_end_id) if id is not None]
        return replace(params, stop_ids=tuple(sorted(set(ends))))

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise Error(f"{what} needs a tokenizer; this model has none: give token ids")
        return self.tokenizer


def tokenizer_of(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, if it has one."""
    family: Literal["k2", "k3"] = "k3" if ModelConfig.from_pretrained(folder).family == "kimi_k3" else "k2"
    if not any((Path(folder) / name).exists() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.load(folder, family)


TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")


def _start(
    checkpoint: str | Path | Transformer,
    config: EngineConfig | None,
    ranks: int,
    device: str,
    dtype: torch.dtype | None,
    packed: bool,
    reader: Reader,
) -> Ranks:
    if ranks < 1:
        raise Error(f"ranks is {ranks}; must be >= 1")
    if isinstance(checkpoint, Transformer) or config is None:
        raise Error(f"ranks is {ranks}; needs a checkpoint folder, which every rank reads, and a config")
    from perilune.serve.ranks import Ranks

    return Ranks(checkpoint, config, ranks, device, dtype, packed, reader)


def _quarter(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4


__all__ = ["LLM", "Answer", "tokenizer_of"]
