"""Sandboxes against the clock: captures, resumes, forks, boots; gVisor and CRIU beside them where they are installed.

    python bench/sandbox.py [--rounds 50] [--out bench/results/sandbox.json] [--root DIRECTORY] [--only NAME ...]

Medians with the 10th and 90th percentile, milliseconds. The root directory is one that `perilune sandbox setup` has
filled (templates busybox and python). Run it on a machine that does nothing else: an emulated guest and its service
share the processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import perilune
from perilune.sandbox import Assets, Command, Limits, Manager, Network, Options, Sandbox, kill_all, state_root
from perilune.sandbox.doctor import choose_accelerator
from perilune.sandbox.qemu import QemuDriver

Row = dict[str, Any]
MS = 1e3


def spread(seconds: list[float]) -> Row:
    """The median and where four of five values lie."""
    order = sorted(value * MS for value in seconds)
    tenth = order[len(order) // 10], order[-1 - len(order) // 10]
    return {"ms": round(statistics.median(order), 2), "p10": round(tenth[0], 2), "p90": round(tenth[1], 2)}


async def timed(work: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


class Bench:
    """One manager; events tell how long the guest stood."""

    def __init__(self, manager: Manager, rounds: int) -> None:
        self.manager = manager
        self.rounds = rounds
        self.captures: list[tuple[float, float]] = []
        manager.transitions.listeners.append(self._event)

    def _event(self, event: Any) -> None:
        if event.name == "captured":
            self.captures.append((event.seconds, event.detail["bytes"]))

    async def checkpoints(self, template: str, dirty_mb: float, memory_mib: int | None = None) -> Row:
        """Pause windows of live checkpoints with so much written since the last resume, and until they are durable."""
        box = await Sandbox.create(template, manager=self.manager, memory_mib=memory_mib)
        try:
            if dirty_mb > 2:
                size = int(dirty_mb * 1e6)
                await box.exec(f"head -c {size} /dev/urandom > /dev/shm/dirty", timeout_s=300)
            await box.exec(":")
            self.captures.clear()
            whole = []
            for turn in range(self.rounds):
                await self.manager.write(box.id, "/dev/shm/turn", str(turn).encode())
                whole.append(await timed(box.checkpoint()))
            windows = [seconds for seconds, _ in self.captures]
            dirty = statistics.median(size for _, size in self.captures)
            return {**spread(windows), "dirty_mb": round(dirty / 1e6, 2), "durable": spread(whole)}
        finally:
            await box.kill()

    async def pauses(self, template: str, dirty_mb: float = 0) -> Row:
        """Pause, and from the call of resume to the first answer of a program."""
        box = await Sandbox.create(template, manager=self.manager)
        try:
            if dirty_mb:
                await box.exec(f"head -c {int(dirty_mb * 1e6)} /dev/urandom > /dev/shm/dirty", timeout_s=300)
            pauses, resumes, firsts = [], [], []
            for _ in range(self.rounds):
                pauses.append(await timed(box.pause()))
                await asyncio.sleep(0.05)
                start = time.perf_counter()
                await box.resume()
                resumes.append(time.perf_counter() - start)
                result = await box.exec("echo hi")
                firsts.append(time.perf_counter() - start)
                assert result.text == "hi\n"
            return {**spread(firsts), "resume": spread(resumes), "pause": spread(pauses)}
        finally:
            await box.kill()

    async def restores(self, template: str) -> Row:
        """The driver alone: from a captured image to a guest that runs."""
        machines = self.manager.machines
        box = await Sandbox.create(template, manager=self.manager)
        snapshot = await box.checkpoint()
        machine = machines.machine(box.record.spec)
        await machines.prepare(snapshot, machine)
        _, image = machines._image(snapshot, machine, 64)
        driver = self.manager.driver
        running, seconds = [], []
        original = driver.gate  # type: ignore[attr-defined]

        async def gate(step: Any, name: str) -> None:
            if step.value == "loaded":
                running.append(time.perf_counter())

        driver.gate = gate  # type: ignore[attr-defined]
        try:
            for turn in range(self.rounds):
                directory = machines.directory(f"bench-{turn}")
                directory.mkdir(mode=0o700)
                start = time.perf_counter()
                handle = await driver.resume(f"bench-{turn}", machine, image, directory, Network())
                seconds.append(time.perf_counter() - start)
                running[-1] -= start
                await driver.stop(handle)
                shutil.rmtree(directory)
        finally:
            driver.gate = original  # type: ignore[attr-defined]
            await box.kill()
        return {**spread(running), "first ping": spread(seconds)}

    async def forks(self, template: str, count: int) -> Row:
        """So many copies at once, each of which has answered a program; and what they cost together."""
        seconds, pss = [], []
        box = await Sandbox.create(template, manager=self.manager)
        try:
            for _ in range(max(3, self.rounds // 5)):
                start = time.perf_counter()
                kids = await box.fork(count)
                answers = await asyncio.gather(*(kid.exec("echo hi") for kid in kids))
                seconds.append(time.perf_counter() - start)
                assert len(answers) == count
                pss.append(sum([(await kid.stats()).pss for kid in kids]))
                await kill_all(kids)
            return {**spread(seconds), "count": count, "pss_mb": round(statistics.median(pss) / 1e6, 1)}
        finally:
            await box.kill()

    async def boots(self, template: str) -> Row:
        """A boot from nothing to the first answer of a program."""
        machines = self.manager.machines
        machine = machines.machine({"template": template})
        driver, seconds = self.manager.driver, []
        for turn in range(max(5, self.rounds // 5)):
            directory = machines.directory(f"boot-{turn}")
            directory.mkdir(mode=0o700)
            start = time.perf_counter()
            handle = await driver.start(f"boot-{turn}", machine, directory, Network())
            await driver.wait_ready(handle, 30)
            await (await driver.exec(handle, Command("echo hi"))).wait()
            seconds.append(time.perf_counter() - start)
            await driver.stop(handle)
            shutil.rmtree(directory)
        return spread(seconds)

    async def creations(self, template: str) -> Row:
        """`create` from the golden snapshot, and to the first answer."""
        seconds, firsts = [], []
        for _ in range(self.rounds):
            start = time.perf_counter()
            record = await self.manager.create(Options(template=template))
            seconds.append(time.perf_counter() - start)
            await self.manager.run(record.id, Command("echo hi"))
            firsts.append(time.perf_counter() - start)
            await self.manager.kill(record.id)
        return {**spread(seconds), "first answer": spread(firsts)}


def quiet(*command: str) -> None:
    """Run a program whose children may outlive it: they must not hold a pipe that we read."""
    with tempfile.TemporaryFile("w+") as log:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60)
        log.seek(0)
        if run.returncode:
            raise RuntimeError(f"{command[-1]}: {log.read().strip()[-200:]}")


def runsc(rounds: int) -> Row:
    """gVisor on the same busybox: run, checkpoint that goes on, restore."""
    program = shutil.which("runsc")
    if program is None:
        return {"skipped": "runsc is not installed"}
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    seconds: dict[str, list[float]] = {"run": [], "checkpoint": [], "restore": []}
    for _ in range(max(5, rounds // 5)):
        with tempfile.TemporaryDirectory() as place:
            bundle = Path(place)
            root = bundle / "rootfs" / "bin"
            root.mkdir(parents=True)
            shutil.copy("/bin/busybox", root / "busybox")
            config = {
                "ociVersion": "1.0.0",
                "process": {
                    "user": {"uid": 0, "gid": 0},
                    "cwd": "/",
                    "args": ["/bin/busybox", "sh", "-c", "while true; do /bin/busybox sleep 1; done"],
                    "env": ["PATH=/bin"],
                },
                "root": {"path": "rootfs"},
                "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]},
            }
            (bundle / "config.json").write_text(json.dumps(config))
            flags = [program, "--root", f"{place}/state", "--ignore-cgroups", "--network=none", "--platform=systrap"]
            flags.append("--overlay2=root:memory")

            def call(name: str, *arguments: str, flags: list[str] = flags) -> None:
                start = time.perf_counter()
                quiet(*flags, *arguments)
                seconds[name].append(time.perf_counter() - start)

            try:
                call("run", "run", "-bundle", place, "-detach", "one")
                time.sleep(0.2)
                call("checkpoint", "checkpoint", "-image-path", f"{place}/image", "-leave-running", "one")
                call("restore", "restore", "-bundle", place, "-image-path", f"{place}/image", "-detach", "two")
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                return {"version": version, "failed": str(error)}
            finally:
                for name in ("one", "two"):
                    subprocess.run([*flags, "delete", "-force", name], capture_output=True)
    return {"version": version, **{name: spread(values) for name, values in seconds.items()}}


def criu(rounds: int) -> Row:
    """CRIU ($CRIU, or what is installed) on a Python process with so many MB of its own: dump that goes on, restore."""
    program = os.environ.get("CRIU") or shutil.which("criu")
    if program is None:
        return {"skipped": "criu is not installed"}
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    check = subprocess.run([program, "check"], capture_output=True, text=True)
    if check.returncode:
        return {"version": version, "failed": (check.stderr or check.stdout).strip()[-200:]}
    row: Row = {"version": version}
    for megabytes in (1, 35):
        seconds: dict[str, list[float]] = {"dump": [], "restore": []}
        script = f"import os, time; data = os.urandom({megabytes * 10**6}); time.sleep(1000)"
        for _ in range(max(5, rounds // 5)):
            try:
                _criu_once(program, script, seconds)
            except RuntimeError as error:
                return row | {"failed": str(error)}
        row[f"{megabytes} MB"] = {name: spread(values) for name, values in seconds.items()}
    return row


def _criu_once(program: str, script: str, seconds: dict[str, list[float]]) -> None:
    with tempfile.TemporaryDirectory() as place, open(os.devnull, "r+b") as null:
        child = subprocess.Popen(
            [sys.executable, "-ISc", script], stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        time.sleep(0.3)
        try:
            start = time.perf_counter()
            quiet(program, "dump", "-t", str(child.pid), "-D", place, "--leave-running")
            seconds["dump"].append(time.perf_counter() - start)
        finally:
            child.kill()
            child.wait()
        start = time.perf_counter()
        quiet(program, "restore", "-d", "-D", place)
        seconds["restore"].append(time.perf_counter() - start)
        os.kill(child.pid, 9)


async def measure(root: Path, rounds: int, only: list[str], done: Callable[[str, Row], None]) -> dict[str, str]:
    assets = Assets(root)
    accel = await choose_accelerator(assets)
    driver = QemuDriver(assets.confine, accel)
    with tempfile.TemporaryDirectory(prefix="perilune-bench-", dir=root) as place:
        os.chmod(place, 0o711)
        for name in ("assets", "templates"):
            (Path(place) / name).symlink_to(root / name)
        manager = await Manager.open(Assets(Path(place)), driver, Limits())
        bench = Bench(manager, rounds)
        names = {template.name for template in assets.templates()}
        rows: dict[str, Callable[[], Awaitable[Row]]] = {}
        for template in ("busybox", "python"):
            if template not in names:
                continue
            rows[f"{template}: boot"] = lambda template=template: bench.boots(template)
            rows[f"{template}: create"] = lambda template=template: bench.creations(template)
            rows[f"{template}: restore to running"] = lambda template=template: bench.restores(template)
            rows[f"{template}: resume to first answer"] = lambda template=template: bench.pauses(template)
            rows[f"{template}: checkpoint, little dirty"] = lambda template=template: bench.checkpoints(template, 0)
        rows["busybox: checkpoint, 35 MB dirty"] = lambda: bench.checkpoints("busybox", 33)
        rows["busybox: 4 forks"] = lambda: bench.forks("busybox", 4)
        rows["busybox: 16 forks"] = lambda: bench.forks("busybox", 16)
        if "python" in names:
            rows["python: checkpoint, 140 MB dirty"] = lambda: bench.checkpoints("python", 138)
            rows["python: resume to first answer, 140 MB dirty"] = lambda: bench.pauses("python", 138)
            rows["python: 4 forks"] = lambda: bench.forks("python", 4)
        try:
            for name, work in rows.items():
                if not only or any(part in name for part in only):
                    done(name, await work())
        finally:
            await manager.close()
    kernel = assets.kernel()
    return {"qemu": await driver.version(), "accelerator": accel, "kernel": f"{kernel.name} {kernel.version}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--root", type=Path, default=state_root())
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    rows: dict[str, Row] = {}

    def done(name: str, row: Row) -> None:
        rows[name] = row
        print(f"{name}: {json.dumps(row)}", flush=True)

    versions = asyncio.run(measure(arguments.root, arguments.rounds, arguments.only, done))
    for name, peer in (("runsc", runsc), ("criu", criu)):
        if not arguments.only or name in arguments.only:
            done(f"{name}", peer(arguments.rounds))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"cpu, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "perilune": perilune.__version__,
            "machine": platform.machine(),
            "host kernel": platform.release(),
            **versions,
        },
        "load": round(os.getloadavg()[0], 2),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
