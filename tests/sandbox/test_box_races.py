"""What happens at the wrong moment: between two steps of a transition, while another one is under way, or half-way."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from perilune.sandbox import (
    Assets,
    Command,
    Conflict,
    Exhausted,
    Network,
    Options,
    Record,
    Recoverable,
    Sandbox,
    SandboxError,
    State,
    Terminal,
    captures,
    keeper,
    machines,
    shared,
)
from perilune.sandbox.driver import Handle, Step
from perilune.sandbox.fake import FakeDriver
from perilune.sandbox.gates import Gates
from perilune.sandbox.manager import Manager
from perilune.sandbox.tokens import Tokens
from tests.sandbox.test_manager import opened, sh
from tests.sandbox.worlds import run

MACHINE = (128 << 20) + (48 << 20)  # what one may use at most


async def until(true: Any) -> None:
    """Wait for a condition; `run` has the limit."""
    while not true():
        await asyncio.sleep(0.005)


def test_an_image_that_nobody_waits_for_any_more_is_not_held(fake_root: Assets, gates: Gates) -> None:
    """A start that is cancelled while a thread still lays its memory's image together; held, it could never go."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            snapshot = await manager.checkpoint(box)
            machine, layers = manager.machines.running[box].machine, manager.layers
            begun, go, done, make = threading.Event(), threading.Event(), threading.Event(), layers.memory

            def slowly(*arguments: Any) -> Any:
                begun.set()
                assert go.wait(20)
                made = make(*arguments)
                done.set()
                return made

            for start in (
                lambda: manager.machines.prepare(snapshot, machine),
                lambda: manager.machines.start("other", snapshot, machine, Network()),
            ):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(layers, "memory", slowly)
                    task = asyncio.create_task(start())
                    await until(begun.is_set)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                go.set()
                await until(done.is_set)
                await until(lambda: not layers._held)
                for event in (begun, go, done):
                    event.clear()

    run(test())


# Counts: what could not be made is not counted, and what was counted can be made


def test_what_could_not_be_made_leaves_nothing(fake_root: Assets, gates: Gates) -> None:
    """No record, no memory counted, a machine of the pool back in it; so that failures never fill the limits."""

    async def test() -> None:
        async with opened(fake_root, gates, boxes=1, pool_low=1, pool_high=1) as manager:
            first = (await manager.create(Options())).id
            await until(lambda: manager.pool.size() == 1)
            await manager.kill(first)
            before = manager.admission.used()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(manager.store, "insert", _full)
                for options in (Options(), Options(network=Network(("192.0.2.9",)))):  # from the pool, and not
                    with pytest.raises(Exhausted, match="full"):
                        await manager.create(options)
            for _ in range(3):
                gates.fail(Step.LOADED, SandboxError("no luck"))
                with pytest.raises(SandboxError, match="no luck"):
                    await manager.create(Options(network=Network(("192.0.2.9",))))
            assert manager.store.boxes() == []
            assert manager.admission.used() == before
            assert manager.pool.size() == 1
            await manager.create(Options())

    run(test())


def _full(*_: object, **__: object) -> Record:
    raise Exhausted("the service's disk is full: nothing has changed")


def test_a_limit_holds_for_those_that_come_at_once(fake_root: Assets, gates: Gates) -> None:
    """Creations that wait for the same template to boot, and forks."""

    async def test() -> None:
        async with opened(fake_root, gates, boxes=3) as manager:
            results = await asyncio.gather(*(manager.create(Options()) for _ in range(5)), return_exceptions=True)
            made = [result.id for result in results if isinstance(result, Record)]
            assert len(made) == 3
            assert all(isinstance(result, (Record, Exhausted)) for result in results)
            await manager.kill(made[0])
            copies = await manager.fork(made[1], 3)
            assert [type(copy) for copy in copies].count(Record) == 1
            assert [type(copy) for copy in copies].count(Exhausted) == 2
            assert manager.store.count() == 3

    run(test())


def test_forks_that_cannot_be_stored(fake_root: Assets, gates: Gates) -> None:
    """Each is an error of its own; none stays half made, none is counted."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            insert, calls = manager.store.insert, []

            def full_at_second(*given: Any, **named: Any) -> Record:
                calls.append(given)
                return _full() if len(calls) == 2 else insert(*given, **named)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(manager.store, "insert", full_at_second)
                copies = await manager.fork(box, 3)
            assert sorted(type(copy).__name__ for copy in copies) == ["Exhausted", "Record", "Record"]
            assert {record.state for record in manager.store.boxes()} == {State.RUNNING}
            assert manager.admission.overcommit() * manager.admission.used() == pytest.approx(3 * MACHINE)

    run(test())


# Ends that nobody was looking at


def test_a_copy_that_dies_while_the_others_begin(fake_root: Assets, gates: Gates) -> None:
    """It had answered, and nobody waited for its end yet: it is ended all the same, not running for ever."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            driver = manager.driver
            assert isinstance(driver, FakeDriver)
            refresh, seen = driver.refresh, []

            async def dying(handle: Handle, hostname: str) -> None:
                await refresh(handle, hostname)
                seen.append(handle.box)
                if len(seen) == 2:
                    driver.crash(seen[0])

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(driver, "refresh", dying)
                await manager.fork(box, 2)
            await until(lambda: manager.store.get(seen[0]).state is State.ENDED)
            assert await sh(manager, seen[1], "echo alive") == "alive\n"

    run(test())


def test_what_has_ended_is_forgotten_when_its_time_is_up(fake_root: Assets, gates: Gates) -> None:
    """Until then it says why; it is no sandbox of those that are limited."""

    async def test() -> None:
        async with opened(fake_root, gates, boxes=1) as manager:
            box = (await manager.create(Options())).id
            driver = manager.driver
            assert isinstance(driver, FakeDriver)
            driver.crash(box)
            await until(lambda: manager.store.get(box).state is State.ENDED)
            await keeper.sweep(manager)
            assert "panicked" in manager.store.get(box).reason
            await manager.create(Options())
            manager.store.move(manager.store.get(box), State.ENDED, expires=time.time() - 1)
            await keeper.sweep(manager)
            assert box not in {record.id for record in manager.store.boxes()}

    run(test())


def test_a_host_on_which_booting_takes_long(fake_root: Assets, gates: Gates) -> None:
    """Each attempt has more time than the one before; what did not answer is gone."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            wait_ready, limits = manager.driver.wait_ready, []

            async def slow(handle: Handle, timeout_s: float) -> None:
                limits.append(timeout_s)
                if len(limits) < 3:
                    await manager.driver.stop(handle)
                    raise Terminal("no answer")
                await wait_ready(handle, timeout_s)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(manager.driver, "wait_ready", slow)
                await manager.create(Options())
            assert limits == [machines.BOOT_S, 2 * machines.BOOT_S, 3 * machines.BOOT_S]
            assert len(manager.driver.vms) == 1  # type: ignore[attr-defined]

    run(test())


# Captures


def test_what_a_program_did_after_a_capture(fake_root: Assets, gates: Gates) -> None:
    """It ran during the checkpoint, wrote and ended: the next checkpoint is of that, though nobody asked anything."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            program = await manager.exec(box, Command("cat; echo 1 > /f", interactive=True))
            first = await manager.checkpoint(box)
            await program.close_stdin()
            await program.wait()
            second = await manager.checkpoint(box)
            assert second != first
            assert await manager.checkpoint(box) == second
            copy = await manager.create(Options(snapshot=second.id))
            assert await sh(manager, copy.id, "cat /f") == "1\n"

    run(test())


def test_a_file_that_is_written_during_a_capture(fake_root: Assets, gates: Gates) -> None:
    """The capture has a part of it at most: the next checkpoint is another one, with all of it."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            write, going, go_on = manager.driver.write, asyncio.Event(), asyncio.Event()

            async def slow(handle: Handle, path: str, data: bytes, mode: int = 0o644) -> None:
                going.set()
                await go_on.wait()
                await write(handle, path, data, mode)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(manager.driver, "write", slow)
                writing = asyncio.create_task(manager.write(box, "/f", b"1"))
                await going.wait()
                first = await manager.checkpoint(box)
                go_on.set()
                await writing
            second = await manager.checkpoint(box)
            assert second != first
            copy = await manager.create(Options(snapshot=second.id))
            assert await manager.read(copy.id, "/f") == b"1"

    run(test())


def test_what_a_checkpoint_asks_the_guest(fake_root: Assets, gates: Gates) -> None:
    """Nothing besides its capture; only where nobody has used it since the last one, whether a program runs."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            verbs, calls = ("idle", "checkpoint", "exec", "read", "refresh"), []

            def counted(verb: str) -> Any:
                real = getattr(manager.driver, verb)

                async def call(*given: Any) -> Any:
                    calls.append(verb)
                    return await real(*given)

                return call

            with pytest.MonkeyPatch.context() as patch:
                for verb in verbs:
                    patch.setattr(manager.driver, verb, counted(verb))
                first = await manager.checkpoint(box)
                assert calls == ["checkpoint"]
                assert await manager.checkpoint(box) == first
                assert calls == ["checkpoint", "idle"]

    run(test())


def test_naming_a_paused_snapshot_while_it_goes_on(fake_root: Assets, gates: Gates) -> None:
    """A checkpoint of a paused sandbox waits for the store; a resume meanwhile is not undone, nor a later pause."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box, other = [(await manager.create(Options())).id for _ in range(2)]
            await manager.pause(box)
            storing = gates.hold(Step.COMMITTING)
            busy = asyncio.create_task(manager.checkpoint(other))
            await storing.reached.wait()
            naming = asyncio.create_task(manager.checkpoint(box, label="late"))
            await asyncio.sleep(0)
            await manager.resume(box)
            storing.release.set()
            with pytest.raises(Conflict, match="went on"):
                await naming
            await busy
            assert manager.store.get(box).state is State.RUNNING
            await sh(manager, box, "echo 1 > /f")
            await manager.pause(box)
            await manager.checkpoint(box, label="named")
            await manager.resume(box)
            assert await sh(manager, box, "cat /f") == "1\n"

    run(test())


@pytest.mark.parametrize("step", [Step.TORN_DOWN, Step.COMMITTED])
def test_a_pause_that_is_committed_is_one(fake_root: Assets, gates: Gates, step: Step) -> None:
    """Whatever goes wrong with the machine on its way out: the sandbox waits at its snapshot, without any cost."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            await sh(manager, box, "echo 1 > /f")
            gates.fail(step, OSError("no such device"))
            with pytest.raises(OSError, match="no such device"):
                await manager.pause(box)
            for _ in range(5):
                await asyncio.sleep(0)
            assert manager.store.get(box).state is State.PAUSED
            assert manager.admission.used() == 0
            await manager.resume(box)
            assert await sh(manager, box, "cat /f") == "1\n"

    run(test())


@pytest.mark.parametrize("error", [OSError("read-only"), Exhausted("full"), sqlite3.OperationalError("disk I/O error")])
def test_old_layers_that_cannot_be_removed(fake_root: Assets, gates: Gates, error: Exception) -> None:
    """What was stored is stored: a pause pauses, a checkpoint is one; the rest goes with the next."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            for verb in (manager.pause, manager.checkpoint):
                await manager.resume(box)
                await sh(manager, box, "echo 1 >> /f")

                def fails(*_: object) -> None:
                    raise error

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(manager.layers, "remove", fails)
                    patch.setattr(manager.store, "collect", fails)
                    await verb(box)
            assert manager.store.get(box).state is State.RUNNING
            await manager.pause(box)
            assert manager.driver.vms == {}  # type: ignore[attr-defined]

    run(test())


def test_no_room_to_begin_a_capture(fake_root: Assets, gates: Gates) -> None:
    """Not even a folder can be made: the guest runs on, and it may be tried again."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            staging = fake_root.root / "staging"
            staging.rmdir()
            staging.write_text("in the way")
            for verb in (manager.pause, manager.checkpoint):
                with pytest.raises(Recoverable, match="no room for a capture"):
                    await verb(box)
            assert await sh(manager, box, "echo alive") == "alive\n"
            staging.unlink()
            staging.mkdir()
            await manager.pause(box)

    run(test())


def test_a_program_that_is_started_while_a_machine_is_made_new(fake_root: Assets, gates: Gates) -> None:
    """Between the old process and the new one it waits for a moment, and runs."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(captures, "RECYCLE", 0)
                between = gates.hold(Step.TORN_DOWN)
                saving = asyncio.create_task(manager.checkpoint(box))
                await between.reached.wait()
                asked = asyncio.create_task(sh(manager, box, "echo alive"))
                await asyncio.sleep(0)
                between.release.set()
                assert await asked == "alive\n"
                await saving
            assert manager.store.get(box).state is State.RUNNING

    run(test())


def test_a_sandbox_that_is_left_half_way(fake_root: Assets, gates: Gates) -> None:
    """Its transition could not even store its end: whoever wants it hears so, and nobody else waits for it."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box, other = [(await manager.create(Options())).id for _ in range(2)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(captures, "RECYCLE", 0)
                patch.setattr(manager.machines, "start", _terminal)
                patch.setattr(manager.transitions, "_end", _terminal)
                with pytest.raises(Terminal, match="no luck"):
                    await manager.checkpoint(box)
            assert manager.store.get(box).state is State.SNAPSHOTTING
            with pytest.raises(Conflict, match="snapshotting"):
                await sh(manager, box, "echo alive")
            assert await sh(manager, other, "echo alive") == "alive\n"

    run(test())


async def _terminal(*_: object, **__: object) -> None:
    raise Terminal("no luck")


# Removing what is in use


def test_a_snapshot_that_is_deleted_while_it_is_resumed(fake_root: Assets, gates: Gates) -> None:
    """It stays until the sandbox has moved on, with its layers; one that has gone before is said, and nothing lost."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            await sh(manager, box, "echo 1 > /f")
            first = await manager.checkpoint(box)
            await sh(manager, box, "echo 2 > /f")
            second = await manager.checkpoint(box)
            starting = gates.hold(Step.SPAWNED)
            back = asyncio.create_task(manager.rollback(box, first.id))
            await starting.reached.wait()
            await manager.delete_snapshot(first.id)
            starting.release.set()
            await back
            assert await sh(manager, box, "cat /f") == "1\n"
            await manager.checkpoint(box)
            # Deleted while it waits for its turn: the sandbox is not even stopped for it.
            holding = gates.hold(Step.MEMORY_COPIED)
            await sh(manager, box, "echo 3 > /f")
            saving = asyncio.create_task(manager.fork(box, 1))
            await holding.reached.wait()
            await manager.delete_snapshot(second.id)
            holding.release.set()
            await saving
            with pytest.raises(SandboxError, match="no snapshot"):
                await manager.rollback(box, second.id)
            assert await sh(manager, box, "cat /f") == "3\n"

    run(test())


def test_the_snapshot_of_a_template_stays(fake_root: Assets, gates: Gates) -> None:
    """Sandboxes that were never captured run on its layers."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            parent = (await manager.checkpoint(box)).parent
            assert parent is not None
            with pytest.raises(Conflict, match="template's own"):
                await manager.delete_snapshot(parent)

    run(test())


# Time


def test_the_keeper_goes_on(fake_root: Assets, gates: Gates) -> None:
    """A sandbox that cannot be paused for a reason that nobody thought of does not keep the others alive."""

    async def test() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keeper, "TICK_S", 0.005)
            async with opened(fake_root, gates) as manager:
                events: list[str] = []
                manager.transitions.listeners.append(lambda event: events.append(event.name))
                boxes = [(await manager.create(Options())).id for _ in range(3)]
                pause, wrong = manager.pause, {boxes[0]: OSError("no space"), boxes[1]: KeyError("unknown")}

                async def failing(box: str) -> Record:
                    if box in wrong:
                        raise wrong[box]
                    return await pause(box)

                patch.setattr(manager, "pause", failing)
                for box in boxes[:2]:
                    manager.keep_alive(box, 1e-9)
                await until(lambda: {"expire", "keep"} <= set(events))
                manager.keep_alive(boxes[2], 1e-9)
                await until(lambda: manager.store.get(boxes[2]).state is State.PAUSED)

    run(test())


@pytest.mark.parametrize("seconds", [-7200.0, 7200.0])
def test_the_clock_is_set(fake_root: Assets, gates: Gates, seconds: float) -> None:
    """Nobody dies of it, nobody lives longer: what is left is what was left."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options(timeout_s=100, on_timeout="kill"))).id
            endless = (await manager.create(Options(timeout_s=None))).id
            ahead = keeper.follow_clock(manager, time.time() - time.monotonic())
            real = time.time
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "time", lambda: real() + seconds)
                ahead = keeper.follow_clock(manager, ahead)
                await keeper.sweep(manager)
                expires = manager.store.get(box).expires
                assert expires is not None
                assert expires - time.time() == pytest.approx(100, abs=20)
                assert manager.store.get(endless).expires is None
                version = manager.store.get(box).version
                keeper.follow_clock(manager, ahead)
                assert manager.store.get(box).version == version

    run(test())


def test_a_longer_life_is_kept_over_a_resume(fake_root: Assets, gates: Gates) -> None:
    """What was acknowledged is not taken back by a pause or a rollback; a life that is over begins anew."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options(timeout_s=10))).id
            node = await manager.checkpoint(box)
            long = manager.keep_alive(box, 5000).expires
            await manager.rollback(box, node.id)
            assert manager.store.get(box).expires == long
            await manager.pause(box)
            await manager.resume(box)
            assert manager.store.get(box).expires == long
            await manager.pause(box)
            manager.store.move(manager.store.get(box), State.PAUSED, expires=1.0)
            await manager.resume(box)
            expires = manager.store.get(box).expires
            assert expires is not None
            assert expires == pytest.approx(time.time() + 10, abs=8)

    run(test())


# Networks


def test_a_policy_that_comes_while_a_machine_starts(fake_root: Assets, gates: Gates) -> None:
    """It is that machine's: never only the store's."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options(network=Network(("192.0.2.1",))))).id
            driver, applied = manager.driver, []

            async def apply(handle: Handle, network: Network) -> None:
                applied.append(network)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(driver, "set_network", apply)
                await manager.pause(box)
                starting = gates.hold(Step.LOADED)
                resuming = asyncio.create_task(manager.resume(box))
                await starting.reached.wait()
                setting = asyncio.create_task(manager.set_network(box, Network()))
                await asyncio.sleep(0)
                assert applied == []
                starting.release.set()
                await resuming
                await setting
                assert applied == [Network()]

                async def refuse(handle: Handle, network: Network) -> None:
                    raise SandboxError("no rules")

                patch.setattr(driver, "set_network", refuse)
                with pytest.raises(SandboxError, match="no rules"):
                    await manager.set_network(box, Network(("192.0.2.7",)))
            assert manager.store.get(box).spec["network"]["allow"] == []  # as it is in the machine

    run(test())


# The process's own manager, and its secret


def test_the_last_sandbox_ends_while_another_begins(fake_root: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared manager closes with the one and opens for the other, in that order."""

    async def accelerator(assets: Assets) -> str:
        return "tcg"

    monkeypatch.setenv("PERILUNE_SANDBOX", str(fake_root.root))
    monkeypatch.setattr(shared, "QemuDriver", lambda confine, accel: FakeDriver())
    monkeypatch.setattr(shared, "choose_accelerator", accelerator)

    async def turn() -> None:
        async with Sandbox.create() as box:
            assert (await box.exec("echo alive")).text == "alive\n"

    async def test() -> None:
        first = await Sandbox.create()
        closing = asyncio.Event()
        close = Manager.close

        async def slow(manager: Manager) -> None:
            closing.set()
            await asyncio.sleep(0)
            await close(manager)

        monkeypatch.setattr(Manager, "close", slow)
        ending = asyncio.create_task(first.kill())
        await closing.wait()
        await asyncio.gather(ending, turn(), turn())

    run(test())


def test_a_secret_that_is_not_whole_is_not_used(tmp_path: Path) -> None:
    """A crash or a full disk while it was made: tokens derived of nothing could be guessed."""
    path = tmp_path / "seed"
    token = Tokens(path).of("box", "access")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == 32
    assert Tokens(path).of("box", "access") == token
    for data in (b"", b"x" * 31):
        path.write_bytes(data)
        with pytest.raises(SandboxError, match="it must have 32"):
            Tokens(path)
    path.unlink()
    (tmp_path / "seed.new").write_bytes(b"x")  # what a crash leaves of one that was being made
    assert Tokens(path).of("box", "access") != token
