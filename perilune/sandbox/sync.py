"""The same SDK for programs without asyncio: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from perilune.sandbox.box import Sandbox
from perilune.sandbox.driver import Result, Stats
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.states import State

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the background loop and wait for it. The thread lives as long as the process."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="perilune-sandbox", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _loop).result()


class SyncSandbox:
    """`Sandbox` with methods that block; see there."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self.id = box.id

    @classmethod
    def create(cls, template: str = "busybox", **options: Any) -> SyncSandbox:
        async def open_() -> Sandbox:
            return await Sandbox.create(template, **options)

        return cls(run(open_()))

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def state(self) -> State:
        return self._box.state

    def exec(
        self, argv: str | Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 60.0, **rest: Any
    ) -> Result:
        return run(self._box.exec(argv, env=env, timeout_s=timeout_s, **rest))

    def read(self, path: str) -> bytes:
        return run(self._box.read(path))

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        run(self._box.write(path, data, mode))

    def upload(self, local: Path | str, path: str) -> None:
        run(self._box.upload(local, path))

    def download(self, path: str, local: Path | str) -> None:
        run(self._box.download(path, local))

    def checkpoint(self, label: str | None = None, barrier: str | None = None) -> Snapshot:
        return run(self._box.checkpoint(label, barrier))

    def pause(self) -> None:
        run(self._box.pause())

    def resume(self) -> None:
        run(self._box.resume())

    def rollback(self, snapshot: Snapshot | str) -> None:
        run(self._box.rollback(snapshot))

    def fork(self, count: int = 1) -> list[SyncSandbox]:
        return [SyncSandbox(box) for box in run(self._box.fork(count))]

    def keep_alive(self, timeout_s: float) -> None:
        run(self._box.keep_alive(timeout_s))

    def stats(self) -> Stats:
        return run(self._box.stats())

    def kill(self) -> None:
        run(self._box.kill())


__all__ = ["SyncSandbox", "run"]
