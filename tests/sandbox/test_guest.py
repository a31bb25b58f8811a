"""Real guests: what programs in them see, and what happens to those that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from perilune.sandbox import (
    Assets,
    Command,
    GuestError,
    Limits,
    Manager,
    Record,
    Recoverable,
    Sandbox,
    SandboxError,
    State,
    Terminal,
)
from perilune.sandbox.driver import Step
from perilune.sandbox.gates import Gates
from perilune.sandbox.packages import require
from perilune.sandbox.qemu import QemuDriver
from tests.sandbox.worlds import run


@contextlib.asynccontextmanager
async def opened(assets: Assets, gates: Gates | None = None) -> AsyncIterator[Manager]:
    gate = gates or Gates()
    manager = await Manager.open(assets, QemuDriver(assets.confine, "tcg", gate), Limits(), gate)
    try:
        yield manager
    finally:
        await manager.close()
        assert manager.driver.vms == {}  # type: ignore[attr-defined]


async def check_clock(box: Sandbox) -> None:
    """The guest's clock is right: in whole seconds, however long its answer takes."""
    earliest = time.time()
    now = float((await box.exec("date +%s")).text)
    assert earliest - 1.1 <= now <= time.time() + 0.1


def test_what_a_program_sees(qemu_root: Assets, tmp_path: Path) -> None:
    """A terminal, users, environment, folders, a whole tree to kill; files and folders in and out."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager, env={"A": "1"}) as box:
            result = await box.exec(
                ["sh", "-c", "echo $A $B $HOME; pwd; id -u"], env={"B": "2"}, cwd="/tmp", user="nobody"
            )
            assert result.text == "1 2 /\n/tmp\n65534\n"
            assert (await box.exec("touch /root/x", user="nobody")).exit_code != 0
            with pytest.raises(SandboxError, match="No such file"):
                await box.exec(["/no/such"])
            with pytest.raises(SandboxError, match="No such file"):
                await box.exec("true", cwd="/no/such")

            terminal = await box.start(Command("tty; stty size; read line; echo got $line", pty=(30, 99)))
            await terminal.write(b"hello\n")
            answer = await terminal.wait()
            assert answer.exit_code == 0
            assert "/dev/pts/" in answer.text
            assert "30 99" in answer.text
            assert "got hello" in answer.text

            # A daemon of its own session dies with its tree; one whose parent has ended goes on until then.
            started = await box.exec("setsid sh -c 'sleep 500; true' >/dev/null 2>&1 & echo ok")
            assert started.text == "ok\n"
            assert (await box.exec("ps | grep -c '[s]leep 500'")).text != "0\n"
            tree = await box.start(Command("setsid setsid sleep 600 & trap '' TERM; sleep 601 & wait"))
            await asyncio.sleep(0.2)
            await tree.kill(15)
            await asyncio.sleep(0.1)
            await tree.kill(9)
            assert (await tree.wait()).exit_code == 137
            assert (await box.exec("ps | grep -c '[s]leep 60'")).text == "0\n"

            folder = tmp_path / "folder"
            (folder / "sub").mkdir(parents=True)
            (folder / "sub" / "file").write_bytes(os.urandom(1000))
            await box.upload(folder, "/root/folder")
            await box.download("/root/folder", tmp_path / "back")
            assert (tmp_path / "back" / "sub" / "file").read_bytes() == (folder / "sub" / "file").read_bytes()
            await box.exec("mkdir /root/evil; ln -s /etc /root/evil/link")
            with pytest.raises(SandboxError, match="refused"):
                await box.download("/root/evil", tmp_path / "evil")
            assert not (tmp_path / "evil" / "link").exists()

    run(test())


def test_transfers_that_are_cancelled_leave_nothing_behind(qemu_root: Assets, tmp_path: Path) -> None:
    """A file is written beside its place, a folder goes through an archive: neither stays, and the old file does."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(os.urandom(30_000_000))

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            await manager.write(box.id, "/root/new/file", b"old")
            await box.exec("mkdir /root/out; dd if=/dev/urandom of=/root/out/file bs=1M count=30")
            transfers = (
                lambda: manager.write(box.id, "/root/new/file", bytes(100_000_000)),
                lambda: box.upload(tmp_path / "folder", "/root/folder"),
                lambda: box.download("/root/out", tmp_path / "out"),
            )
            cancelled = 0
            for transfer in transfers:
                for delay in (0.0, 0.1, 0.2, 0.4):
                    task = asyncio.create_task(transfer())
                    await asyncio.sleep(delay)
                    task.cancel()
                    cancelled += isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)
            assert cancelled >= 6
            left = await box.exec("ls -A /root/new /tmp; wc -c < /root/new/file; ls -l /proc/1/fd | grep -c /root")
            assert left.text.split() == ["/root/new:", "file", "/tmp:", "3", "0"]

    run(test())


def test_misbehaviour(qemu_root: Assets) -> None:
    """A fork bomb, endless output, a program that ignores signals: ended in time, and the guest goes on."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager, disk_mib=64) as box:
            bomb = await box.exec("bomb() { bomb | bomb & }; bomb; sleep 100", timeout_s=2)
            assert bomb.timed_out
            assert (await box.exec("echo alive", timeout_s=100)).text == "alive\n"
            started = time.monotonic()
            flood = await box.exec("yes | head -c 10000000000", timeout_s=2, max_output=1000)
            assert flood.truncated
            assert len(flood.stdout) == 1000
            stubborn = await box.exec("trap '' TERM INT HUP; while true; do sleep 1; done", timeout_s=0.5)
            assert stubborn.timed_out
            assert time.monotonic() - started < 60
            full = await box.exec("dd if=/dev/zero of=/root/big bs=1M count=200; rm /root/big", timeout_s=100)
            assert b"No space left" in full.stderr
            eater = await box.exec("tail -c 1000000000 /dev/zero", timeout_s=100)
            assert eater.exit_code in (1, 137)  # refused by its kernel, or ended by it
            assert (await box.exec("echo alive")).text == "alive\n"

    run(test())


@pytest.fixture
def small(place: Path) -> Iterator[Path]:
    """A file system of 1 GiB."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    image, path = place / "small.ext4", place / "small"
    image.touch()
    os.truncate(image, 1 << 30)
    subprocess.run([require("mke2fs"), "-q", "-t", "ext4", "-m", "0", image], check=True)
    path.mkdir(mode=0o711)
    mounted = subprocess.run(["mount", "-o", "loop", image, path], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no loop devices: {mounted.stderr.strip()}")
    path.chmod(0o711)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_a_full_disk_of_the_host(qemu_root: Assets, small: Path) -> None:
    """Captures are recoverable, a guest that writes gets an error and is not stopped; with room all goes on."""
    for name in ("layers", "images"):
        (small / name).mkdir(mode=0o711)
        copied = [str(path.resolve()) for path in (qemu_root.root / name).iterdir()]
        subprocess.run(["cp", "--sparse=always", *copied, small / name], check=True)
    shutil.copy(qemu_root.root / "state.db", small)
    for name in ("assets", "templates"):
        (small / name).symlink_to(qemu_root.root / name)

    def fill(room: int) -> None:
        """Leave so many bytes; none is less than a block."""
        with open(small / "filling", "ab") as file:
            status = os.statvfs(small)
            size = status.f_bavail * status.f_frsize - room
            if size > 0:
                os.posix_fallocate(file.fileno(), file.tell(), size)

    async def test() -> None:
        async with opened(Assets(small)) as manager, Sandbox.create(manager=manager) as box:
            fill(24 << 20)
            await box.exec("head -c 40000000 /dev/urandom > /dev/shm/large; echo 1 > /root/kept; sync")
            for verb in (box.checkpoint, box.pause):
                with pytest.raises(Recoverable, match="No space left"):
                    await verb()
                assert box.state is State.RUNNING
                assert list((small / "staging").iterdir()) == []
            await box.exec("rm /dev/shm/large")
            fill(1 << 20)
            written = await box.exec("head -c 60000000 /dev/urandom > /root/large; sync; echo ended", timeout_s=100)
            assert written.text == "ended\n"
            assert (await box.exec("cat /root/kept; echo alive")).text == "1\nalive\n"
            (small / "filling").unlink()
            await box.exec("echo 2 >> /root/kept")
            await box.pause()
            await box.resume()
            assert (await box.exec("cat /root/kept")).text == "1\n2\n"

    run(test())


def test_a_kernel_panic(qemu_root: Assets) -> None:
    """The sandbox ends, whoever waits hears why, snapshots stay."""

    async def test() -> None:
        async with opened(qemu_root) as manager:
            box = await Sandbox.create(manager=manager)
            await box.checkpoint("before")
            with pytest.raises(Terminal, match="panic"):
                await box.exec("echo c > /proc/sysrq-trigger; sleep 5" if _has_sysrq(qemu_root) else _KILL_INIT)
            while box.state is not State.ENDED:
                await asyncio.sleep(0.02)
            assert "panic" in box.record.reason
            async with Sandbox.create(manager=manager, snapshot="before") as again:
                assert (await again.exec("echo alive")).text == "alive\n"

    run(test())


# Process 1 cannot be killed from inside; without its memory it dies all the same.
_KILL_INIT = "dd if=/dev/zero of=/proc/1/mem bs=4096 seek=1024 count=40 conv=notrunc 2>/dev/null; sleep 5"


def _has_sysrq(assets: Assets) -> bool:
    return assets.kernel().name == "stock"


def test_fork_truth(qemu_root: Assets) -> None:
    """A counter in memory, an open file and a half-written one go on in every copy from the same instant."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            script = """
                echo $$ > /dev/shm/pid; exec 3> /root/open; rm /root/open; i=0
                while true; do
                    i=$((i+1)); echo line $i >&3; echo $i > /dev/shm/c; mv /dev/shm/c /dev/shm/count; sleep 0.05
                done
            """
            await box.start(Command(script, detach=True))
            await box.exec("dd if=/dev/urandom of=/root/half bs=1k count=100; sync; echo more >> /root/half")
            half = (await box.exec("md5sum /root/half")).text
            began = time.monotonic()
            kids = await box.fork(3)
            counts = []
            for kid in kids:
                first = int((await kid.exec("cat /dev/shm/count")).text)
                while (second := int((await kid.exec("cat /dev/shm/count")).text)) == first:
                    await asyncio.sleep(0.05)
                assert second > first
                counts.append(first)
                assert (await kid.exec("md5sum /root/half")).text == half
                # The deleted file is still open and still grows.
                lines = (await kid.exec("tail -n 1 /proc/$(cat /dev/shm/pid)/fd/3")).text
                assert int(lines.split()[1]) >= second - 1
            assert max(counts) - min(counts) < 20 * (time.monotonic() - began) + 20
            await kids[0].exec("echo mine > /root/half")
            assert (await kids[1].exec("md5sum /root/half")).text == half
            assert (await box.exec("md5sum /root/half")).text == half
            names = set()
            for one in (box, *kids):
                names.add((await one.exec("cat /etc/machine-id /proc/sys/kernel/random/uuid; hostname")).text)
                await check_clock(one)
            assert len(names) == 4

    run(test())


def test_time_goes_on(qemu_root: Assets) -> None:
    """After a pause timers end and the monotonic clock does not jump; the real one is right (kata #13798, FC #5809)."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            sleeper = await box.start(Command("sleep 0.5; echo woke"))
            before = float((await box.exec("cut -d' ' -f1 /proc/uptime")).text)
            await box.pause()
            await asyncio.sleep(2)
            await box.resume()
            after = float((await box.exec("cut -d' ' -f1 /proc/uptime")).text)
            assert after - before < 1.9
            assert (await sleeper.wait()).text == "woke\n"
            assert (await box.exec("sleep 0.1; echo ok")).text == "ok\n"
            await check_clock(box)

    run(test())


def test_a_writer_during_captures(qemu_root: Assets) -> None:
    """Disk and memory are of one instant: a file that is being written is never torn (CubeSandbox #1754)."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            # A line is in the log before the counter has its number: a counter ahead of the log is a torn capture.
            step = "echo $i >> /root/log; sync; echo $i > /dev/shm/d; mv /dev/shm/d /dev/shm/done"
            script = f"i=0; while true; do i=$((i+1)); {step}; done"
            await box.start(Command(script, detach=True))
            snapshots = []
            for _ in range(4):
                await asyncio.sleep(0.1)
                snapshots.append(await box.checkpoint())
            for snapshot in snapshots:
                async with Sandbox.create(manager=manager, snapshot=snapshot.id) as copy:
                    text = (await copy.exec("cat /dev/shm/done; echo 3 > /proc/sys/vm/drop_caches; cat /root/log")).text
                    done, *log = map(int, text.split())
                    assert len(log) >= done
                    assert log == list(range(1, len(log) + 1))

    run(test())


def test_a_hung_guest_is_captured(qemu_root: Assets) -> None:
    """An agent that cannot answer while it is stopped is captured as it is, and found again after the restore."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            vm = manager.driver.vms[box.id]  # type: ignore[attr-defined]
            await vm.qmp("stop")  # it neither reads nor answers now
            snapshot = await box.checkpoint("hung")
            assert not snapshot.clean
            assert (await box.exec("echo alive")).text == "alive\n"
            async with Sandbox.create(manager=manager, snapshot="hung") as copy:
                assert (await copy.exec("echo alive")).text == "alive\n"

    run(test())


def test_the_machine_is_confined(qemu_root: Assets) -> None:
    """Its process has a user, namespaces, a filter and limits of its own, and no capability."""
    if os.geteuid() != 0:
        pytest.skip("users of their own need root")

    async def test() -> None:
        async with opened(qemu_root) as manager:
            boxes = [await Sandbox.create(manager=manager) for _ in range(2)]
            uids = set()
            for box in boxes:
                pid = manager.machines.running[box.id].handle.pid
                status = Path(f"/proc/{pid}/status").read_text()
                uids.add(re.findall(r"^Uid:\t(\d+)\t\1\t\1\t\1$", status, re.M)[0])
                assert re.search(r"^CapEff:\t0+$", status, re.M)
                assert re.search(r"^CapBnd:\t0+$", status, re.M)
                assert re.search(r"^NoNewPrivs:\t1$", status, re.M)
                assert re.search(r"^Seccomp:\t2$", status, re.M)
                for kind in ("net", "ipc", "uts"):
                    assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
                limits = Path(f"/proc/{pid}/limits").read_text()
                assert re.search(r"Max core file size +0 +0 ", limits)
                assert re.search(r"Max open files +256 +256 ", limits)
                maps = Path(f"/proc/{pid}/maps").read_text()
                assert f"{qemu_root.directory.resolve()}/lib/libcapstone" in maps
                assert "unlimited" not in re.search(r"Max file size.*", limits)[0]  # type: ignore[index]
            assert len(uids) == 2
            assert "0" not in uids
            for box in boxes:
                await box.kill()

    run(test())


def test_machines_end_with_their_service_and_leave_nothing(qemu_root: Assets) -> None:
    """Fifteen rounds of everything: descriptors, processes, files and tasks are as many as before."""

    async def test() -> None:
        gates = Gates()
        async with opened(qemu_root, gates) as manager:
            box = await Sandbox.create(manager=manager)

            async def one_round() -> None:
                await box.exec("date > /root/f")
                await box.pause()
                await box.resume()
                (kid,) = await box.fork(1)
                await kid.kill()
                gates.fail(Step.WRITTEN, OSError("once"))
                with contextlib.suppress(Recoverable):
                    await box.checkpoint()

            def counts() -> tuple[int, int, int]:
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                return len(os.listdir("/proc/self/fd")), len(children), len(asyncio.all_tasks())

            for _ in range(2):
                await one_round()
            await asyncio.sleep(0.2)
            before = counts()
            for _ in range(4):
                await one_round()
            await asyncio.sleep(0.2)
            assert counts() <= before
            await box.kill()
            assert list((qemu_root.root / "boxes").iterdir()) == []

    run(test())


def test_many_captures_of_a_written_disk(qemu_root: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are merged, the process is renewed, programs and files go on; each snapshot has its own lines."""
    monkeypatch.setattr("perilune.sandbox.machines.DISK_LAYERS", 4)
    monkeypatch.setattr("perilune.sandbox.captures.RECYCLE", 5)

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            program = await box.start(Command("read line; echo got $line", interactive=True))
            pids = set()
            snapshots = []
            for turn in range(12):
                await box.exec(f"echo {turn} >> /root/log; head -c 100000 /dev/urandom > /root/{turn}; sync")
                snapshots.append(await box.checkpoint())
                assert len(snapshots[-1].disks) <= 4
                pids.add(manager.machines.running[box.id].handle.pid)
            assert len(pids) >= 2
            sums = (await box.exec("cd /root; md5sum log [0-9]*")).text
            await program.write(b"on\n")
            assert (await program.wait()).text == "got on\n"
            await box.pause()
            await box.resume()
            await box.exec("echo 3 > /proc/sys/vm/drop_caches")
            assert (await box.exec("cd /root; md5sum log [0-9]*")).text == sums
            for turn in (0, 5, 11):
                async with Sandbox.create(manager=manager, snapshot=snapshots[turn].id) as copy:
                    text = (await copy.exec("echo 3 > /proc/sys/vm/drop_caches; cat /root/log")).text
                    assert text == "".join(f"{i}\n" for i in range(turn + 1))

    run(test())


def test_many_that_print_at_once(qemu_root: Assets) -> None:
    """Every byte of each arrives, in order, and every end; and so do answers that are longer than their questions."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            await box.exec("head -c 300000 /dev/zero | tr '\\0' 'x' > /dev/shm/x")
            programs = [box.exec(f"cat /dev/shm/x; echo {i}", timeout_s=100) for i in range(16)]
            for i, result in enumerate(await asyncio.gather(*programs)):
                assert result.exit_code == 0
                assert (len(result.text), result.text[300_000:]) == (300_000 + len(str(i)) + 1, f"{i}\n")
            missing = await asyncio.gather(*(box.read(f"/{i}") for i in range(3000)), return_exceptions=True)
            assert {type(error) for error in missing} == {GuestError}

    run(test())


def test_files_that_have_no_end(qemu_root: Assets) -> None:
    """One of /proc has no size to compare with the limit: it is cut off at both ends, and the guest goes on."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            with pytest.raises(GuestError, match="at most 1000000 bytes"):
                await manager.read(box.id, "/proc/1/pagemap", 1_000_000)
            before = (await box.stats()).cpu_s
            assert (await box.exec("echo alive")).text == "alive\n"
            assert (await box.stats()).cpu_s - before < 2

    run(test())


def test_a_rollback_of_a_paused_one_ends_who_waits(qemu_root: Assets) -> None:
    """Its programs do not go on: whoever waits for one hears so, and not never."""

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            snapshot = await box.checkpoint()
            program = await box.start(Command("sleep 1000", detach=True))
            await box.pause()
            await box.rollback(snapshot)
            with pytest.raises(Terminal, match="ended"):
                await program.wait()
            assert (await box.exec("echo alive")).text == "alive\n"

    run(test())


@contextlib.contextmanager
def _descriptors(room: int) -> Iterator[None]:
    """This process can open so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + room
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for fd in taken[-room:]:
            os.close(fd)
        del taken[-room:]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_forks_without_enough_descriptors(qemu_root: Assets) -> None:
    """Each that cannot be made says so; nothing is left of it, and with descriptors all goes on."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")

    async def test() -> None:
        async with opened(qemu_root) as manager, Sandbox.create(manager=manager) as box:
            before = set(children.read_text().split())
            results: list[object] = []
            # From one descriptor to many: wherever the next one is missing.
            for room in (2, 5, 9, 14, 20):
                with _descriptors(room):
                    try:
                        results += await manager.fork(box.id, 3)
                    except SandboxError as error:
                        results.append(error)
            assert any(isinstance(result, SandboxError) for result in results)
            for result in results:
                if isinstance(result, Record):
                    await manager.kill(result.id)
            assert set(children.read_text().split()) == before
            assert [record.id for record in manager.store.boxes()] == [box.id]
            assert (await box.exec("echo alive")).text == "alive\n"

    run(test())
