"""One of `Replicas`: `python -m perilune.serve.replica FD`. It ends with its pipe.

Messages, both ways: (kind, id, pickled what). Each is pickled and read by itself, so that one that cannot be is an
error of its own request alone.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import traceback
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from perilune.errors import Error
from perilune.serve.processes import end_with_pipe

_LOOK = 0.2  # seconds between looks at an engine that may have failed

Message = tuple[str, int, bytes]


class Replica:
    """An `AsyncLLM` at the end of a pipe. Messages to the other side are collected while one is being sent."""

    def __init__(self, llm: Any, pipe: Connection) -> None:
        self.llm, self.pipe = llm, pipe
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[tuple[str, int, Any]] = []
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()  # of who sends: messages keep their order, and none is cut by the end

    async def run(self, commands: asyncio.Queue[Message | None]) -> None:
        """Obey until a drain is done. Whatever of it breaks off ends it with an exception."""
        async with asyncio.TaskGroup() as group:
            always = [group.create_task(part) for part in (self._sending(), self._end_with_engine())]
            while (command := await commands.get()) is not None:
                kind, id, body = command
                if kind == "drain":
                    group.create_task(self._drain(commands, *pickle.loads(body)))
                elif kind == "abort":
                    if task := self.tasks.get(id):
                        task.cancel()
                else:
                    work = self._serve(id, body) if kind == "add" else self._call(id, body)
                    task = self.tasks[id] = group.create_task(work)
                    task.add_done_callback(partial(self._forget, id))
            for task in always:
                task.cancel()

    def _forget(self, id: int, _: object) -> None:
        self.tasks.pop(id, None)

    async def _serve(self, id: int, body: bytes) -> None:
        try:
            prompt, params, options = _read(body)
            async for delta in self.llm.stream(prompt, params, **options):
                self._say("delta", id, delta)
        except Exception as error:
            self._say("error", id, error)

    async def _call(self, id: int, body: bytes) -> None:
        try:
            (function,) = _read(body)
            self._say("result", id, await self.llm.call(function))
        except Exception as error:
            self._say("error", id, error)

    async def _drain(self, commands: asyncio.Queue[Message | None], seconds: float | None) -> None:
        """Meanwhile commands are obeyed: an abort ends it sooner."""
        await self._finish(seconds)
        commands.put_nowait(None)

    async def _end_with_engine(self) -> None:
        """An engine that has failed is of no use; the other side goes on without it."""
        while self.llm.failure is None:
            await asyncio.sleep(_LOOK)
        await self._finish(0)  # all who wait are told
        os._exit(1)

    async def _finish(self, seconds: float | None) -> None:
        """Nothing runs, and all that was said has been sent."""
        await self.llm.drain(seconds)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        await self._flushed()

    def _say(self, kind: str, id: int, what: Any) -> None:
        self._waiting.append((kind, id, what))
        self._wake.set()

    async def _sending(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._flushed()

    def _send(self, messages: list[tuple[str, int, Any]]) -> None:
        try:
            self.pipe.send([_message(*message) for message in messages])
        except OSError:
            os._exit(1)

    async def _flushed(self) -> None:
        """All that was said has been sent, what another is sending too."""
        async with self._turn:
            while self._waiting:
                messages, self._waiting = self._waiting, []
                await asyncio.to_thread(self._send, messages)


def _read(body: bytes) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:
        raise Error(f"cannot be read in another process, which imports it by its module: {error!r}") from None


def _message(kind: str, id: int, what: Any) -> Message:
    """One that the other side can read, whatever a client's function gave."""
    try:
        body = pickle.dumps(what)
    except Exception as error:
        return "error", id, pickle.dumps(Error(f"cannot be sent to another process: {error}"))
    if kind == "error":
        try:
            pickle.loads(body)
        except Exception:  # an exception is made again from its `args`, which need not be what it takes
            body = pickle.dumps(Error(f"{type(what).__name__}: {what}"))
    return kind, id, body


def _listen(pipe: Connection, loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[Message | None]) -> None:
    try:
        while True:
            message = pipe.recv()
            try:
                loop.call_soon_threadsafe(commands.put_nowait, message)
            except RuntimeError:
                return  # the loop is closed: what was asked is done, and the process ends
    except (EOFError, OSError):
        os._exit(1)


def main() -> None:
    end_with_pipe()
    pipe = Connection(int(sys.argv[1]))
    gpus, folder, config, device, dtype, packed, ranks, reader, threads = pipe.recv()
    if gpus is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(max(gpus) + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in gpus if i < len(names))
    with asyncio.Runner() as runner:
        commands: asyncio.Queue[Message | None] = asyncio.Queue()
        # From here on it ends with its pipe, while it reads a checkpoint too.
        threading.Thread(target=_listen, args=(pipe, runner.get_loop(), commands), daemon=True).start()
        import torch

        from perilune.serve.async_llm import AsyncLLM
        from perilune.serve.llm import LLM

        torch.set_num_threads(threads)
        try:
            llm = LLM(folder, config, device=device, dtype=dtype, packed=packed, ranks=ranks, reader=reader)
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}")
            raise
        pipe.send(None)
        try:
            runner.run(Replica(AsyncLLM(llm), pipe).run(commands))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    llm.close()
    os._exit(0)


if __name__ == "__main__":
    main()
