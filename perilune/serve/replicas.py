"""Several engines behind one queue, each in processes of its own; requests go where their prefix is (`router`).

async with Replicas("checkpoint", EngineConfig(10**9), count=2) as llm:
    answer = await llm.generate([1, 2, 3], Params(max_tokens=50))

The verbs are those of `AsyncLLM`. Replica r of n ranks takes the GPUs r n .. r n + n - 1.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from perilune.chat import Tokenizer
from perilune.errors import Error
from perilune.model import Reader
from perilune.serve import processes
from perilune.serve.answer import Answer
from perilune.serve.async_llm import Delta, Ticket, last, settle
from perilune.serve.config import EngineConfig
from perilune.serve.errors import EngineError
from perilune.serve.llm import LLM, Prompt, tokenizer_of
from perilune.serve.request import Params, token_ids
from perilune.serve.router import Router


class Replicas:
    """count engines on the checkpoint in `folder`. config: of each; ranks: processes of each.

    A replica that ends takes its requests with it (they raise EngineError); the others go on. Raises Error where one
    does not start.
    """

    def __init__(
        self,
        folder: str | Path,
        config: EngineConfig,
        count: int,
        *,
        ranks: int = 1,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        packed: bool = False,
        reader: Reader = "safetensors",
    ) -> None:
        if count < 1:
            raise Error(f"count is {count}; must be >= 1")
        self.config = config
        self.tokenizer: Tokenizer | None = tokenizer_of(folder)
        self.router = Router(count)
        self._ids = itertools.count()
        self._tickets: list[dict[int, Ticket]] = [{} for _ in range(count)]
        self._results: list[dict[int, asyncio.Future[Any]]] = [{} for _ in range(count)]
        self._lock = threading.Lock()  # of tickets and router
        self._sending = [threading.Lock() for _ in range(count)]
        self._closing = False
        self._processes, self._pipes = list[processes.Process](), list[Connection]()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            for number in range(count):
                process, pipe = processes.start("perilune.serve.replica")
                self._processes.append(process)
                self._pipes.append(pipe)
                gpus = list(range(number * ranks, (number + 1) * ranks)) if device.startswith("cuda") else None
                setup = (gpus, str(folder), config, device, dtype, packed, ranks, reader, torch.get_num_threads())
                with suppress(OSError):  # one that has ended already is told of by `_ready`
                    pipe.send(setup)
            for pipe in self._pipes:
                self._ready(pipe)
        except BaseException:
            for process in self._processes:
                processes.end(process, 0)
            raise
        for number in range(count):
            threading.Thread(target=self._listen, args=(number,), daemon=True).start()

    @staticmethod
    def _ready(pipe: Connection) -> None:
        try:
            problem = pipe.recv()
        except (EOFError, OSError):
            problem = "it has ended; its own output says why"
        if problem is not None:
            raise Error(f"a replica has not started: {problem}")

    async def stream(self, prompt: Prompt, params: Params | None = None, **options: Any) -> AsyncGenerator[Delta, None]:
        """As `AsyncLLM.stream`. A `mask` has to be picklable; it is called in the replica's process."""
        ticket, id = Ticket(asyncio.get_running_loop()), next(self._ids)
        if not isinstance(prompt, str):
            prompt = token_ids("prompt", prompt)
        tokens = self._tokens(prompt) if isinstance(prompt, str) else prompt
        with self._lock:
            if self._closing:
                raise EngineError("the engines are being drained; they take no new request", "draining")
            number = self.router.choose(id, tokens, options.get("salt", ""))
            if number is None:
                raise EngineError("no replica is left", "unavailable")
            self._tickets[number][id] = ticket
        over = False
        try:
            self._send(number, "add", id, prompt, params or Params(), options)
            while not over:
                got = await ticket.deltas.get()
                if isinstance(got, BaseException):
                    raise got
                over = got.answer is not None
                yield got
        finally:
            with self._lock:
                self.router.ended(number, id)
                self._tickets[number].pop(id, None)
            if not over:
                with suppress(Error):
                    self._send(number, "abort", id)

    async def generate(self, prompt: Prompt, params: Params | None = None, **options: Any) -> Answer:
        """As `AsyncLLM.generate`."""
        return await last(self.stream(prompt, params, **options))

    async def call(self, function: Callable[[LLM], Any]) -> list[Any]:
        """function(llm) in every replica that is alive, between two steps; it and its results have to be picklable, and
        of modules that the other process can import. Raises what the first to raise does, or EngineError."""
        loop, sent = asyncio.get_running_loop(), list[tuple[int, int, asyncio.Future[Any]]]()
        with self._lock:
            for number, load in enumerate(self.router.loads):
                if load.alive:
                    sent.append((number, next(self._ids), loop.create_future()))
                    self._results[number][sent[-1][1]] = sent[-1][2]
            self.router.forget()  # it may change the weights
        if not sent:
            raise EngineError("no replica is left", "unavailable")
        try:
            for number, id, _ in sent:
                self._send(number, "call", id, function)
            return list(await asyncio.gather(*(future for _, _, future in sent)))
        finally:
            with self._lock:
                for number, id, future in sent:
                    self._results[number].pop(id, None)
                    future.cancel()

    @property
    def failure(self) -> str | None:
        """Why nothing is answered again: every replica has ended, unasked."""
        gone = not self._closing and not any(load.alive for load in self.router.loads)
        return "no replica is left" if gone else None

    async def drain(self, seconds: float | None = None) -> None:
        """Take no new request, let those on their way end (after `seconds` by abort), end all processes."""
        self._closing = True
        for number in range(len(self._pipes)):
            with suppress(Error):
                self._send(number, "drain", 0, seconds)
        for process in self._processes:
            while process.poll() is None:
                await asyncio.sleep(0.01)

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drain(0)

    def _tokens(self, text: str) -> list[int]:
        return [] if self.tokenizer is None else self.tokenizer.encode(text)

    def _send(self, number: int, kind: str, id: int, *what: Any) -> None:
        try:
            body = pickle.dumps(what)
        except Exception as error:
            raise Error(f"{kind} cannot be sent to another process: {error}") from None
        with self._sending[number]:
            try:
                self._pipes[number].send((kind, id, body))
            except OSError:
                raise EngineError(f"replica {number} has ended", "unavailable") from None

    # --- a thread for each replica

    def _listen(self, number: int) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    for message in self._pipes[number].recv():
                        self._take(number, *message)
        finally:
            self._gone(number)

    def _take(self, number: int, kind: str, id: int, body: bytes) -> None:
        try:
            what = pickle.loads(body)
        except Exception as error:
            kind, what = "error", Error(f"what replica {number} sent cannot be read: {error!r}")
        with self._lock:
            future = self._results[number].pop(id, None)
            ticket = self._tickets[number].get(id)
            if kind == "delta" and what.output.tokens:
                self.router.began(number, id)
            if kind == "delta" and what.answer is not None:
                self.router.ended(number, id)
        if future is not None:
            settle(future, *((None, what) if kind == "error" else (what, None)))
        elif ticket is not None:
            ticket.give(what)

    def _gone(self, number: int) -> None:
        """Tell all who wait for a replica; it ends if it has not."""
        with self._sending[number]:
            self._pipes[number].close()
        with self._lock:
            self.router.loads[number].alive = False
            tickets, self._tickets[number] = self._tickets[number], {}
            futures, self._results[number] = self._results[number], {}
        gone = EngineError(f"replica {number} has ended", "unavailable")
        for ticket in tickets.values():
            ticket.give(gone)
        for future in futures.values():
            settle(future, None, gone)


__all__ = ["Replicas"]
