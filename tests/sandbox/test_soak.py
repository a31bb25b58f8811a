"""A thousand cycles and two hundred forks: no wrong answer, nothing left behind, the service no larger than before."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from perilune.sandbox import Assets, Manager, Sandbox, kill_all
from perilune.sandbox.qemu import QemuDriver
from tests.sandbox.worlds import run

CYCLES = int(os.environ.get("PERILUNE_SANDBOX_CYCLES", "1000"))
FORKS = 200


def held() -> dict[str, int]:
    """What a leak would add to: descriptors, children, tasks, namespaces, mounts; and the resident size in MiB."""
    status = Path("/proc/self/status").read_text()
    netns = Path("/run/netns")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "tasks": len(asyncio.all_tasks()),
        "namespaces": len(list(netns.glob("perilune-*"))) if netns.exists() else 0,
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "rss": int(status.split("VmRSS:")[1].split()[0]) >> 10,
    }


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_cycles_and_forks(qemu_root: Assets) -> None:
    async def test() -> None:
        manager = await Manager.open(qemu_root, QemuDriver(qemu_root.confine))
        box = await Sandbox.create(manager=manager, timeout_s=None)
        started = time.monotonic()
        before: dict[str, int] = {}
        for cycle in range(CYCLES):
            await box.exec(f"echo {cycle} >> /root/log; echo {cycle} > /dev/shm/last; sync")
            if cycle % 2:
                await box.pause()
                await box.resume()
            else:
                snapshot = await box.checkpoint()
                await box.rollback(snapshot)
                await manager.delete_snapshot(snapshot.id)
            answer = await box.exec("cat /dev/shm/last; tail -n 1 /root/log; wc -l < /root/log")
            assert answer.text.split() == [str(cycle), str(cycle), str(cycle + 1)]
            if cycle == CYCLES // 10:
                await asyncio.sleep(1)
                before = held()
        for turn in range(FORKS // 8):
            kids = await box.fork(8)
            answers = await asyncio.gather(*(kid.exec("wc -l < /root/log; hostname") for kid in kids))
            assert [answer.text.split() for answer in answers] == [[str(CYCLES), kid.id] for kid in kids], turn
            await kill_all(kids)
        await asyncio.sleep(1)
        after = held()
        print(f"{time.monotonic() - started:.0f} s", before, after, f"{manager.layers.used() >> 20} MiB of layers")
        assert after.pop("rss") <= before.pop("rss") + 16
        assert after == before
        assert len(manager.store.layers()) < 40
        assert len(list((qemu_root.root / "boxes").iterdir())) == 1
        await box.kill()
        await manager.close()

    run(test(), limit_s=7000)
