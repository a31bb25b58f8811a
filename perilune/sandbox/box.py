"""The SDK: one sandbox as an object.

async with Sandbox.create(template="python") as box:
    await box.exec("pip --version")
    await box.checkpoint()
    kids = await box.fork(4)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from perilune.sandbox.driver import Command, Process, Result, Stats
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.manager import Manager
from perilune.sandbox.options import Options
from perilune.sandbox.shared import release, shared
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.states import State
from perilune.sandbox.store import Record
from perilune.sandbox.transfer import download, upload

# Programs of agents: longer than a probe, shorter than a coffee.
EXEC_S = 60.0


class Forks(list["Sandbox"]):
    """The copies that were made; `failed` has the reasons of those that were not."""

    failed: list[SandboxError]


class Opening:
    """What `Sandbox.create` and `Sandbox.connect` return: to be awaited, or entered with `async with`."""

    def __init__(self, open_: Awaitable[Sandbox]) -> None:
        self._open = open_
        self._box: Sandbox | None = None

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self._open.__await__()

    async def __aenter__(self) -> Sandbox:
        self._box = await self._open
        return self._box

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._box is not None
        await self._box.__aexit__(kind, error, trace)


class Sandbox:
    """One sandbox. Every method raises a `SandboxError` that says what was asked and what is allowed."""

    def __init__(self, manager: Manager, box: str) -> None:
        self.manager = manager
        self.id = box

    @classmethod
    def create(cls, template: str = "busybox", *, manager: Manager | None = None, **options: Any) -> Opening:
        """A new sandbox (`Options` has the options). Without a manager, one of this process is used."""
        wanted = Options(template=template, **options)

        async def open_() -> Sandbox:
            used = manager or await shared()
            try:
                return cls(used, (await used.create(wanted)).id)
            except BaseException:
                await release(used)
                raise

        return Opening(open_())

    @classmethod
    def connect(cls, box: str, *, manager: Manager | None = None) -> Opening:
        """A sandbox that exists already; a paused one is resumed."""

        async def open_() -> Sandbox:
            used = manager or await shared()
            try:
                return cls(used, (await used.resume(box)).id)
            except BaseException:
                await release(used)
                raise

        return Opening(open_())

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill it. A sandbox that is to last is created with `await Sandbox.create(...)`, without `async with`."""
        await self.kill()

    @property
    def record(self) -> Record:
        """What the store has about it."""
        return self.manager.store.get(self.id)

    @property
    def state(self) -> State:
        """Its state now."""
        return self.record.state

    # Programs

    async def exec(
        self,
        argv: str | Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bytes | str | None = None,
        timeout_s: float = EXEC_S,
        max_output: int = 4 << 20,
    ) -> Result:
        """Run a program to its end; a string is a shell command line, nothing is the template's own program."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        command = Command(argv, env or {}, cwd, user, data, timeout_s, max_output)
        return await self.manager.run(self.id, command)

    async def start(self, command: Command) -> Process:
        """Start a program and talk with it: streams, a terminal, signals."""
        return await self.manager.exec(self.id, command)

    # Files

    async def read(self, path: str) -> bytes:
        """A file of the guest."""
        return await self.manager.read(self.id, path)

    async def write(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Write a file of the guest in one piece; its folders are made."""
        await self.manager.write(self.id, path, data.encode() if isinstance(data, str) else data, mode)

    async def upload(self, local: Path | str, path: str) -> None:
        """Copy a file or a folder into the guest."""
        await upload(self.manager, self.id, Path(local), path)

    async def download(self, path: str, local: Path | str) -> None:
        """Copy a file or a folder out of the guest; nothing is written outside `local`."""
        await download(self.manager, self.id, path, Path(local))

    # Life

    async def checkpoint(self, label: str | None = None, barrier: str | None = None) -> Snapshot:
        """Save it while it runs on."""
        return await self.manager.checkpoint(self.id, label, barrier)

    async def pause(self) -> None:
        """Save it and free its processor and memory."""
        await self.manager.pause(self.id)

    async def resume(self) -> None:
        """Let it go on."""
        await self.manager.resume(self.id)

    async def rollback(self, snapshot: Snapshot | str) -> None:
        """Let it go on from a snapshot."""
        await self.manager.rollback(self.id, snapshot if isinstance(snapshot, str) else snapshot.id)

    async def fork(self, count: int = 1, label: str | None = None, barrier: str | None = None) -> Forks:
        """Copies of it as it is now, running or paused; raises only if not one could be made."""
        results = await self.manager.fork(self.id, count, label, barrier)
        forks = Forks(Sandbox(self.manager, one.id) for one in results if isinstance(one, Record))
        forks.failed = [one for one in results if isinstance(one, SandboxError)]
        if not forks:
            raise forks.failed[0]
        return forks

    async def keep_alive(self, timeout_s: float) -> None:
        """Let it live so much longer from now on."""
        self.manager.keep_alive(self.id, timeout_s)

    async def kill(self) -> None:
        """End it; its snapshots stay. Ending it again is no error."""
        await self.manager.kill(self.id)
        await release(self.manager)

    async def stats(self) -> Stats:
        """What it costs now."""
        return await self.manager.stats(self.id)


async def kill_all(boxes: Sequence[Sandbox]) -> None:
    """End many at once."""
    await asyncio.gather(*(box.kill() for box in boxes))


__all__ = ["Forks", "Opening", "Sandbox", "kill_all"]
