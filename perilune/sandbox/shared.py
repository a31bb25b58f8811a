"""The manager that sandboxes of one process share when they are given none; closed with the process's event loop."""

from __future__ import annotations

import asyncio
import weakref

from perilune.sandbox.assets import Assets, state_root
from perilune.sandbox.doctor import choose_accelerator
from perilune.sandbox.manager import Manager
from perilune.sandbox.qemu import QemuDriver
from perilune.sandbox.states import State

_managers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Manager] = weakref.WeakKeyDictionary()
_opening: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


async def shared() -> Manager:
    """The manager of this event loop over `state_root()`, opened the first time."""
    loop = asyncio.get_running_loop()
    async with _opening.setdefault(loop, asyncio.Lock()):
        if loop not in _managers:
            assets = Assets(state_root())
            assets.kernel()  # says what to do where nothing is set up
            driver = QemuDriver(assets.confine, await choose_accelerator(assets))
            _managers[loop] = await Manager.open(assets, driver)
        return _managers[loop]


async def release(manager: Manager) -> None:
    """Close the shared manager when nothing runs in it any more; any other manager is its owner's to close."""
    loop = asyncio.get_running_loop()
    # Whoever wants it meanwhile waits until it is closed, and opens another.
    async with _opening.setdefault(loop, asyncio.Lock()):
        if _managers.get(loop) is not manager:
            return
        busy = [record for record in manager.store.boxes() if record.state not in (State.ENDED, State.PAUSED)]
        if not busy:
            del _managers[loop]
            await manager.close()


__all__ = ["release", "shared"]
