"""Several engines behind one queue, each in processes of its own; requests go where their prefix is (`router`).

async with Replicas("checkpoint", EngineConfig(10**9), count=2) as llm:
    answer = await llm.generate([1, 2, 3], Params(max_tokens=50))

The verbs are those of `AsyncLLM`. Replica r of n ranks takes the GPUs r n .. r n + n - 1.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from perilune.chat import Tokenizer
from perilune.errors import Error
from perilune.model import Reader
from perilune.serve import processes
from perilune.serve.answer import Answer
from perilune.serve.async_llm import Delta, Ticket, last
from perilune.serve.config import EngineConfig
from perilune.serve.errors import EngineError
from perilune.serve.llm import LLM, Prompt, tokenizer_of
from perilune.serve.request import Params
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
        for number in range(count):
            process, pipe = processes.start("perilune.serve.replica")
            gpus = list(range(number * ranks, (number + 1) * ranks)) if device.startswith("cuda") else None
            pipe.send((gpus, str(folder), config, device, dtype, packed, ranks, reader, torch.get_num_threads()))
            self._processes.append(process)
            self._pipes.append(pipe)
        try:
            for pipe in self._pipes:
                self._ready(pipe)
        except BaseException:
            for process in self._processes:
                process.kill()
            raise
        for number in range(count):
            threading.Thread(target=self._listen, args=(number,), daemon=True).start()

    @staticmethod
    def _ready(pipe: Connection) -> None:
        try:
            problem = pipe.recv()
        except EOFError:
            problem = "it has ended; its own output says why"
        if problem is not None:
            raise Error(f"a replica has not started: {problem}")

    async def stream(self, prompt: Prompt, params: Params | None = None, **options: Any) -> AsyncGenerator[Delta, None]:
        """As `AsyncLLM.stream`. A `mask` has to be picklable; it is called in the replica's process."""
        ticket, id = Ticket(asyncio.get_running_loop()), next(self._ids)
        tokens = prompt if not isinstance(prompt, str) else self._tokens(prompt)
        with self._lock:
            if self._closing:
                raise EngineError("the engines are being drained; they take no new request", "draining")
            number = self.router.choose(id, list(tokens), options.get("salt", ""))
            if number is None:
                raise EngineError("no replica is left", "unavailable")
            self._tickets[number][id] = ticket
        try:
            self._send(number, "add", id, prompt, params or Params(), options)
            while True:
                got = await ticket.deltas.get()
                if isinstance(got, BaseException):
                    raise got
                yield got
                if got.answer is not None:
                    return
        finally:
            with self._lock:
                self.router.ended(number, id)
                here = self._tickets[number].pop(id, None)
            if here is not None and not ticket.over:
                with suppress(Error):
                    self._send(number, "abort", id)

    async def generate(self, prompt: Prompt, params: Params | None = None, **options: Any) -> Answer:
        """As `AsyncLLM.generate`."""
        return await last(self.stream(prompt, params, **options))

    async def call(self, function: Callable[[LLM], Any]) -> list[Any]:
        """function(llm) in every replica that is alive, between two steps; it and its results have to be picklable."""
        loop, futures = asyncio.get_running_loop(), []
        for number, load in enumerate(self.router.loads):
            if load.alive:
                future, id = loop.create_future(), next(self._ids)
                self._results[number][id] = future
                self._send(number, "call", id, function)
                futures.append(future)
        self.router.forget()  # it may have changed the weights
        return list(await asyncio.gather(*futures))

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
                self._send(number, "drain", seconds)
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

    def _send(self, number: int, *what: Any) -> None:
        try:
            message = bytes(ForkingPickler.dumps(what))
        except Exception as error:
            raise Error(f"{what[0]} cannot be sent to another process: {error}") from None
        with self._sending[number]:
            try:
                self._pipes[number].send_bytes(message)
            except OSError:
                raise EngineError(f"replica {number} has ended", "unavailable") from None

    # --- a thread for each replica

    def _listen(self, number: int) -> None:
        with suppress(EOFError, OSError):
            while True:
                for kind, id, what in self._pipes[number].recv():
                    self._take(number, kind, id, what)
        with self._lock:
            self.router.loads[number].alive = False
            tickets, self._tickets[number] = self._tickets[number], {}
            futures, self._results[number] = self._results[number], {}
        gone = EngineError(f"replica {number} has ended", "unavailable")
        for ticket in tickets.values():
            ticket.give(gone)
        for future in futures.values():
            _settle(future, None, gone)

    def _take(self, number: int, kind: str, id: int, what: Any) -> None:
        if kind == "result":
            future = self._results[number].pop(id, None)
            if future is not None:
                _settle(future, *what)
            return
        with self._lock:
            ticket = self._tickets[number].get(id)
            if kind == "delta" and what.output.tokens:
                self.router.began(number, id)
            if kind == "delta" and what.answer is not None:
                self.router.ended(number, id)
        if ticket is not None:
            ticket.give(what)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """From another thread."""

    def work() -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    with suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(work)


__all__ = ["Replicas"]
