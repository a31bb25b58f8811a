"""What a replica says to the queue before it ends: all of it, in order, one message at a time."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perilune.serve.replica import Replica
from perilune.serve.request import Params

pytestmark = pytest.mark.timeout(60)


class SlowPipe:
    """A pipe's end whose sends take time; `sent` has what went through whole."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.received: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.sent: list[tuple[str, int, Any]] = []
        self.busy = threading.Lock()

    def recv(self) -> tuple[Any, ...]:
        return self.received.get()

    def send(self, messages: list[tuple[str, int, Any]]) -> None:
        assert self.busy.acquire(blocking=False), "two sends at once mix their bytes"
        time.sleep(self.seconds)
        self.sent += messages
        self.busy.release()


class Counting:
    """An AsyncLLM whose requests give 0, 1, 2, ..."""

    failure: str | None = None

    def __init__(self, count: int) -> None:
        self.count, self.running = count, 0

    async def stream(self, prompt: Any, params: Params, **options: Any) -> AsyncGenerator[int, None]:
        self.running += 1
        for number in range(self.count):
            await asyncio.sleep(0.001)
            yield number
        self.running -= 1

    async def drain(self, seconds: float | None = None) -> None:
        while self.running:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.2])
def test_all_is_sent_before_a_drained_replica_ends(seconds: float) -> None:
    pipe, llm = SlowPipe(seconds), Counting(20)
    for id in (1, 2):
        pipe.received.put(("add", id, [1], Params(), {}))

    async def main() -> None:
        run = asyncio.create_task(Replica(llm, pipe).run())  # type: ignore[arg-type]
        while llm.running < 2:
            await asyncio.sleep(0.001)
        pipe.received.put(("drain", None))
        await run
        assert not pipe.busy.locked()
        for id in (1, 2):
            assert [number for _, request, number in pipe.sent if request == id] == list(range(20))

    asyncio.run(asyncio.wait_for(main(), 30))
