"""One of `Replicas`: `python -m perilune.serve.replica FD`. It ends with its pipe."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from perilune.errors import Error
from perilune.serve.processes import end_with_pipe
from perilune.serve.request import Params

_LOOK = 0.2  # seconds between looks at an engine that may have failed


class Replica:
    """An `AsyncLLM` at the end of a pipe. Messages to the other side are collected while one is being sent."""

    def __init__(self, llm: Any, pipe: Connection) -> None:
        self.llm, self.pipe = llm, pipe
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[tuple[str, int, Any]] = []
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()  # of who sends: messages keep their order, and none is cut by the end

    async def run(self) -> None:
        commands: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=_read, args=(self.pipe, loop, commands), daemon=True).start()
        sender = asyncio.create_task(self._sending())
        watch = asyncio.create_task(self._end_with_engine())
        while True:
            kind, *what = await commands.get()
            if kind == "drain":
                await self.llm.drain(*what)
                await asyncio.gather(*self.tasks.values(), return_exceptions=True)
                await self._flushed()
                sender.cancel()
                watch.cancel()
                return
            if kind == "abort":
                if task := self.tasks.get(what[0]):
                    task.cancel()
                continue
            work = self._serve(*what) if kind == "add" else self._call(*what)
            task = self.tasks[what[0]] = asyncio.create_task(work)
            task.add_done_callback(partial(self._forget, what[0]))

    def _forget(self, id: int, _: object) -> None:
        self.tasks.pop(id, None)

    async def _serve(self, id: int, prompt: Any, params: Params, options: dict[str, Any]) -> None:
        try:
            async for delta in self.llm.stream(prompt, params, **options):
                self._say("delta", id, delta)
        except Exception as error:
            self._say("error", id, error)

    async def _call(self, id: int, function: Any) -> None:
        try:
            self._say("result", id, (await self.llm.call(function), None))
        except Exception as error:
            self._say("result", id, (None, error))

    async def _end_with_engine(self) -> None:
        """An engine that has failed is of no use; the other side goes on without it."""
        while self.llm.failure is None:
            await asyncio.sleep(_LOOK)
        await self.llm.drain(0)  # all who wait are told
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        await self._flushed()
        os._exit(1)

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
            self.pipe.send(messages)
        except OSError:
            os._exit(1)
        except Exception:  # what a client's function gave cannot be pickled
            for kind, id, what in messages:
                try:
                    self.pipe.send([(kind, id, what)])
                except Exception as error:
                    reason = Error(f"cannot be sent to another process: {error}")
                    self.pipe.send([(kind, id, (None, reason) if kind == "result" else reason)])

    async def _flushed(self) -> None:
        """All that was said has been sent, what another is sending too."""
        async with self._turn:
            while self._waiting:
                messages, self._waiting = self._waiting, []
                await asyncio.to_thread(self._send, messages)


def _read(pipe: Connection, loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[tuple[Any, ...]]) -> None:
    try:
        while True:
            loop.call_soon_threadsafe(commands.put_nowait, pipe.recv())
    except (EOFError, OSError, RuntimeError):
        os._exit(1)


def main() -> None:
    end_with_pipe()
    pipe = Connection(int(sys.argv[1]))
    gpus, folder, config, device, dtype, packed, ranks, reader, threads = pipe.recv()
    if gpus is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(max(gpus) + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in gpus if i < len(names))
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

    async def serve() -> None:
        await Replica(AsyncLLM(llm), pipe).run()

    asyncio.run(serve())
    llm.close()
    os._exit(0)


if __name__ == "__main__":
    main()
