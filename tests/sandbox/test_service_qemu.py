"""The service over real machines: E2B's wire calls, folders, a guest's port, a restart."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from perilune.sandbox.assets import Assets
from perilune.sandbox.manager import Manager
from perilune.sandbox.options import Limits
from perilune.sandbox.qemu import QemuDriver
from perilune.sandbox.service import ServiceConfig, build_app
from perilune.sandbox.service.route import Route
from perilune.sandbox.service.run import running
from tests.sandbox.served import KEY, new, sh
from tests.sandbox.test_service_e2b import call, stream

pytestmark = pytest.mark.timeout(120)


def service(assets: Assets, accel: str) -> Route:
    """An application over QEMU."""

    async def open_manager() -> Manager:
        return await Manager.open(assets, QemuDriver(assets.confine, accel), Limits(memory=2 << 30))

    return build_app(ServiceConfig(api_keys=(KEY,), drain_s=2.0), open_manager)


def test_a_life_over_the_wire(
    request: pytest.FixtureRequest, qemu_root: Assets, monkeypatch: pytest.MonkeyPatch
) -> None:
    accel = request.config.getoption("--accel", "tcg")
    with running(service(qemu_root, accel)) as url:
        client = httpx.Client(base_url=url, headers={"x-api-key": KEY}, timeout=60)
        made = new(client, timeout=600)
        box = made["sandboxID"]
        # A program that counts goes on through a pause, and in a fork from the same number.
        counter = "i=0; while :; do i=$((i+1)); echo $i > /m; mv /m /n; sleep 0.05; done"
        client.post(f"/sandboxes/{box}/exec", json={"cmd": counter, "detach": True})
        start = {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "echo $0; id -un; cat"]}, "stdin": False}
        messages = stream(call(client, made, "process.Process/Start", start).content)
        assert messages[-2][1]["event"]["end"]["exitCode"] == 0
        assert client.post(f"/sandboxes/{box}/pause").status_code == 204
        (row,) = client.get("/top").json()
        assert (row["phase"], row["pss"]) == ("paused", 0)
        assert client.post(f"/sandboxes/{box}/resume", json={"timeout": 600}).status_code == 201
        before = int(sh(client, box, "cat /n")["stdout"])
        while int(sh(client, box, "cat /n")["stdout"]) <= before:
            time.sleep(0.05)
        kids = client.post(f"/sandboxes/{box}/fork", json={"count": 2}).json()
        for kid in kids:
            assert int(sh(client, kid["sandbox"]["sandboxID"], "cat /n")["stdout"]) >= before
            assert client.delete(f"/sandboxes/{kid['sandbox']['sandboxID']}").status_code == 204
        _files(client, made)
        _ports(client, made)
        _sdk(url, monkeypatch)
        _shell(url, box)
        (row,) = client.get("/top").json()
        assert row["pss"] > 0
        assert row["dirty"] > 0
    # A stop pauses what runs; the next service has it.
    with running(service(qemu_root, accel)) as url:
        client = httpx.Client(base_url=url, headers={"x-api-key": KEY}, timeout=60)
        assert [one["state"] for one in client.get("/v2/sandboxes").json()] == ["paused"]
        last = int(sh_after(client, box, "cat /n"))
        assert last > before
        assert client.delete(f"/sandboxes/{box}").status_code == 204


def test_the_command_stops_well_and_survives_a_kill(qemu_root: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    """`perilune sandbox serve` as a process: SIGTERM pauses what runs, SIGKILL loses only what was not saved."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("PERILUNE_SANDBOX", str(qemu_root.root))
    monkeypatch.setenv("PERILUNE_SANDBOX_KEY", KEY)
    code = "from perilune.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    client = httpx.Client(base_url=url, headers={"x-api-key": KEY}, timeout=60)

    @contextlib.contextmanager
    def command() -> Iterator[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-c", code, "sandbox", "serve", "--port", str(port), "--memory-mib", "2000"]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                assert time.monotonic() < deadline
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.1)
            yield process
        finally:
            process.kill()
            process.wait()

    with command() as process:
        saved, unsaved = (new(client, timeout=600)["sandboxID"] for _ in range(2))
        sh(client, saved, "echo kept > /f")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with command() as process:
        assert {one["sandboxID"]: one["state"] for one in client.get("/v2/sandboxes").json()} == {
            saved: "paused",
            unsaved: "paused",
        }
        assert sh_after(client, saved, "cat /f") == "kept\n"
        sh(client, saved, "echo lost > /f")
        machines = _machines(qemu_root)
        assert len(machines) == 1
    with command():
        assert _machines(qemu_root) == []  # no orphan
        detail = client.get(f"/sandboxes/{saved}").json()
        assert detail["state"] == "paused"
        assert "the service ended while it was running" in detail["reason"]
        assert sh_after(client, saved, "cat /f") == "kept\n"


def _machines(assets: Assets) -> list[int]:
    """Processes that were started for this root directory's sandboxes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"qemu-system" in words[0] and str(assets.root / "boxes").encode() in b" ".join(words):
                found.append(int(path.parent.name))
    return found


def sh_after(client: httpx.Client, box: str, cmd: str) -> str:
    assert client.post(f"/sandboxes/{box}/resume").status_code == 201
    return str(sh(client, box, cmd)["stdout"])


def _sdk(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E2B's own SDK over real machines, where it is installed."""
    if importlib.util.find_spec("e2b") is None:
        return
    from e2b import CommandExitException, Sandbox

    for name, value in (("API_URL", url), ("SANDBOX_URL", url), ("API_KEY", KEY)):
        monkeypatch.setenv(f"E2B_{name}", value)
    box = Sandbox.create(template="busybox", timeout=600, envs={"A": "b c"})
    assert box.commands.run("echo $A; pwd").stdout == "b c\n/root\n"
    with pytest.raises(CommandExitException, match="7"):
        box.commands.run("exit 7")
    box.files.write("/root/f", "kept")
    assert [entry.name for entry in box.files.list("/root")] == ["f"]
    assert box.files.exists("/root/f")
    started = box.commands.run("while read x; do echo got $x; done", background=True, stdin=True)
    box.commands.send_stdin(started.pid, "one\n")
    assert box.pause()
    again = Sandbox.connect(box.sandbox_id, timeout=600)
    assert again.files.read("/root/f") == "kept"
    # The program that was listened to goes on after the pause.
    again.commands.send_stdin(started.pid, "two\n")
    again.commands.close_stdin(started.pid)
    assert started.wait().stdout == "got one\ngot two\n"
    assert again.kill()


def _shell(url: str, box: str) -> None:
    """`perilune sandbox shell` in a terminal: its size, Ctrl-C, a new size, the exit code."""
    if importlib.util.find_spec("pexpect") is None:
        return
    import pexpect

    code = "from perilune.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    env = {**os.environ, "PERILUNE_SANDBOX_URL": url, "PERILUNE_SANDBOX_KEY": KEY, "TERM": "xterm"}
    argv = ["-c", code, "sandbox", "shell", box]
    shell = pexpect.spawn(sys.executable, argv, env=env, dimensions=(33, 99), timeout=20, encoding="utf-8")
    try:
        shell.expect("[#$] ")
        shell.sendline("stty size; echo T=$TERM")
        shell.expect("33 99")
        shell.expect("T=xterm")
        shell.sendline("echo begun; sleep 100")
        shell.expect("begun\r\n")
        shell.send("\x03")
        shell.sendline("echo back$((1 + 1))")
        shell.expect("back2")
        shell.setwinsize(40, 120)
        shell.sendline("sleep 0.5; stty size")
        shell.expect("40 120")
        shell.sendline("exit 5")
        shell.expect(pexpect.EOF)
    finally:
        shell.close(force=True)
    assert shell.exitstatus == 5


def _files(client: httpx.Client, made: dict[str, Any]) -> None:
    box = made["sandboxID"]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in (("a", b"one"), ("d/b", b"two")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    folder = {"path": "/work/x y"}
    assert client.put(f"/sandboxes/{box}/folder", params=folder, content=packed.getvalue()).status_code == 204
    with tarfile.open(fileobj=io.BytesIO(client.get(f"/sandboxes/{box}/folder", params=folder).content)) as archive:
        assert {member.name for member in archive if member.isfile()} == {"./a", "./d/b"}
    assert client.get(f"/sandboxes/{box}/folder", params={"path": "/none"}).status_code in (400, 404)

    def fs(name: str, **fields: Any) -> Any:
        response = call(client, made, f"filesystem.Filesystem/{name}", fields)
        return response.json() | {"status": response.status_code}

    listed = fs("ListDir", path="/work/x y", depth=2)["entries"]
    assert {(one["path"], one["type"]) for one in listed} == {
        ("/work/x y/a", "FILE_TYPE_FILE"),
        ("/work/x y/d", "FILE_TYPE_DIRECTORY"),
        ("/work/x y/d/b", "FILE_TYPE_FILE"),
    }
    assert fs("Stat", path="/work/x y/a")["entry"]["size"] == "3"
    assert fs("MakeDir", path="/work/new")["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    assert fs("MakeDir", path="/work/new")["code"] == "already_exists"
    assert fs("Move", source="/work/x y/a", destination="/work/new/c")["entry"]["path"] == "/work/new/c"
    assert fs("Stat", path="/work/x y/a")["code"] == "not_found"
    assert fs("Remove", path="/work/new")["status"] == 200
    assert fs("Remove", path="/work/new")["code"] == "not_found"


def _ports(client: httpx.Client, made: dict[str, Any]) -> None:
    box = made["sandboxID"]
    sh(client, box, "mkdir /site && echo from the guest > /site/page")
    client.post(f"/sandboxes/{box}/exec", json={"cmd": "httpd -f -p 8080 -h /site", "detach": True})
    way = {
        "e2b-sandbox-id": box,
        "e2b-sandbox-port": "8080",
        "e2b-traffic-access-token": made["trafficAccessToken"],
    }
    deadline = time.monotonic() + 20
    while (response := client.get("/page", headers=way)).status_code == 502:
        assert time.monotonic() < deadline
    assert response.text == "from the guest\n"
    assert client.get("/none", headers=way).status_code == 404
    closed = client.get("/page", headers=way | {"e2b-sandbox-port": "8081"})
    assert closed.status_code == 502
    assert "port is not open" in json.loads(closed.text)["message"]
