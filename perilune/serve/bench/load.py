"""When requests are sent: at times of their own (open loop), or as others end (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from perilune.errors import Error
from perilune.serve.bench.client import Record
from perilune.serve.bench.workload import Item

# (item, start of the load by time.perf_counter(), planned seconds after it)
Send = Callable[[Item, float, float], Awaitable[Record]]


@dataclass
class Progress:
    """How far a load is. changed: called whenever a request was sent or has ended."""

    changed: Callable[[Progress], None] = lambda _: None
    sent: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0

    def begin(self) -> None:
        self.sent += 1
        self.changed(self)

    def end(self, record: Record) -> None:
        self.done += 1
        self.failed += record.error is not None
        self.output_tokens += record.output_tokens
        self.changed(self)


async def open_loop(items: Iterable[Item], send: Send, progress: Progress | None = None) -> list[Record]:
    """Send every item at its time, whatever became of the others. Records in the order of the items."""
    progress = progress or Progress()
    begin, tasks = time.perf_counter(), []
    for item in items:
        wait = begin + item.at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(_one(item, send, begin, item.at, progress)))
        await asyncio.sleep(0)  # so that it is sent before the next one is made
    return [await task for task in tasks]


async def closed_loop(
    items: Iterable[Item], send: Send, clients: int, progress: Progress | None = None
) -> list[Record]:
    """Keep `clients` requests on their way. Records in the order of the items. Raises Error for clients < 1."""
    if clients < 1:
        raise Error(f"concurrency is {clients}; must be >= 1")
    progress = progress or Progress()
    begin, waiting = time.perf_counter(), enumerate(items)
    records: dict[int, Record] = {}

    async def client() -> None:
        for number, item in waiting:
            records[number] = await _one(item, send, begin, time.perf_counter() - begin, progress)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return [records[number] for number in sorted(records)]


async def _one(item: Item, send: Send, begin: float, planned: float, progress: Progress) -> Record:
    progress.begin()
    record = await send(item, begin, planned)
    progress.end(record)
    return record


__all__ = ["Progress", "Send", "closed_loop", "open_loop"]
