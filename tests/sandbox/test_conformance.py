"""What every driver promises (`perilune.sandbox.driver`), tested on each of them alike."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from perilune.sandbox.driver import Capture, Command, Handle, Image, Machine, Network, Step
from perilune.sandbox.errors import GuestError, Recoverable, SandboxError, Terminal
from perilune.sandbox.gates import Gates
from tests.sandbox.worlds import Given, run, world

CAPTURE_STEPS = (
    *(Step.QUIESCED, Step.STOPPED, Step.STATE_SAVED, Step.DISK_FROZEN, Step.MEMORY_COPIED),
    *(Step.CONTINUED, Step.WRITTEN),
)


def test_programs(driver_and_machine: Given, place: Path, gates: Gates) -> None:
    """Exit codes, both outputs, stdin, environment of nothing, a program that is not there, a time limit."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            result = await w.sh(box, "echo out; echo err >&2; exit 3")
            assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
            assert not result.timed_out
            assert not result.truncated
            assert (await w.sh(box, "cat", stdin=b"x" * 300_000)).stdout == b"x" * 300_000
            assert (await w.sh(box, "cat")).stdout == b""
            assert (await w.sh(box, "no-such-program")).exit_code == 127
            started = time.monotonic()
            slow = await w.sh(box, "echo before; sleep 30", timeout_s=0.5)
            assert slow.timed_out
            assert slow.exit_code == 137
            assert slow.stdout == b"before\n"
            assert time.monotonic() - started < 25  # not the 30 that it would have slept
            many = await asyncio.gather(*(w.sh(box, f"sleep 0.1; echo {i}") for i in range(10)))
            assert [result.text for result in many] == [f"{i}\n" for i in range(10)]

    run(test())


def test_output_is_bounded_and_streamed(driver_and_machine: Given, place: Path) -> None:
    """A program that never stops printing fills neither memory nor the channel; a reader of the stream sees all."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            flood = await w.sh(box, "yes", timeout_s=1.0, max_output=10_000)
            assert flood.truncated
            assert flood.timed_out
            assert len(flood.stdout) == 10_000
            process = await w.driver.exec(box, Command("yes", timeout_s=30, max_output=10))
            seen = 0
            async for piece in process.output():
                assert piece.stream == 1
                seen += len(piece.data)
                if seen > 1 << 20:
                    await process.kill()
                    break
            assert (await process.wait()).exit_code == 137
            assert (await w.sh(box, "echo alive")).text == "alive\n"

    run(test())


def test_interactive(driver_and_machine: Given, place: Path) -> None:
    """stdin stays open for a program that is interactive, until it is closed."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            process = await w.driver.exec(box, Command("cat", interactive=True))
            await process.write(b"one ")
            await asyncio.sleep(0.05)
            await process.write(b"two")
            await process.close_stdin()
            assert (await process.wait()).stdout == b"one two"

    run(test())


def test_files(driver_and_machine: Given, place: Path) -> None:
    """Written in one piece, read whole; errors name the file."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            data = os.urandom(700_000)
            await w.driver.write(box, "/root/deep/er/file", data)
            assert await w.driver.read(box, "/root/deep/er/file", 1 << 20) == data
            await w.driver.write(box, "/root/deep/er/file", b"")
            assert await w.driver.read(box, "/root/deep/er/file", 1) == b""
            with pytest.raises(GuestError, match="/root/none"):
                await w.driver.read(box, "/root/none", 1)
            await w.driver.write(box, "/root/large", b"12345")
            with pytest.raises(GuestError, match="/root/large"):
                await w.driver.read(box, "/root/large", 4)

    run(test())


def test_checkpoint_chain(driver_and_machine: Given, place: Path) -> None:
    """S0 -> A -> S1 -> B -> S2: each has what was there at its instant and nothing of later; the original runs on."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            images = []
            for step in range(3):
                await w.sh(box, f"echo {step} >> /root/log; sync")
                capture = await w.checkpoint(box)
                assert capture.pause_s < 5
                images.append(w.image(capture))
            assert (await w.sh(box, "cat /root/log")).text == "0\n1\n2\n"
            for step, image in enumerate(images):
                copy = await w.resume(f"copy-{step}", image)
                expected = "".join(f"{i}\n" for i in range(step + 1))
                assert (await w.sh(copy, "cat /root/log")).text == expected
                # A capture of the copy is complete as well: disk layers below, pages of the image.
                await w.sh(copy, "echo more >> /root/log; sync")
                second = await w.resume(f"second-{step}", w.image(await w.checkpoint(copy), image))
                assert (await w.sh(second, "cat /root/log")).text == expected + "more\n"

    run(test())


def test_patches_are_laid_over(driver_and_machine: Given, place: Path) -> None:
    """A machine started from an image and patches is the one started from the merged image."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            first = w.image(await w.checkpoint(box))
            await w.sh(box, "echo late > /root/late; sync")
            capture = await w.checkpoint(box)
            merged = w.image(capture)
            patched = Image(first.memory, merged.state, merged.disks, (capture.memory,))
            copy = await w.resume("copy", patched)
            assert (await w.sh(copy, "cat /root/late")).text == "late\n"
            # What was patched in is part of the next capture, too.
            again = await w.resume(
                "again", w.image(await w.checkpoint(copy), Image(first.memory, merged.state, merged.disks))
            )
            assert (await w.sh(again, "cat /root/late")).text == "late\n"

    run(test())


def test_pause_and_resume(driver_and_machine: Given, place: Path) -> None:
    """Pausing ends the machine and keeps the guest; three times, with files written each time (E2B #884)."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            await w.driver.exec(box, Command("sleep 1000", detach=True))
            image = None
            for turn in range(3):
                await w.sh(box, f"echo {turn} >> /root/log")
                capture = await w.pause(box)
                with pytest.raises(Terminal):
                    await w.driver.exec(box, Command("true"))
                image = w.image(capture, image)
                before = box
                box = await w.resume("box", image, continues=True)
                assert box.generation != before.generation
                assert (await w.sh(box, "cat /root/log")).text == "".join(f"{i}\n" for i in range(turn + 1))
                assert not await w.driver.idle(box)

    run(test())


def test_a_program_goes_on_over_a_pause(driver_and_machine: Given, place: Path) -> None:
    """Its streams are those of before, if the machine that is resumed is the one that was paused."""
    if driver_and_machine[0].name == "fake":
        pytest.skip("programs of the fake guest start anew")

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            command = Command("i=0; while [ $i -lt 40 ]; do echo $i; i=$((i+1)); sleep 0.05; done")
            process = await w.driver.exec(box, command)
            await asyncio.sleep(0.5)
            await w.resume("box", w.image(await w.pause(box)), continues=True)
            result = await process.wait()
            assert result.exit_code == 0
            assert result.text == "".join(f"{i}\n" for i in range(40))

    run(test())


def test_forks_differ(driver_and_machine: Given, place: Path) -> None:
    """Copies start from one instant and diverge; after `refresh` none shares random numbers, names or the old time."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            await w.sh(box, "echo same > /root/file")
            image = w.image(await w.checkpoint(box))
            await asyncio.sleep(1.1)
            names = [f"fork-{i}" for i in range(4)]
            handles = await w.driver.fork(names, w.machine, image, [w.directory(n) for n in names], Network())
            seen = set()
            for name, handle in zip(names, handles, strict=True):
                assert isinstance(handle, Handle)
                await w.driver.refresh(handle, name)
                assert (await w.sh(handle, "cat /root/file; hostname")).text == f"same\n{name}\n"
                await w.sh(handle, f"echo {name} > /root/file")
                earliest = time.time()
                now = float((await w.sh(handle, "date +%s")).text)
                assert earliest - 1.1 <= now <= time.time() + 0.1  # whole seconds, however long the answer takes
                seen.add((await w.sh(handle, "cat /proc/sys/kernel/random/uuid")).text)
            assert len(seen) == 4
            for name, handle in zip(names, handles, strict=True):
                assert isinstance(handle, Handle)
                assert (await w.sh(handle, "cat /root/file")).text == f"{name}\n"
            assert (await w.sh(box, "cat /root/file")).text == "same\n"

    run(test())


def test_fork_succeeds_in_part(driver_and_machine: Given, place: Path, gates: Gates) -> None:
    """One copy that fails is an error in its place; the others run."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            image = w.image(await w.checkpoint(box))
            gates.fail(Step.LOADED, SandboxError("no luck"))
            names = ["a", "b", "c"]
            results = await w.driver.fork(names, w.machine, image, [w.directory(n) for n in names], Network())
            failed = [result for result in results if isinstance(result, SandboxError)]
            assert len(failed) == 1
            assert "no luck" in str(failed[0])
            for handle in results:
                if isinstance(handle, Handle):
                    assert (await w.sh(handle, "echo alive")).text == "alive\n"

    run(test())


@pytest.mark.parametrize("verb", ["checkpoint", "pause"])
def test_a_failed_capture_leaves_a_guest_that_runs(
    driver_and_machine: Given, place: Path, gates: Gates, verb: str
) -> None:
    """A fault at each step: `Recoverable`, the guest answers, and the next capture has everything."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()

            async def commit(capture: Capture) -> None:
                pass

            for number, step in enumerate(CAPTURE_STEPS):
                if verb == "pause" and step is Step.CONTINUED:
                    continue
                await w.sh(box, f"echo {number} > /root/{number}; sync")
                gates.fail(step, OSError(28, "No space left on device"))
                capturing = w.checkpoint(box) if verb == "checkpoint" else w.driver.pause(box, w.directory("c"), commit)
                with pytest.raises(Recoverable, match="No space left"):
                    await capturing
                assert (await w.sh(box, "echo alive", timeout_s=60)).text == "alive\n", step
            copy = await w.resume("copy", w.image(await w.checkpoint(box)))
            for number, step in enumerate(CAPTURE_STEPS):
                if verb == "checkpoint" or step is not Step.CONTINUED:
                    assert (await w.sh(copy, f"cat /root/{number}")).text == f"{number}\n"

    run(test())


def test_a_pause_that_cannot_be_committed(driver_and_machine: Given, place: Path) -> None:
    """The machine is not ended before what it was is safe."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()

            async def commit(capture: Capture) -> None:
                raise OSError(28, "No space left on device")

            with pytest.raises(Recoverable, match="No space left"):
                await w.driver.pause(box, w.directory("capture"), commit)
            assert (await w.sh(box, "echo alive")).text == "alive\n"

    run(test())


@pytest.mark.parametrize("step", CAPTURE_STEPS)
def test_a_cancelled_capture_leaves_a_guest_that_runs(
    driver_and_machine: Given, place: Path, gates: Gates, step: Step
) -> None:
    """A caller that goes away at any step leaves nothing frozen."""
    if driver_and_machine[0].name == "qemu" and step not in (Step.STOPPED, Step.DISK_FROZEN, Step.WRITTEN):
        pytest.skip("three steps stand for all on a real machine")

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            barrier = gates.hold(step)
            task = asyncio.create_task(w.checkpoint(box))
            await barrier.reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await w.sh(box, "echo alive", timeout_s=60)).text == "alive\n"
            await w.checkpoint(box)

    run(test())


def test_the_end(driver_and_machine: Given, place: Path) -> None:
    """Stopping twice is no error; whoever waits hears of the end; nothing works afterwards."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            ended = asyncio.create_task(w.driver.ended(box))
            process = await w.driver.exec(box, Command("sleep 1000"))
            await asyncio.sleep(0.05)
            await w.driver.stop(box)
            await w.driver.stop(box)
            assert await ended
            for work in (w.sh(box, "true"), w.driver.read(box, "/x", 1), w.checkpoint(box), w.driver.stats(box)):
                with pytest.raises(Terminal):
                    await work
            if w.driver.name != "fake":
                with pytest.raises(Terminal):
                    await process.wait()

    run(test())


def test_a_guest_that_does_not_answer(driver_and_machine: Given, place: Path, gates: Gates) -> None:
    """A boot that hangs is ended in time, and said."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            handle = await w.driver.start("box", w.machine, w.directory("box"), Network())
            if w.driver.name == "fake":
                gates.hold(Step.READY)
            started = time.monotonic()
            with pytest.raises(Terminal, match="no answer"):
                await w.driver.wait_ready(handle, 0.05)
            assert time.monotonic() - started < 30
            assert "box" not in w.driver.vms  # type: ignore[attr-defined]

    run(test())


def test_idle_and_stats(driver_and_machine: Given, place: Path) -> None:
    """Idle means that no program runs; what is written costs memory."""

    async def test() -> None:
        async with world(driver_and_machine, place) as w:
            box = await w.boot()
            assert await w.driver.idle(box)
            process = await w.driver.exec(box, Command("sleep 1000", detach=True))
            assert not await w.driver.idle(box)
            await process.kill()
            await process.wait()
            assert await w.driver.idle(box)
            before = await w.driver.stats(box)
            await w.driver.write(box, "/dev/shm/data", os.urandom(32 << 20))
            after = await w.driver.stats(box)
            assert after.private - before.private > 4 << 20
            assert after.pss <= after.private + after.shared

    run(test())


def test_the_format_names_the_machine(driver_and_machine: Given, place: Path) -> None:
    """Every fact that a snapshot depends on, as text; another memory size is another format."""

    async def test() -> None:
        driver, machine, _ = driver_and_machine
        facts = await driver.format(machine)
        assert facts["driver"] == driver.name
        other = await driver.format(Machine(**{**machine.__dict__, "memory_mib": machine.memory_mib * 2}))
        assert facts != other
        assert all(isinstance(value, str) for value in facts.values())

    run(test())
