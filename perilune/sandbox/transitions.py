"""One transition at a time for each sandbox, done once and shared by all who ask for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from perilune.sandbox.errors import Conflict, Terminal
from perilune.sandbox.options import Event
from perilune.sandbox.states import Decision, Request, State, decide
from perilune.sandbox.store import Record, Store

T = TypeVar("T")
Work = Callable[[Record], Awaitable[T]]

_TRANSIENT = {
    Request.PAUSE: State.PAUSING,
    Request.RESUME: State.RESUMING,
    Request.ROLLBACK: State.RESUMING,
    Request.CHECKPOINT: State.SNAPSHOTTING,
    Request.FORK: State.FORKING,
    Request.KILL: State.KILLING,
}
# Asked twice, these are done once; a second checkpoint or fork is of a later instant.
_SHARED = (Request.PAUSE, Request.RESUME, Request.KILL)
_LOOK_AGAIN_S = 0.01


class Transitions:
    """What is under way, by sandbox. end: called with (box, reason) when a transition ends in `Terminal`."""

    def __init__(self, store: Store, end: Callable[[str, str], Awaitable[None]]) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        self._store = store
        self._end = end
        self._under_way: dict[str, asyncio.Task[Any]] = {}

    def emit(self, name: str, box: str, since: float, error: str = "", **detail: float) -> None:
        """Tell the listeners. since: `time.perf_counter` when it began."""
        event = Event(name, box, time.perf_counter() - since, error, detail)
        for listener in self.listeners:
            listener(event)

    def busy(self, box: str) -> bool:
        """True while something is under way."""
        return box in self._under_way

    async def settled(self, box: str) -> None:
        """Wait until nothing is under way."""
        task = self._under_way.get(box)
        if task is not None:
            await asyncio.wait([task])

    async def all_settled(self) -> None:
        """The same, of every sandbox."""
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    async def ask(self, box: str, request: Request, work: Work[T], nothing: Callable[[], T]) -> T:
        """Decide by the state; do the transition, or share the one under way.

        nothing: the answer where there is nothing to do. A caller that goes away does not stop a transition.
        """
        while True:
            record = self._store.get(box)
            under_way = self._under_way.get(box)
            decision = decide(request, record.state)
            if under_way is not None and decision in (Decision.START, Decision.NOTHING):
                # Its outcome is committed; its machine may still be on the way out.
                same = request in _SHARED and under_way.get_name() == request.value
                decision = Decision.JOIN if same else Decision.WAIT
            match decision:
                case Decision.NOTHING:
                    return nothing()
                case Decision.REFUSE:
                    raise Conflict(f"box {box!r} is {record.state.value}: it cannot {request.value} now")
                case Decision.START:
                    moved = self._store.move(record, _TRANSIENT[request])
                    return await self.begin(request.value, moved, record.state, work)
                case Decision.JOIN if under_way is not None:
                    result: T = await asyncio.shield(under_way)
                    return result
                case Decision.WAIT if under_way is not None:
                    await asyncio.wait([under_way])
                case _:
                    await asyncio.sleep(_LOOK_AGAIN_S)  # it has just ended; its task is being taken off

    async def begin(self, name: str, record: Record, back: State, work: Work[T]) -> T:
        """Run a transition whose state is set already. back: where the sandbox goes if it fails and is not over."""
        task: asyncio.Task[T] = asyncio.create_task(self._run(name, record, back, work), name=name)
        self._under_way[record.id] = task
        task.add_done_callback(lambda done: self._done(record.id, done))
        return await asyncio.shield(task)

    def _done(self, box: str, task: asyncio.Task[Any]) -> None:
        if self._under_way.get(box) is task:
            del self._under_way[box]
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits any more

    async def _run(self, name: str, record: Record, back: State, work: Work[T]) -> T:
        started = time.perf_counter()
        try:
            result = await work(record)
        except BaseException as error:
            if isinstance(error, Terminal) or back is State.ENDED:
                await self._end(record.id, str(error))
            else:
                now = self._store.get(record.id)
                if now.state is record.state:
                    self._store.move(now, back, reason=str(error))
            self.emit(name, record.id, started, str(error) or type(error).__name__)
            raise
        self.emit(name, record.id, started)
        return result


__all__ = ["Transitions"]
