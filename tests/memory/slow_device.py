"""A device whose streams run late and in any order that their events allow, in place of torch.cuda in `memory.pinned`.

Memory that its owner lets go of is at once given to somebody else on the computing stream, who fills it with NaN: a
copy that comes too late then reads or overwrites it, and the test sees that.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from perilune.memory import pinned
from perilune.memory.stores import Store


class Event:
    def __init__(self, device: SlowDevice) -> None:
        self.device, self.done = device, False

    def query(self) -> bool:
        self.device.run_some()
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            assert self.device.run_one(), "a stream waits for an event that nothing will record"


class Stream:
    def __init__(self, device: SlowDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], bool]] = deque()

    def do(self, work: Callable[[], object]) -> None:
        self.queue.append(lambda: (work(), True)[1])

    def record_event(self) -> Event:
        event = Event(self.device)
        self.do(lambda: setattr(event, "done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(lambda: event.done)


class SlowDevice:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.main = Stream(self)
        self.streams, self.current = [self.main], self.main
        self._owned: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self.poisoned: list[torch.Tensor] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        class Cuda:
            Event = Event
            Stream = staticmethod(self.new_stream)
            current_stream = staticmethod(lambda _: self.current)
            stream = staticmethod(self.on)

        patch.setattr(torch, "cuda", Cuda)
        patch.setattr(pinned, "_pin", lambda size: torch.full((size,), 255, dtype=torch.uint8))
        patch.setattr(pinned, "_copy", lambda target, source: self.current.do(lambda: target.copy_(source)))
        patch.setattr(pinned, "_empty", lambda numbers, dtype, _: self.own(torch.full((numbers,), 77.0, dtype=dtype)))

    def new_stream(self, _: object) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Memory of the computing stream's pool: poisoned when nobody refers to x any more."""
        self._owned.append((weakref.ref(x), x.detach()))
        return x

    def reuse(self) -> None:
        """Give away what has been let go of."""
        for memory in [memory for reference, memory in self._owned if reference() is None]:
            self._owned = [pair for pair in self._owned if pair[1] is not memory]
            self.main.do(lambda memory=memory: memory.fill_(float("nan")))
            self.poisoned.append(memory)

    def run_one(self) -> bool:
        """One piece of work of a random stream that is not waiting; False when there is none."""
        for stream in self.random.sample(self.streams, len(self.streams)):
            if stream.queue and stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    def run_some(self) -> None:
        for _ in range(self.random.choice((0, 0, 1, 3, 10))):
            self.run_one()

    def finish(self) -> None:
        while self.run_one():
            pass
        assert not any(stream.queue for stream in self.streams)


def use(device: SlowDevice, store: Store, steps: int) -> list[torch.Tensor]:
    """What the computing stream reads of tensors that it makes late, puts, lets go of and gets back in reverse."""
    read: list[torch.Tensor] = []
    for step in range(steps):
        tickets: list[Any] = []
        for i in range(6):
            x = device.own(torch.full((4,), 77.0))
            device.main.do(partial(x.detach().fill_, 10 * step + i))
            tickets.append(store.put(x))
            del x
            device.reuse()
            device.run_some()
        for i, ticket in reversed(list(enumerate(tickets))):
            if i:
                store.prefetch(tickets[i - 1])
            if i == 3:
                # Never read: what was fetched ahead is given up.
                store.drop(ticket)
                device.reuse()
                continue
            back, seen = store.get(ticket), torch.empty(4)
            read.append(seen)
            device.main.do(partial(seen.copy_, back.detach()))
            del back
            store.drop(ticket)
            device.reuse()
            device.run_some()
    return read


class LateStore:
    """A store for tensors of the CPU that copies as late as it may, and poisons room that was given up."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.held, self.moved = 0, 0
        self._late: list[dict[str, Any]] = []

    def put(self, flat: torch.Tensor) -> dict[str, Any]:
        ticket = {"source": flat, "version": flat._version, "room": torch.full_like(flat, float("nan"))}
        self._late.append(ticket)
        self.held += flat.nbytes
        self._run_some()
        return ticket

    def prefetch(self, ticket: dict[str, Any]) -> None:
        assert "dropped" not in ticket
        self._run_some()

    def get(self, ticket: dict[str, Any]) -> torch.Tensor:
        assert "dropped" not in ticket
        self._copy(ticket)
        self.moved += ticket["room"].nbytes
        return ticket["room"].clone()

    def drop(self, ticket: dict[str, Any]) -> None:
        assert "dropped" not in ticket
        self._copy(ticket)
        ticket["dropped"] = True
        ticket["room"].fill_(float("nan"))
        self.held -= ticket["room"].nbytes

    def _run_some(self) -> None:
        while self._late and self.random.random() < 0.4:
            self._copy(self.random.choice(self._late))

    def _copy(self, ticket: dict[str, Any]) -> None:
        source = ticket.pop("source", None)
        if source is not None:
            assert source._version == ticket["version"], "the tensor changed before it was copied"
            ticket["room"].copy_(source)
            self._late = [other for other in self._late if other is not ticket]
