"""The python guest: a database in the middle of a transaction, and a container, through captures and copies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from perilune.sandbox import Assets, Command, GuestError, Manager, Sandbox
from perilune.sandbox.qemu import QemuDriver
from tests.sandbox.python_guest import AFTER, BEFORE
from tests.sandbox.worlds import run

PROGRAM = Path(__file__).with_name("python_guest.py")
BASE = "/root/work"
# A root of its own over the guest's, written to the disk; own processes, mounts, names, networks and control groups.
CONTAINER = "/var/lib/containers/one"
START_CONTAINER = f"""
    set -e
    cd {CONTAINER}
    mkdir -p upper/root/work scratch root
    cp /root/program.py upper/root/
    mount -t overlay container -o lowerdir=/,upperdir={CONTAINER}/upper,workdir={CONTAINER}/scratch root
    echo +memory +pids > /sys/fs/cgroup/cgroup.subtree_control
    mkdir /sys/fs/cgroup/one
    echo 200M > /sys/fs/cgroup/one/memory.max
    echo 20 > /sys/fs/cgroup/one/pids.max
    echo $$ > /sys/fs/cgroup/one/cgroup.procs
    exec unshare --mount --pid --uts --ipc --net --cgroup --fork sh -ec '
        cd root
        mount -t proc proc proc
        mkdir -p /root/old
        pivot_root . root/old
        umount -l /root/old
        hostname inside
        exec python3 /root/program.py /root/work
    '
"""
ENTER = "nsenter -a -t $(pgrep -f '^python3 /root/program.py') --"


@contextlib.asynccontextmanager
async def opened(assets: Assets) -> AsyncIterator[Manager]:
    manager = await Manager.open(assets, QemuDriver(assets.confine))
    try:
        yield manager
    finally:
        await manager.close()


async def read(box: Sandbox, path: str, timeout_s: float = 30.0) -> Any:
    """What the program has published, as soon as it has."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return json.loads(await box.read(path))
        except GuestError:
            assert time.monotonic() < until, f"{path} did not appear"
            await asyncio.sleep(0.05)


async def sqlite(box: Sandbox, folder: str, statement: str) -> Any:
    """What another connection to the database is told."""
    script = """if True:
        import json, sqlite3, sys
        database = sqlite3.connect(sys.argv[1], timeout=0)
        print(json.dumps(database.execute(sys.argv[2]).fetchall()))"""
    result = await box.exec(["python3", "-c", script, f"{folder}/base", statement])
    return json.loads(result.stdout) if result.exit_code == 0 else result.stderr.decode()


async def goes_on(box: Sandbox, folder: str, earlier: int) -> dict[str, Any]:
    """The program counts on, and has not missed or repeated a number since its start."""
    first = await read(box, f"{folder}/state")
    second: dict[str, Any] = first
    while second["count"] == first["count"]:
        second = await read(box, f"{folder}/state")
    assert second["count"] > first["count"] >= earlier
    assert (first["pid"], first["secret"]) == (second["pid"], second["secret"])
    lines = (await box.read(f"{folder}/log")).decode().splitlines()
    assert list(map(int, lines)) == list(range(1, len(lines) + 1))
    return second


async def commits(box: Sandbox, folder: str, name: str) -> None:
    """The transaction that was open goes on and ends in this machine's name, and nobody else's."""
    await box.write(f"{folder}/go", name)
    done = await read(box, f"{folder}/done")
    assert done == {"owners": {"before": BEFORE, name: AFTER}, "check": ["ok"]}


def test_a_half_written_database_in_every_copy(python_root: Assets) -> None:
    """Copies of a running and of a paused guest go on from one instant, then differ; the original never notices."""

    async def test() -> None:
        async with opened(python_root) as manager, Sandbox.create("python", manager=manager) as box:
            await box.upload(PROGRAM, "/root/program.py")
            await box.exec(f"mkdir {BASE}")
            await box.start(Command(["python3", "/root/program.py", BASE], detach=True))
            begun = await read(box, f"{BASE}/state")
            identity = "hostname; cat /etc/machine-id"
            itself = (await box.exec(identity)).text
            kids = list(await box.fork(2))
            at_fork = await goes_on(box, BASE, begun["count"])
            assert (await box.exec(identity)).text == itself
            await box.pause()
            kids += await box.fork(1)
            await box.resume()

            # Half of it is in the file, and nobody else can read it.
            assert len(await kids[0].read(f"{BASE}/base")) > 50 * 1500
            assert len(await kids[0].read(f"{BASE}/base-journal")) > 0
            assert "locked" in await sqlite(kids[0], BASE, "SELECT count(*) FROM rows")

            for kid in kids:
                seen = await goes_on(kid, BASE, begun["count"])
                assert (seen["pid"], seen["secret"]) == (at_fork["pid"], at_fork["secret"])
            first, killed, of_paused = kids
            await commits(first, BASE, first.id)
            await commits(of_paused, BASE, of_paused.id)
            # One whose program dies instead finds the journal, and is as before the transaction.
            await killed.exec("pkill -9 -f program.py")
            assert await sqlite(killed, BASE, "SELECT count(*) FROM rows") == [[0]]
            assert await sqlite(killed, BASE, "PRAGMA integrity_check") == [["ok"]]

            assert "locked" in await sqlite(box, BASE, "SELECT count(*) FROM rows")
            await goes_on(box, BASE, at_fork["count"])
            await commits(box, BASE, "original")
            await commits_last(box, kids)

    async def commits_last(box: Sandbox, kids: list[Sandbox]) -> None:
        """What was committed is there after a pause, and random numbers, names and clocks are each machine's own."""
        await kids[0].pause()
        await kids[0].resume()
        owners = await sqlite(kids[0], BASE, "SELECT DISTINCT who FROM rows ORDER BY who = 'before'")
        assert owners == [[kids[0].id], ["before"]]
        own = (
            "head -c 16 /dev/urandom | md5sum | cut -c 1-32; cat /proc/sys/kernel/random/uuid /etc/machine-id; hostname"
        )
        seen = []
        for one in (box, *kids):
            earliest = time.time()
            *words, clock = (await one.exec(f"{own}; date +%s.%N")).text.split()
            assert earliest - 0.5 <= float(clock) <= time.time() + 0.5
            seen += words
        assert len(set(seen)) == len(seen) == 4 * (1 + len(kids))

    run(test())


def test_a_container_in_the_python_guest(python_root: Assets) -> None:
    """Own namespaces, control group and root over an overlay on the disk: through checkpoint, pause, resume, fork."""
    inside = f"{CONTAINER}/root{BASE}"

    async def alive(box: Sandbox, earlier: int) -> int:
        script = "hostname; tr '\\0' ' ' < /proc/1/cmdline; echo; grep -c : /proc/net/dev; test -e /root/old/bin"
        seen = await box.exec(["sh", "-c", f'{ENTER} sh -c "$1"', "sh", script])
        assert seen.text.splitlines() == ["inside", "python3 /root/program.py /root/work ", "1"]
        assert seen.exit_code == 1  # the guest's root is out of reach
        group = (await box.exec("cd /sys/fs/cgroup/one; cat memory.max pids.max pids.current")).text.split()
        assert group == [str(200 << 20), "20", "2"]  # the program, and `unshare`, which waits for it
        assert (await box.exec("hostname")).text == f"{box.id}\n"
        return int((await goes_on(box, inside, earlier))["count"])

    async def test() -> None:
        async with opened(python_root) as manager, Sandbox.create("python", manager=manager) as box:
            await box.upload(PROGRAM, "/root/program.py")
            await box.exec(f"mkdir -p {CONTAINER}")
            await box.start(Command(START_CONTAINER, detach=True))
            count = int((await read(box, f"{inside}/state"))["count"])
            count = await alive(box, count)
            snapshot = await box.checkpoint()
            count = await alive(box, count)
            await box.pause()
            await box.resume()
            count = await alive(box, count)
            kids = await box.fork(2)
            for kid in kids:
                await alive(kid, count)
                await commits(kid, inside, kid.id)
            await commits(box, inside, "original")
            await box.rollback(snapshot)
            await alive(box, 1)
            await commits(box, inside, "again")
            assert (await box.exec("ls /root/work")).exit_code != 0  # it has written to its own layer

    run(test())
