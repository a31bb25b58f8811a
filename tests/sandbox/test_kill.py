"""kill -9 of the service at every step of every transition, and at random moments: what it had acknowledged is there,
nothing else is left."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from perilune.sandbox import Assets, Command, Manager, NotFound, State
from perilune.sandbox.driver import Driver, Step
from perilune.sandbox.fake import FakeDriver
from perilune.sandbox.qemu import QemuDriver
from tests.sandbox.worlds import run

REPOSITORY = Path(__file__).parents[2]
# States that pass by themselves: a kill in one of them is a kill in the middle of a transition.
TRANSITIONS = {"creating", "snapshotting", "pausing", "resuming", "forking", "killing"}
Said = list[list[str]]


def victim(assets: Assets, kind: str, *plan: str) -> list[str]:
    """The command line of a victim."""
    return [sys.executable, "-m", "tests.sandbox.victim", str(assets.root), kind, *plan]


def kill_at(assets: Assets, kind: str, step: str, state: str, times: int) -> Said:
    """Run a victim until it kills itself at a step; what it said."""
    command = victim(assets, kind, step, state, str(times))
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == -9, process.stderr
    said = [line.split() for line in process.stdout.splitlines()]
    assert said[-1] == ["killed", step, state]
    return said


def kill_after(assets: Assets, kind: str, seconds: float) -> Said:
    """Kill a victim from outside, so long after its first word."""
    with subprocess.Popen(victim(assets, kind), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(seconds)
        process.kill()
        said = [line.split() for line in [first, *process.stdout] if line.endswith("\n")]
    assert process.returncode == -9
    return said


def points(assets: Assets, kind: str) -> dict[str, list[str]]:
    """Every step, and the states of sandboxes in which a round passes it."""
    run_ = subprocess.run(
        victim(assets, kind, "list"), cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert run_.returncode == 0, run_.stderr
    found: dict[str, list[str]] = {}
    for line in run_.stdout.splitlines():
        word, *rest = line.split()
        if word == "passed" and rest[1] not in found.setdefault(rest[0], []):
            found[rest[0]].append(rest[1])
    return found


def machines_of(root: Path) -> list[int]:
    """Processes that have a machine's directory under `root` among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(root / "boxes") in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


async def check(assets: Assets, driver: Driver, said: list[list[str]]) -> None:
    """Open the root again and compare with what was acknowledged."""
    saved: dict[str, int] = {}
    written: dict[str, int] = {}
    ending = {words[1] for words in said if words[0] == "ending"}
    ended = {words[1] for words in said if words[0] == "ended"}
    last = {words[1]: words[0] for words in said if words[0] in ("created", "paused", "running", "ended")}
    for words in said:
        if words[0] == "saved":
            saved[words[1]] = int(words[2])
        elif words[0] == "writing":
            written[words[1]] = int(words[2])
    manager = await Manager.open(assets, driver)
    try:
        assert machines_of(assets.root) == []
        assert list((assets.root / "staging").iterdir()) == []
        assert {path.name for path in (assets.root / "layers").iterdir()} == set(manager.store.layers())
        for record in manager.store.boxes():
            assert record.state in (State.PAUSED, State.ENDED), record
        for box in {*saved, *last} - ended:
            try:
                record = manager.store.get(box)
            except NotFound:
                assert box in ending, "only the kill under way may have gone through"
                continue
            if box not in saved:
                assert record.state is State.PAUSED or record.reason
                continue
            if record.state is State.ENDED:
                assert record.reason == "killed", record
                assert box in ending
                continue
            if last[box] == "paused" if box in last else False:
                assert record.state is State.PAUSED
            # Every layer is verified by its checksum on the way: no torn pair can be resumed.
            await manager.resume(box)
            result = await manager.run(box, Command("cat /root/value", timeout_s=20))
            assert saved[box] <= int(result.text) <= max(saved[box], written.get(box, 0))
            await manager.kill(box)
        for snapshot in manager.snapshots():
            for layer in snapshot.layers():
                manager.layers.verify(layer)
    finally:
        await manager.close()
    assert machines_of(assets.root) == []


def test_kills_of_the_state(fake_root: Assets) -> None:
    """Over the fake driver: the store, the layers and the states, at each step once, and at random moments."""
    states = points(fake_root, "fake")
    assert set(states) == {step.value for step in Step}
    for number, step in enumerate(states):
        said = kill_at(fake_root, "fake", step, states[step][number % len(states[step])], number % 2)
        run(check(fake_root, FakeDriver(), said))
    for seconds in (0.01, 0.05):
        run(check(fake_root, FakeDriver(), kill_after(fake_root, "fake", seconds)))


def test_kills_of_machines(qemu_root: Assets) -> None:
    """Over QEMU: machines end with their service, disks and memory belong together."""
    places = [(Step.STATE_SAVED, "forking"), (Step.MEMORY_COPIED, "pausing"), (Step.COMMITTED, "paused")]
    for step, state in places:
        run(check_qemu(qemu_root, kill_at(qemu_root, "qemu", step.value, state, 0)), limit_s=90)
    run(check_qemu(qemu_root, kill_after(qemu_root, "qemu", 0.3)), limit_s=90)


async def check_qemu(assets: Assets, said: Said) -> None:
    await check(assets, QemuDriver(assets.confine), said)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["fake", "qemu"])
def test_a_hundred_kills(kind: str, request: pytest.FixtureRequest) -> None:
    """Each kind of step and each transition five times or more; then at random moments, a hundred in all."""
    assets = request.getfixturevalue(f"{kind}_root")
    steps: Counter[str] = Counter()
    states: Counter[str] = Counter()
    started = time.monotonic()

    def checked(said: Said) -> None:
        driver: Driver = FakeDriver() if kind == "fake" else QemuDriver(assets.confine)
        run(check(assets, driver, said), limit_s=120)

    def kill(step: str, state: str, times: int) -> None:
        checked(kill_at(assets, kind, step, state, times))
        steps[step] += 1
        states[state] += 1

    passed = points(assets, kind)
    assert set(passed) == {step.value for step in Step}
    for turn in range(5):
        for step, where in passed.items():
            kill(step, where[turn % len(where)], turn // len(where))
    for state in sorted(TRANSITIONS):
        in_it = [step for step, where in passed.items() if state in where]
        for turn in range(5 - states[state]):
            kill(in_it[turn % len(in_it)], state, turn)
    moments = random.Random(9)
    random_ones = 100 - sum(steps.values())
    for _ in range(random_ones):
        checked(kill_after(assets, kind, moments.uniform(0, 0.3 if kind == "fake" else 2.5)))
    print(dict(steps), dict(states), f"{random_ones} at random, {time.monotonic() - started:.0f} s")
    assert all(steps[step] >= 5 for step in Step)
    assert all(states[state] >= 5 for state in TRANSITIONS)


def test_a_service_that_is_still_there_is_not_disturbed(fake_root: Assets) -> None:
    """A second one over the same root is refused before it touches anything."""

    async def test() -> None:
        manager = await Manager.open(fake_root, FakeDriver())
        try:
            with pytest.raises(ValueError, match="another service"):
                await Manager.open(fake_root, FakeDriver())
        finally:
            await manager.close()

    asyncio.run(test())
