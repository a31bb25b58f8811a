"""What a replica says to the queue: all of it, in order, each thing by itself; and that it ends, never falls silent."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from multiprocessing import Pipe
from typing import Any

import pytest

from perilune.serve import replica
from perilune.serve.errors import EngineError
from perilune.serve.replica import Replica
from perilune.serve.request import Params

pytestmark = pytest.mark.timeout(60)


class HeldPipe:
    """A pipe's end through which nothing goes before `go`; `sent` has what went through whole."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.sent: list[tuple[str, int, Any]] = []
        self.busy = threading.Lock()

    def send(self, messages: list[tuple[str, int, bytes]]) -> None:
        assert self.busy.acquire(blocking=False), "two sends at once mix their bytes"
        self.inside.set()
        assert self.go.wait(30)
        self.sent += [(kind, id, pickle.loads(body)) for kind, id, body in messages]
        self.busy.release()


class Counting:
    """An AsyncLLM whose requests give 0, 1, 2, ...; a request for 0 tokens gives them without an end."""

    failure: str | None = None

    def __init__(self) -> None:
        self.running = 0

    async def stream(self, prompt: Any, params: Params, **options: Any) -> AsyncGenerator[int, None]:
        self.running += 1
        try:
            for number in range(prompt[0] or sys.maxsize):
                await asyncio.sleep(0)
                yield number
        finally:
            self.running -= 1

    async def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    async def drain(self, seconds: float | None = None) -> None:
        while self.running:
            await asyncio.sleep(0)


def command(kind: str, id: int = 0, *what: Any) -> tuple[str, int, bytes]:
    return kind, id, pickle.dumps(what)


async def until(what: Callable[[], object]) -> None:
    while not what():
        await asyncio.sleep(0.001)


def replica_of(pipe: Any, *commands: tuple[str, int, bytes]) -> tuple[Counting, Replica, asyncio.Queue[Any]]:
    llm, queue = Counting(), asyncio.Queue[Any]()
    for one in commands:
        queue.put_nowait(one)
    return llm, Replica(llm, pipe), queue


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def test_all_is_sent_before_a_drained_replica_ends() -> None:
    async def main() -> None:
        pipe = HeldPipe()
        llm, one, commands = replica_of(pipe, *(command("add", id, [20], Params(), {}) for id in (1, 2)))
        ends = asyncio.create_task(one.run(commands))
        await until(pipe.inside.is_set)
        commands.put_nowait(command("drain", 0, None))
        await until(lambda: llm.running == 0 and not one.tasks)  # all is said, nothing has gone through
        await asyncio.sleep(0)
        assert not ends.done()
        assert not pipe.sent
        pipe.go.set()
        await ends
        assert not pipe.busy.locked()
        for id in (1, 2):
            assert [number for _, request, number in pipe.sent if request == id] == list(range(20))

    run(main())


def test_who_leaves_while_it_drains_is_heard() -> None:
    """A drain without a limit waits for those who still want an answer, not for one who has left."""

    async def main() -> None:
        pipe = HeldPipe()
        pipe.go.set()
        llm, one, commands = replica_of(pipe, command("add", 1, [0], Params(), {}), command("drain", 0, None))
        ends = asyncio.create_task(one.run(commands))
        await until(lambda: pipe.sent)
        commands.put_nowait(command("call", 2, type))
        await until(lambda: ("result", 2, Counting) in pipe.sent)
        commands.put_nowait(command("abort", 1))
        await ends
        assert llm.running == 0

    run(main())


class TwoArguments(Exception):  # noqa: N818 - of a client
    """Pickled like any exception, and then made again from one argument."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def raises(error: BaseException) -> Callable[[Any], Any]:
    def function(_: Any) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (raises(TwoArguments("here", "there")), "TwoArguments", "here: there"),
        (raises(EngineError("asleep", "unavailable")), "", "asleep"),
        (lambda _: threading.Lock(), "", "cannot be sent to another process"),
        (raises(ValueError(threading.Lock())), "", "cannot be sent to another process"),
    ],
)
def test_what_cannot_go_through_a_pipe_is_an_error_of_its_own_call(
    function: Callable[[Any], Any], kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_read", lambda body: (function,) if body == b"mine" else pickle.loads(body))

    async def main() -> None:
        pipe = HeldPipe()
        pipe.go.set()
        _, one, commands = replica_of(pipe, ("call", 1, b"mine"), command("call", 2, type), command("drain", 0, None))
        await one.run(commands)
        (error,) = (what for said, id, what in pipe.sent if (said, id) == ("error", 1))
        assert text in str(error)
        assert str(error).startswith(kind)
        assert ("result", 2, Counting) in pipe.sent

    run(main())


def test_a_command_that_cannot_be_read_is_an_error_of_its_own() -> None:
    body = pickle.dumps((Counting,)).replace(b"Counting", b"Nobodies")

    async def main() -> None:
        pipe = HeldPipe()
        pipe.go.set()
        commands = (
            ("add", 1, body),
            ("call", 2, body),
            command("add", 3, [2], Params(), {}),
            command("drain", 0, None),
        )
        _, one, queue = replica_of(pipe, *commands)
        await one.run(queue)
        assert ["cannot be read" in str(what) for kind, _, what in pipe.sent if kind == "error"] == [True, True]
        assert [what for _, id, what in pipe.sent if id == 3] == [0, 1]

    run(main())


def test_a_replica_that_cannot_send_ends() -> None:
    class Broken(HeldPipe):
        def send(self, messages: list[tuple[str, int, bytes]]) -> None:
            raise RuntimeError("on purpose")

    async def main() -> None:
        _, one, commands = replica_of(Broken(), command("add", 1, [0], Params(), {}))
        with pytest.raises(ExceptionGroup) as error:
            await one.run(commands)
        assert error.group_contains(RuntimeError, match="on purpose")

    run(main())


def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set where the process would end."""
    over = threading.Event()

    def leave(status: int) -> None:
        over.set()
        if threading.current_thread() is threading.main_thread():
            sys.exit(status)

    monkeypatch.setattr(os, "_exit", leave)
    return over


def test_a_replica_ends_with_its_pipe_while_it_reads_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    over, (mine, theirs) = ended(monkeypatch), Pipe()

    def slow(*_: Any, **__: Any) -> None:
        mine.close()
        assert over.wait(30)
        raise SystemExit

    monkeypatch.setattr("perilune.serve.llm.LLM", slow)
    monkeypatch.setattr(replica, "end_with_pipe", lambda: None)
    monkeypatch.setattr(sys, "argv", ["replica", str(os.dup(theirs.fileno()))])
    theirs.close()
    mine.send((None, "folder", None, "cpu", None, False, 1, "safetensors", 1))
    with pytest.raises((SystemExit, OSError)):
        replica.main()


def test_a_message_after_the_end_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    over, (mine, theirs) = ended(monkeypatch), Pipe()
    loop = asyncio.new_event_loop()
    loop.close()
    mine.send(command("drain", 0, 1.0))
    replica._listen(theirs, loop, asyncio.Queue())
    assert not over.is_set()
