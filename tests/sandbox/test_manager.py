"""The life of sandboxes over the fake driver: races, faults, time, quotas, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from perilune.sandbox import (
    Assets,
    Command,
    Conflict,
    Exhausted,
    Limits,
    Manager,
    NotFound,
    Options,
    Record,
    Recoverable,
    Sandbox,
    SandboxError,
    State,
    Terminal,
)
from perilune.sandbox.driver import Step
from perilune.sandbox.fake import FakeDriver
from perilune.sandbox.gates import Gates
from perilune.sandbox.keeper import sweep
from tests.sandbox.worlds import run


@contextlib.asynccontextmanager
async def opened(assets: Assets, gates: Gates, **limits: int) -> AsyncIterator[Manager]:
    manager = await Manager.open(assets, FakeDriver(gates), Limits(**limits), gates)
    try:
        yield manager
    finally:
        await manager.close()
        assert not list((assets.root / "staging").iterdir())


async def sh(manager: Manager, box: str, script: str) -> str:
    return (await manager.run(box, Command(script, timeout_s=5))).text


def test_a_life(fake_root: Assets, gates: Gates) -> None:
    """Create, use, checkpoint, pause, resume, roll back, fork, kill."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options(metadata={"k": "v"}))).id
            assert manager.store.get(box).metadata == {"k": "v"}
            assert await sh(manager, box, "hostname") == f"{box}\n"
            await sh(manager, box, "echo 1 > /f")
            first = await manager.checkpoint(box, label="first", barrier="step-7")
            assert (first.label, first.barrier) == ("first", "step-7")
            await sh(manager, box, "echo 2 >> /f")
            await manager.pause(box)
            assert manager.driver.vms == {}  # type: ignore[attr-defined]
            with pytest.raises(Conflict, match="paused"):
                await sh(manager, box, "true")
            await manager.resume(box)
            assert await sh(manager, box, "cat /f") == "1\n2\n"
            second = await manager.checkpoint(box)
            await manager.rollback(box, "first")
            assert await sh(manager, box, "cat /f") == "1\n"
            await manager.rollback(box, second.id)
            assert await sh(manager, box, "cat /f") == "1\n2\n"
            kids = await manager.fork(box, 3)
            assert len({kid.id for kid in kids if isinstance(kid, Record)}) == 3
            for kid in kids:
                assert isinstance(kid, Record)
                assert await sh(manager, kid.id, "cat /f; hostname") == f"1\n2\n{kid.id}\n"
                assert kid.metadata["parent"] == box
                assert manager.token(kid.id, "access") != manager.token(box, "access")
                assert manager.check_token(kid.id, "access", manager.token(kid.id, "access"))
                assert not manager.check_token(kid.id, "access", manager.token(box, "access"))
                assert not manager.check_token(kid.id, "traffic", manager.token(kid.id, "access"))
            await manager.kill(box)
            with pytest.raises(NotFound):
                manager.store.get(box)
            assert [known.id for known in manager.snapshots(box)] == [first.id, second.id]
            # The snapshots of a sandbox outlive it.
            again = await manager.create(Options(snapshot="first"))
            assert await sh(manager, again.id, "cat /f") == "1\n"

    run(test())


def test_everything_unused_is_removed(fake_root: Assets, gates: Gates) -> None:
    """After sandboxes and snapshots are gone, only the golden snapshot's layers are left."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            golden = set(manager.store.layers())
            for turn in range(5):
                await sh(manager, box, f"echo {turn} > /f")
                await manager.pause(box)
                await manager.resume(box)
            # A pause leaves a snapshot that goes with the next one.
            assert manager.snapshots() == []
            assert len(manager.store.layers()) <= len(golden) + 2
            kept = await manager.checkpoint(box, label="kept")
            kids = await manager.fork(box, 2)
            await manager.kill(box)
            for kid in kids:
                assert isinstance(kid, Record)
                await manager.kill(kid.id)
            assert set(manager.store.layers()) == {*golden, *kept.layers()}
            await manager.delete_snapshot("kept")
            assert set(manager.store.layers()) == golden
            assert {path.name for path in (fake_root.root / "layers").iterdir()} == golden
            assert list((fake_root.root / "boxes").iterdir()) == []

    run(test())


def test_joins_and_conflicts(fake_root: Assets, gates: Gates) -> None:
    """A second pause joins the first; a delete waits; the rest is told what is under way."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            assert (await manager.resume(box)).state is State.RUNNING
            barrier = gates.hold(Step.STOPPED)
            first = asyncio.create_task(manager.pause(box))
            await barrier.reached.wait()
            second = asyncio.create_task(manager.pause(box))
            killed = asyncio.create_task(manager.kill(box))
            await asyncio.sleep(0.05)
            for work in (manager.resume(box), manager.checkpoint(box), manager.fork(box, 1), sh(manager, box, "true")):
                with pytest.raises(Conflict, match="pausing"):
                    await work
            assert not any(task.done() for task in (first, second, killed))
            barrier.release.set()
            assert (await first).state is State.PAUSED
            assert await second == await first
            await killed
            captures = [step for step, where in gates.passed if where == box and step is Step.STOPPED]
            assert len(captures) == 1
            with pytest.raises(NotFound):
                await manager.kill(box)

    run(test())


def test_storm(fake_root: Assets, gates: Gates) -> None:
    """Requests of every kind at once, for a while: each ends, with a result or a reason, and all states are true."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            boxes = [(await manager.create(Options())).id for _ in range(3)]

            async def storm(box: str, number: int) -> None:
                for turn in range(12):
                    with contextlib.suppress(Conflict, NotFound):
                        match (number * 7 + turn * 5) % 6:
                            case 0 | 1:
                                await manager.pause(box)
                            case 2 | 3:
                                await manager.resume(box)
                            case 4:
                                await manager.checkpoint(box)
                            case 5:
                                await sh(manager, box, f"echo {turn} > /f")

            await asyncio.gather(*(storm(box, number) for box in boxes for number in range(8)))
            for box in boxes:
                assert manager.store.get(box).state in (State.RUNNING, State.PAUSED)
                await manager.resume(box)
                assert await sh(manager, box, "echo alive") == "alive\n"
                await asyncio.gather(*(manager.kill(box) for _ in range(3)), return_exceptions=True)
            assert manager.store.boxes() == []
            assert manager.driver.vms == {}  # type: ignore[attr-defined]

    run(test())


def test_a_resume_while_the_paused_machine_goes(fake_root: Assets, gates: Gates) -> None:
    """The pause is committed, its machine on the way out: a resume waits for that and is not lost (CubeSandbox #13)."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            await sh(manager, box, "echo 1 > /f")
            barrier = gates.hold(Step.COMMITTED)
            pausing = asyncio.create_task(manager.pause(box))
            await barrier.reached.wait()
            assert manager.store.get(box).state is State.PAUSED
            requests = [asyncio.create_task(work) for work in (manager.resume(box), manager.pause(box))]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in (pausing, *requests))
            barrier.release.set()
            await asyncio.gather(pausing, *requests)
            await manager.resume(box)
            assert await sh(manager, box, "cat /f") == "1\n"

    run(test())


def test_a_caller_that_goes_away(fake_root: Assets, gates: Gates) -> None:
    """A cancelled request goes on to its end; nothing is left half done."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            barrier = gates.hold(Step.MEMORY_COPIED)
            task = asyncio.create_task(manager.pause(box))
            await barrier.reached.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            barrier.release.set()
            assert (await manager.pause(box)).state is State.PAUSED

    run(test())


PAUSE_STEPS = (Step.QUIESCED, Step.STOPPED, Step.STATE_SAVED, Step.MEMORY_COPIED, Step.WRITTEN, Step.COMMITTING)


@pytest.mark.parametrize("step", PAUSE_STEPS)
@pytest.mark.parametrize("verb", ["pause", "checkpoint", "fork"])
def test_faults_of_captures(fake_root: Assets, gates: Gates, verb: str, step: Step) -> None:
    """`Recoverable`, running, and the next attempt has everything (AgentENV #41)."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            await sh(manager, box, "echo 1 > /f")
            gates.fail(step, OSError(28, "No space left on device"))
            request = {"pause": manager.pause, "checkpoint": manager.checkpoint}.get(verb)
            with pytest.raises(Recoverable, match="No space left"):
                await (request(box) if request else manager.fork(box, 2))
            assert manager.store.get(box).state is State.RUNNING
            assert "No space left" in manager.store.get(box).reason
            assert await sh(manager, box, "cat /f") == "1\n"
            await manager.pause(box)
            await manager.resume(box)
            assert await sh(manager, box, "cat /f") == "1\n"
            assert len(manager.store.boxes()) == 1

    run(test())


def test_a_terminal_capture(fake_root: Assets, gates: Gates) -> None:
    """A guest that cannot go on after a fault is ended, with both reasons."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            driver = manager.driver
            assert isinstance(driver, FakeDriver)

            async def broken(handle: object) -> None:
                raise SandboxError("it is stuck")

            gates.fail(Step.STOPPED, OSError("no disk"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(driver, "_go_on", broken)
                with pytest.raises(Terminal, match=r"no disk.*it is stuck"):
                    await manager.checkpoint(box)
            record = manager.store.get(box)
            assert record.state is State.ENDED
            assert "it is stuck" in record.reason
            assert driver.vms == {}
            await manager.kill(box)

    run(test())


@pytest.mark.parametrize("step", [Step.SPAWNED, Step.LOADED, Step.COMMITTING])
def test_a_failed_resume_stays_paused(fake_root: Assets, gates: Gates, step: Step) -> None:
    """Nothing of a paused sandbox is lost by an attempt to resume it."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            await sh(manager, box, "echo 1 > /f")
            await manager.pause(box)
            gates.fail(step, SandboxError("not now"))
            with pytest.raises(SandboxError, match="not now"):
                await manager.resume(box)
            assert manager.store.get(box).state is State.PAUSED
            assert manager.driver.vms == {}  # type: ignore[attr-defined]
            await manager.resume(box)
            assert await sh(manager, box, "cat /f") == "1\n"

    run(test())


def test_fork_in_part(fake_root: Assets, gates: Gates) -> None:
    """Running or paused; what could not be made is an error in the list and leaves nothing."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            for paused in (False, True):
                if paused:
                    await manager.pause(box)
                gates.fail(Step.LOADED, SandboxError("no luck"))
                results = await manager.fork(box, 4)
                assert [type(result) for result in results].count(Record) == 3
                assert manager.store.get(box).state is (State.PAUSED if paused else State.RUNNING)
                for result in results:
                    if isinstance(result, Record):
                        assert await sh(manager, result.id, "echo alive") == "alive\n"
                        await manager.kill(result.id)
            for count in (0, 65):
                with pytest.raises(ValueError, match="between 1 and 64"):
                    await manager.fork(box, count)
            alive = [record for record in manager.store.boxes() if record.state is not State.ENDED]
            assert [record.id for record in alive] == [box]

    run(test())


def test_time_is_up(fake_root: Assets, gates: Gates) -> None:
    """Paused or killed, as it was asked for; renewed ones live; a paused one waits."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            pausing = (await manager.create(Options())).id
            killing = (await manager.create(Options(on_timeout="kill"))).id
            renewed = (await manager.create(Options())).id
            for box in (pausing, killing, renewed):
                manager.keep_alive(box, 1e-9)
            manager.keep_alive(renewed, 100)
            await sweep(manager)
            assert manager.store.get(pausing).state is State.PAUSED
            assert manager.store.get(renewed).state is State.RUNNING
            with pytest.raises(NotFound):
                manager.store.get(killing)
            await sweep(manager)
            assert manager.store.get(pausing).state is State.PAUSED
            await manager.resume(pausing)
            assert manager.store.get(pausing).state is State.RUNNING
            with pytest.raises(ValueError, match="timeout_s"):
                manager.keep_alive(renewed, 0)

    run(test())


def test_renewed_while_it_is_read(fake_root: Assets, gates: Gates) -> None:
    """A keep-alive that was acknowledged is kept, however late (AgentENV #165)."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options(on_timeout="kill"))).id
            manager.keep_alive(box, 1e-9)
            expired = manager.store.expired

            def read(now: float) -> list[Record]:
                records = expired(now)
                manager.keep_alive(box, 100)  # between the look and the act
                return records

            manager.store.expired = read  # type: ignore[method-assign]
            await sweep(manager)
            assert manager.store.get(box).state is State.RUNNING

    run(test())


def test_idle(fake_root: Assets, gates: Gates) -> None:
    """Paused when nothing was asked of it for a while and nothing runs in it."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options(idle_s=1000))).id
            program = await manager.exec(box, Command("sleep 1000", detach=True))
            manager.machines.running[box].used -= 2000
            await sweep(manager)
            assert manager.store.get(box).state is State.RUNNING
            await program.kill()
            await program.wait()
            await sweep(manager)
            assert manager.store.get(box).state is State.PAUSED

    run(test())


def test_a_checkpoint_of_nothing(fake_root: Assets, gates: Gates) -> None:
    """Without use since the last one there is no new capture; another label is another name for it."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            first = await manager.checkpoint(box)
            passed = len(gates.passed)
            assert await manager.checkpoint(box) == first
            named = await manager.checkpoint(box, label="same")
            assert len(gates.passed) == passed
            assert (named.memory, named.state) == (first.memory, first.state)
            await sh(manager, box, "true")
            assert await manager.checkpoint(box) != first
            program = await manager.exec(box, Command("sleep 1000", detach=True))
            third = await manager.checkpoint(box)
            assert await manager.checkpoint(box) != third  # something runs, and may have done anything
            await program.kill()

    run(test())


def test_a_machine_that_dies(fake_root: Assets, gates: Gates) -> None:
    """Its sandbox ends with the reason; its snapshots stay."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id
            await manager.checkpoint(box, label="before")
            driver = manager.driver
            assert isinstance(driver, FakeDriver)
            driver.crash(box)
            while manager.store.get(box).state is not State.ENDED:
                await asyncio.sleep(0.01)
            assert manager.store.get(box).reason == "the guest's kernel panicked"
            again = await manager.create(Options(snapshot="before"))
            assert await sh(manager, again.id, "echo alive") == "alive\n"

    run(test())


def test_memory_is_admitted(fake_root: Assets, gates: Gates) -> None:
    """One machine more than fit is refused before it starts; room comes back with pause and kill."""

    async def test() -> None:
        async with opened(fake_root, gates, memory=200 << 20) as manager:
            boxes = [(await manager.create(Options())).id for _ in range(3)]
            with pytest.raises(Exhausted, match="memory: 3 machines"):
                await manager.create(Options())
            assert len(manager.store.boxes()) == 3
            results = await manager.fork(boxes[0], 2)
            assert all(isinstance(result, Exhausted) for result in results)
            await manager.pause(boxes[0])
            await manager.create(Options())
            with pytest.raises(Exhausted):
                await manager.resume(boxes[0])
            assert manager.store.get(boxes[0]).state is State.PAUSED
            await manager.kill(boxes[1])
            await manager.resume(boxes[0])

    run(test())


def test_the_disk_is_full(fake_root: Assets, gates: Gates) -> None:
    """A capture over the quota is recoverable, and says so."""

    async def test() -> None:
        async with opened(fake_root, gates, disk=1 << 20) as manager:
            box = (await manager.create(Options())).id
            await manager.write(box, "/f", b"x" * (700 << 10))
            with pytest.raises(Recoverable, match="disk quota"):
                await manager.checkpoint(box)
            assert manager.store.get(box).state is State.RUNNING
            assert await sh(manager, box, "echo alive") == "alive\n"

    run(test())


def test_a_pool(fake_root: Assets, gates: Gates) -> None:
    """Machines are ready before they are asked for, up to the mark; each has a name of its own."""

    async def test() -> None:
        async with opened(fake_root, gates, pool_low=1, pool_high=3) as manager:
            first = await manager.create(Options())
            while manager.pool.size() < 3:
                await asyncio.sleep(0.01)
            assert manager.pool.size() == 3
            spawned = len([step for step, _ in gates.passed if step is Step.SPAWNED])
            second = await manager.create(Options())
            assert manager.pool.size() == 2
            assert len([step for step, _ in gates.passed if step is Step.SPAWNED]) == spawned
            assert await sh(manager, second.id, "hostname") == f"{second.id}\n"
            assert first.id != second.id

    run(test())


def test_a_restart(fake_root: Assets, gates: Gates) -> None:
    """Paused and snapshotted sandboxes are there again; one that had nothing to go back to says so."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            paused, saved, bare = [(await manager.create(Options())).id for _ in range(3)]
            for box in (paused, saved):
                await sh(manager, box, "echo 1 > /f")
            await manager.pause(paused)
            await manager.checkpoint(saved)
            await sh(manager, saved, "echo 2 > /f")
            token = manager.token(paused, "access")
        async with opened(fake_root, gates) as manager:
            assert manager.store.get(paused).state is State.PAUSED
            assert manager.store.get(saved).state is State.PAUSED
            assert "last snapshot" in manager.store.get(saved).reason
            assert manager.store.get(bare).state is State.ENDED
            assert "before any snapshot" in manager.store.get(bare).reason
            for box in (paused, saved):
                await manager.resume(box)
                assert await sh(manager, box, "cat /f") == "1\n"
            assert manager.token(paused, "access") == token

    run(test())


def test_options_name_what_is_wrong() -> None:
    """Before anything is done."""
    with pytest.raises(ValueError, match="on_timeout"):
        Options(on_timeout="explode")
    with pytest.raises(ValueError, match="timeout_s is -1"):
        Options(timeout_s=-1)
    with pytest.raises(ValueError, match="idle_s"):
        Options(idle_s=0)


def test_the_sdk(fake_root: Assets, gates: Gates) -> None:
    """`async with`, forks with what failed, killing twice."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            async with Sandbox.create(manager=manager) as box:
                assert (await box.exec("echo hi")).text == "hi\n"
                await box.write("/f", "text")
                assert await box.read("/f") == b"text"
                await box.checkpoint("one")
                gates.fail(Step.LOADED, SandboxError("no luck"))
                kids = await box.fork(4)
                assert len(kids) == 3
                assert len(kids.failed) == 1
                await kids[0].pause()
                assert kids[0].state is State.PAUSED
                async with Sandbox.connect(kids[0].id, manager=manager) as again:
                    assert await again.read("/f") == b"text"
            assert box.id not in {record.id for record in manager.store.boxes()}

    run(test())


def test_churn(fake_root: Assets, gates: Gates) -> None:
    """Pauses and resumes leave nothing: neither rows, files nor tasks."""

    async def test() -> None:
        async with opened(fake_root, gates) as manager:
            box = (await manager.create(Options())).id

            async def turn(number: int) -> None:
                await sh(manager, box, f"echo {number} > /f")
                await manager.pause(box)
                await manager.resume(box)
                gates.passed.clear()

            for number in range(5):
                await turn(number)
            await asyncio.sleep(0.05)
            tasks, rows = len(asyncio.all_tasks()), len(manager.store.layers())
            started = time.monotonic()
            for number in range(40):
                await turn(number)
            await asyncio.sleep(0.05)
            assert len(asyncio.all_tasks()) <= tasks
            assert len(manager.store.layers()) <= rows + 1
            assert len(list((fake_root.root / "layers").iterdir())) == len(manager.store.layers())
            assert time.monotonic() - started < 40

    run(test())


def test_too_many_boxes_are_a_limit_not_a_fault(fake_root: Assets, gates: Gates) -> None:
    async def test() -> None:
        async with opened(fake_root, gates, boxes=1) as manager:
            box = (await manager.create(Options())).id
            with pytest.raises(Exhausted, match="1 sandboxes exist already"):
                await manager.create(Options())
            await manager.kill(box)
            await manager.create(Options())

    run(test())
