"""kill -9 of the service at every step of every transition: what it had acknowledged is there, nothing else is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from perilune.sandbox import Assets, Command, Manager, NotFound, State
from perilune.sandbox.driver import Driver
from perilune.sandbox.fake import FakeDriver
from perilune.sandbox.qemu import QemuDriver
from tests.sandbox.worlds import run

REPOSITORY = Path(__file__).parents[2]
# More steps than one round of the victim passes: every step of every transition is hit.
ROUND = 75


def kill_after(assets: Assets, kind: str, passes: int) -> list[list[str]]:
    """Run a victim until it kills itself; what it said."""
    command = [sys.executable, "-m", "tests.sandbox.victim", str(assets.root), kind, str(passes)]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == -9, process.stderr
    return [line.split() for line in process.stdout.splitlines()]


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
                assert said[-2][0] == "saved" or box in written, "only the kill under way may have gone through"
                continue
            if box not in saved:
                assert record.state is State.PAUSED or record.reason
                continue
            if record.state is State.ENDED:
                assert record.reason == "killed", record  # the kill of a fork was under way
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
    """Over the fake driver: the store, the layers and the states, at many steps of the round."""
    steps: Counter[str] = Counter()
    for passes in range(0, ROUND, 5):
        said = kill_after(fake_root, "fake", passes)
        steps[said[-1][1]] += 1
        run(check(fake_root, FakeDriver(), said))
    assert len(steps) >= 6


def test_kills_of_machines(qemu_root: Assets) -> None:
    """Over QEMU: machines end with their service, disks and memory belong together."""
    for passes in (4, 17, 26, 44):
        said = kill_after(qemu_root, "qemu", passes)
        run(check(qemu_root, QemuDriver(qemu_root.confine), said), limit_s=90)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["fake", "qemu"])
def test_a_hundred_kills(kind: str, request: pytest.FixtureRequest) -> None:
    """Every step of the round once, then again at others: at least five of each kind of step."""
    assets = request.getfixturevalue(f"{kind}_root")
    steps: Counter[str] = Counter()
    started = time.monotonic()
    for number in range(100):
        said = kill_after(assets, kind, number % ROUND)
        steps[said[-1][1]] += 1
        driver: Driver = FakeDriver() if kind == "fake" else QemuDriver(assets.confine)
        run(check(assets, driver, said), limit_s=120)
    print(dict(steps), f"{time.monotonic() - started:.0f} s")
    assert all(count >= 2 for count in steps.values())
    assert len(steps) >= 12


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
