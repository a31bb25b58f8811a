"""New sandboxes: from a snapshot, from a machine that was kept ready, or from a template's golden snapshot."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from perilune.sandbox.driver import Network, Step
from perilune.sandbox.errors import Exhausted, SandboxError
from perilune.sandbox.machines import Running
from perilune.sandbox.options import Options, lifetime
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.states import State
from perilune.sandbox.store import Record

if TYPE_CHECKING:
    from perilune.sandbox.manager import Manager


async def create(manager: Manager, options: Options) -> Record:
    """A new sandbox that runs and answers."""
    started = time.perf_counter()
    check_count(manager)  # before a template is booted for nothing
    spec, snapshot = await _plan(manager, options)
    check_count(manager)
    machine = manager.machines.machine(spec)
    pooled = None if options.snapshot or options.network != Network() else manager.pool.take(snapshot.id)
    box = pooled.handle.box if pooled else secrets.token_hex(8)
    manager.admission.admit(box, machine.memory_mib)
    expires = None if options.timeout_s is None else time.time() + options.timeout_s
    begun = snapshot.id if options.snapshot else None
    try:
        record = manager.store.insert(
            box, spec["template"], spec, options.metadata, options.owner, expires=expires, snapshot=begun
        )
    except BaseException:
        if pooled is not None:
            manager.pool.put_back(pooled)
        else:
            manager.admission.release(box)
        raise

    async def work(record: Record) -> Record:
        running = await _from_pool(manager, pooled) if pooled else None
        running = running or await manager.machines.start(box, snapshot, machine, options.network)
        await manager.gate(Step.COMMITTING, box)
        moved = manager.store.move(manager.store.get(box), State.RUNNING)
        manager.watch(running)
        return moved

    try:
        record = await manager.transitions.begin("create", record, State.ENDED, work)
    except Exception:
        manager.store.delete(box)  # nobody has its name
        raise
    manager.spawn(manager.pool.fill(spec["template"], snapshot, machine))
    manager.transitions.emit("created", box, started)
    return record


def check_count(manager: Manager) -> None:
    """Raise `Exhausted` if there is no place for one sandbox more."""
    if manager.store.count() >= manager.limits.boxes:
        raise Exhausted(f"{manager.limits.boxes} sandboxes exist already; kill some, or raise limits.boxes")


async def _from_pool(manager: Manager, pooled: Running) -> Running | None:
    """A machine that was kept ready, if it still answers."""
    box = pooled.handle.box
    manager.machines.running[box] = pooled
    try:
        await manager.driver.refresh(pooled.handle, box)
    except SandboxError:
        await manager.machines.stop(box)
        return None
    pooled.used = time.monotonic()
    return pooled


async def _plan(manager: Manager, options: Options) -> tuple[dict[str, Any], Snapshot]:
    """What the sandbox is, and where it starts."""
    if options.snapshot is not None:
        snapshot = manager.store.snapshot(options.snapshot)
        disk = snapshot.format.get("disk_mib")
        spec = {
            "template": snapshot.template,
            "memory_mib": int(snapshot.format["memory_mib"]),
            "disk_mib": int(disk) if disk else None,
            "image": manager.machines.assets.template(snapshot.template).image.plain(),
        }
        return spec | lifetime(options), snapshot
    template = manager.machines.assets.template(options.template)
    spec = {
        "template": template.name,
        "digest": template.digest,
        "memory_mib": options.memory_mib,
        "disk_mib": options.disk_mib,
        "image": template.image.plain(),
    }
    return spec | lifetime(options), await manager.machines.golden(template.name, manager.machines.machine(spec))


__all__ = ["check_count", "create"]
