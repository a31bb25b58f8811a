"""An `LLM` for asyncio: the engine steps in a thread of its own, each request is an asynchronous iterator.

async with AsyncLLM(LLM("checkpoint")) as llm:
    async for delta in llm.stream("def main():", Params(max_tokens=50)):
        print(delta.text, end="")

The thread owns the LLM: what others want of it (add, abort, `call`) waits in one queue and happens between two steps,
in order. A request that was accepted ends with a delta that has its answer; with an EngineError only if the engine is
lost.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import torch

from perilune.serve.answer import Answer
from perilune.serve.errors import EngineError
from perilune.serve.llm import LLM, Prompt
from perilune.serve.request import Output, Params

T = TypeVar("T")
Tell = Callable[[BaseException], None]
_IDLE = 0.002  # seconds between looks at an engine that waits for copies or for memory
_LOOK = 0.25  # seconds between looks whether an engine has failed
_LOST = 5.0  # seconds that an engine which has failed has to come out of its step
_FAILURES = 64  # steps in a row that raise before the engine is given up


@dataclass(frozen=True)
class Delta:
    """What a step added to a request: text that is never taken back, and the step's output. answer: with the last."""

    text: str
    output: Output
    answer: Answer | None = None


@dataclass(eq=False)
class Ticket:
    """A request and the event loop that waits for it. id: None until it was added."""

    loop: asyncio.AbstractEventLoop
    deltas: asyncio.Queue[Delta | BaseException] = field(default_factory=asyncio.Queue)
    id: int | None = None
    over: bool = False

    def give(self, what: Delta | BaseException) -> None:
        """From the engine's thread. A loop that was closed waits for nothing any more."""
        self.over = isinstance(what, BaseException) or what.answer is not None
        try:
            self.loop.call_soon_threadsafe(self.deltas.put_nowait, what)
        except RuntimeError:
            self.over = True


class AsyncLLM:
    """Takes `llm` over: from here on nobody else calls its methods, but through `call`. Safe from any event loop."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.tokenizer, self.config = llm.tokenizer, llm.engine.config  # to read
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Tell | None]] = queue.SimpleQueue()
        self._obeyed: Tell | None = None  # of the command that is being done
        self._tickets: dict[int, Ticket] = {}
        self._failures = 0
        self._closing = False  # no new requests
        self._broken: str | None = None  # why the thread has ended before its time
        self._stopped = threading.Event()
        self._gate = threading.Lock()  # between asking whether the thread runs and asking it for something
        self._thread = threading.Thread(target=self._run, name="perilune-engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._mind, name="perilune-mind", daemon=True).start()

    async def stream(self, prompt: Prompt, params: Params | None = None, **options: Any) -> AsyncGenerator[Delta, None]:
        """Deltas of one request. The first is empty and comes once the request is accepted: it has the id.

        options: `stop` (texts) and those of `Engine.add`. Leaving the iterator (`aclose`, cancellation) aborts the
        request. Raises Error for what cannot be served, or after `drain`; a failure while it runs is the last delta's
        `answer.error`.
        """
        ticket = Ticket(asyncio.get_running_loop())
        self._send(lambda: self._add(ticket, prompt, params or Params(), options), ticket.give)
        try:
            while True:
                got = await ticket.deltas.get()
                if isinstance(got, BaseException):
                    raise got
                yield got
                if got.answer is not None:
                    return
        finally:
            if not ticket.over:
                self._send(lambda: self._abort(ticket))

    async def generate(self, prompt: Prompt, params: Params | None = None, **options: Any) -> Answer:
        """The answer of one request, as `stream` gives it with the last delta. Cancelling aborts the request."""
        return await last(self.stream(prompt, params, **options))

    async def call(self, function: Callable[[LLM], T]) -> T:
        """function(llm) between two steps, in the engine's thread: new weights, pause, holds, counters.

        Raises what it raises. Requests wait meanwhile.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def work() -> None:
            result, error = None, None
            try:
                result = function(self._llm)
            except BaseException as raised:
                error = raised
            settle(future, result, error)

        self._send(work, lambda error: settle(future, None, error))
        return await future

    async def drain(self, seconds: float | None = None) -> None:
        """Take no new request, wait until all have ended, then end the thread. After `seconds` the rest is aborted."""
        self._closing = True
        self._send(lambda: None)  # wakes the thread
        end = None if seconds is None else time.monotonic() + seconds
        while not self._stopped.is_set():
            if end is not None and time.monotonic() >= end:
                self._send(self._abort_all)
                end = None
            await asyncio.sleep(0.005)

    @property
    def failure(self) -> str | None:
        """Why nothing is answered again: `LLM.failure`, or what ended the engine's thread."""
        return self._broken or self._llm.failure

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drain(0)

    # --- any thread

    def _send(self, command: Callable[[], None], tell: Tell | None = None) -> None:
        """tell: who waits for it is told with this if it is never done. None: of one who only ends something, which is
        done already where the thread has ended."""
        with self._gate:
            if not self._stopped.is_set():
                self._commands.put((command, tell))
            elif tell is not None:
                raise self._over("the engine has been drained; it takes no request")

    def _mind(self) -> None:
        """Wait for a failure after which the engine's thread never comes out of its step."""
        while not self._stopped.wait(_LOOK):
            if self.failure is not None and not self._stopped.wait(_LOST):
                self._give_up(self.failure)

    def _lose(self, failure: str) -> None:
        """Nothing comes any more: tell all who wait."""
        self._closing = True
        for ticket in [*self._tickets.values()]:
            ticket.give(EngineError(failure, "failed"))
        self._tickets.clear()

    def _give_up(self, failure: str) -> None:
        """The thread has ended, or does nothing again: tell those too who wait for it to listen."""
        with self._gate:
            self._stopped.set()
        self._lose(failure)
        waiting = [self._obeyed]
        with suppress(queue.Empty):
            while True:
                waiting.append(self._commands.get_nowait()[1])
        for tell in waiting:
            if tell is not None:
                tell(EngineError(failure, "failed"))
        self._commands.put((lambda: None, None))  # a thread that waits for commands ends

    # --- the engine's thread

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._broken = self.failure or f"the engine's thread has ended: {error!r}"
            self._give_up(self._broken)
            raise

    def _work(self) -> None:
        device = self._llm.engine.pools.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        wait: float | None = None
        while True:
            self._obey(wait)
            wait = self._step() if self._steps() else None
            with self._gate:
                if self._stopped.is_set() or (self._closing and not self._tickets and self._commands.empty()):
                    self._stopped.set()
                    return

    def _steps(self) -> bool:
        engine = self._llm.engine
        return engine.busy and not (engine.paused or engine.asleep or engine.incomplete)

    def _obey(self, wait: float | None) -> None:
        """Do what was asked. wait: seconds for the first, None for ever, since nothing else is to be done."""
        try:
            while True:
                command, self._obeyed = self._commands.get(wait != 0, wait)
                command()
                self._obeyed, wait = None, 0
        except queue.Empty:
            pass

    def _step(self) -> float | None:
        """A step; how long to wait before the next, as for `_obey`."""
        engine = self._llm.engine
        try:
            pieces, finished = self._llm.step()
            self._failures = 0
        except BaseException as error:
            if self.failure is not None:
                self._lose(self.failure)
                return None
            # Those that ran have ended, and the next step says so; unless steps do nothing but raise.
            self._failures += 1
            if self._failures >= _FAILURES:
                for id, ticket in [*self._tickets.items()]:
                    ticket.give(EngineError(f"the engine has failed: {error!r}", "failed"))
                    self._llm.abort(id)
                self._tickets.clear()
            return 0
        answers = {answer.id: answer for answer in finished}
        for text, output in pieces:
            waits = self._tickets.get(output.id)
            if waits is None:
                continue
            waits.give(Delta(text, output, answers.get(output.id)))
            if waits.over:
                self._tickets.pop(output.id, None)
                if output.finished is None:  # its event loop is gone
                    self._llm.abort(output.id)
        if engine.idle and engine.scheduler.stands_still():
            with engine.alone():
                for request in engine.scheduler.requests():
                    engine.scheduler.abort(request.id, "error", "memory is full of holds without an end")
        if not engine.busy:
            return None
        return _IDLE if engine.idle else 0

    def _over(self, why: str) -> EngineError:
        """What one who comes after the end is told."""
        failure = self.failure
        return EngineError(why, "draining") if failure is None else EngineError(failure, "failed")

    def _add(self, ticket: Ticket, prompt: Prompt, params: Params, options: dict[str, Any]) -> None:
        try:
            if self._closing:
                raise self._over("the engine is being drained; it takes no new request")
            ticket.id = self._llm.add(prompt, params, **options)
        except BaseException as error:
            ticket.give(error)
            return
        self._tickets[ticket.id] = ticket
        ticket.give(Delta("", Output(ticket.id)))
        if self._stopped.is_set():  # `_give_up` may have missed it
            ticket.give(self._over("the engine has been drained; it takes no request"))

    def _abort(self, ticket: Ticket) -> None:
        # Nobody waits for what it gives, which no step may do for long.
        if ticket.id is not None and self._tickets.pop(ticket.id, None) is not None:
            self._llm.abort(ticket.id)

    def _abort_all(self) -> None:
        engine, gone = self._llm.engine, []
        for id, ticket in [*self._tickets.items()]:
            self._llm.abort(id)
            if engine.paused or engine.asleep or engine.incomplete:  # no step will say so
                ticket.give(EngineError("the engine was drained while it could not step", "draining"))
                gone.append(id)
        for id in gone:
            self._tickets.pop(id, None)


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """End a future from another thread. A loop that was closed waits for nothing any more."""
    if isinstance(error, StopIteration):  # which no future takes
        error = RuntimeError(f"raised {error!r}")

    def work() -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    with suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(work)


async def last(deltas: AsyncGenerator[Delta, None]) -> Answer:
    """The answer that a stream ends with. Cancelling closes the stream, which aborts its request."""
    try:
        async for delta in deltas:
            if delta.answer is not None:
                return delta.answer
    finally:
        await deltas.aclose()
    raise AssertionError("a stream ends with an answer")


__all__ = ["AsyncLLM", "Delta", "Ticket", "last", "settle"]
