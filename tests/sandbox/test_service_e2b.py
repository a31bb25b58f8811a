"""E2B's own Python SDK drives our service; and the wire calls it makes, where it is not installed."""

from __future__ import annotations

import base64
import json
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from perilune.sandbox.assets import Assets
from tests.sandbox.served import KEY, new, served

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def client(fake_root: Assets) -> Iterator[httpx.Client]:
    with served(fake_root) as client:
        yield client


@pytest.fixture
def sdk(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The SDK's sandbox class, pointed at the service."""
    e2b = pytest.importorskip("e2b", reason="E2B's SDK is not installed: pip install e2b")
    url = str(client.base_url)
    for name, value in (("API_URL", url), ("SANDBOX_URL", url), ("API_KEY", KEY)):
        monkeypatch.setenv(f"E2B_{name}", value)
    return e2b


def test_the_sdk_creates_executes_pauses_resumes_and_kills(sdk: Any) -> None:
    box = sdk.Sandbox.create(template="busybox", timeout=60, metadata={"run": "a b"}, envs={"A": "1"})
    assert box.is_running()
    result = box.commands.run("echo hello > /f; cat /f")
    assert (result.stdout, result.exit_code) == ("hello\n", 0)
    with pytest.raises(sdk.CommandExitException) as failed:
        box.commands.run("echo so >&2; exit 3")
    assert failed.value.exit_code == 3
    assert box.get_info().metadata == {"run": "a b"}
    assert box.pause()
    assert not box.is_running()
    assert box.get_info().state == sdk.SandboxState.PAUSED
    again = sdk.Sandbox.connect(box.sandbox_id, timeout=60)
    assert again.commands.run("cat /f").stdout == "hello\n"
    again.set_timeout(120)
    assert again.kill()
    assert not again.kill()
    with pytest.raises(sdk.NotFoundException):
        sdk.Sandbox.connect(box.sandbox_id)


def test_the_sdk_reads_and_writes_files(sdk: Any) -> None:
    box = sdk.Sandbox.create(template="busybox", timeout=60)
    box.files.write("/a", "one")
    box.files.write_files([{"path": "/b", "data": b"\x00\xff"}, {"path": "c", "data": "three"}])
    box.files.write("/d", iter([b"fo", b"ur"]))
    assert box.files.read("/a") == "one"
    assert bytes(box.files.read("/b", format="bytes")) == b"\x00\xff"
    assert box.files.read("/root/c") == "three"
    assert box.files.read("/d") == "four"
    with pytest.raises(sdk.FileNotFoundException):
        box.files.read("/none")
    box.kill()


def test_the_sdk_lists_snapshots_and_forks(sdk: Any) -> None:
    boxes = [sdk.Sandbox.create(template="busybox", timeout=60, metadata={"n": f"{i} %"}) for i in range(3)]
    pages = sdk.Sandbox.list(query=sdk.SandboxQuery(metadata={"n": "1 %"}))
    assert [one.sandbox_id for one in pages.next_items()] == [boxes[1].sandbox_id]
    pages, seen = sdk.Sandbox.list(limit=2), []
    while pages.has_next:
        seen += [one.sandbox_id for one in pages.next_items()]
    assert sorted(seen) == sorted(box.sandbox_id for box in boxes)
    boxes[0].commands.run("echo 1 > /f")
    snapshot = boxes[0].create_snapshot()
    kids = boxes[0].fork(count=2)
    assert [kid.commands.run("cat /f").stdout for kid in kids] == ["1\n", "1\n"]
    restored = sdk.Sandbox.create(template=snapshot.snapshot_id, timeout=60)
    assert restored.commands.run("cat /f").stdout == "1\n"
    assert sdk.Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_the_sdk_runs_programs_in_the_background(sdk: Any) -> None:
    box = sdk.Sandbox.create(template="busybox", timeout=60)
    started = box.commands.run("cat", background=True, stdin=True)
    assert [one.pid for one in box.commands.list()] == [started.pid]
    box.commands.send_stdin(started.pid, "typed")
    box.commands.close_stdin(started.pid)
    assert started.wait().stdout == "typed"
    sleeper = box.commands.run("sleep 50", background=True)
    assert box.commands.kill(sleeper.pid)
    with pytest.raises(sdk.CommandExitException):
        sleeper.wait()
    with pytest.raises(sdk.TimeoutException):
        box.commands.run("sleep 50", timeout=0.3)
    assert not box.commands.kill(999)


# The wire, without the SDK


def stream(data: bytes) -> list[tuple[int, Any]]:
    """Flags and fields of every message of a body."""
    found = []
    while data:
        flags, length = struct.unpack_from(">BI", data)
        found.append((flags, json.loads(data[5 : 5 + length])))
        data = data[5 + length :]
    return found


def call(client: httpx.Client, made: dict[str, Any], name: str, fields: Any, **headers: str) -> httpx.Response:
    """One call of the daemon's interface."""
    body = json.dumps(fields).encode()
    streams = name in ("process.Process/Start", "process.Process/Connect")
    ways = {
        "e2b-sandbox-id": made["sandboxID"],
        "e2b-sandbox-port": "49983",
        "x-access-token": made["envdAccessToken"],
        "content-type": "application/connect+json" if streams else "application/json",
        **headers,
    }
    body = struct.pack(">BI", 0, len(body)) + body if streams else body
    return client.post(f"/{name}", content=body, headers=ways)


def test_wire_calls_of_programs(client: httpx.Client) -> None:
    made = new(client)
    start = {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "echo hi; cat /none"]}, "stdin": False}
    response = call(client, made, "process.Process/Start", start)
    assert response.headers["content-type"] == "application/connect+json"
    messages = stream(response.content)
    assert messages[0][1]["event"]["start"]["pid"] > 0
    assert base64.b64decode(messages[1][1]["event"]["data"]["stdout"]) == b"hi\n"
    assert b"No such file" in base64.b64decode(messages[2][1]["event"]["data"]["stderr"])
    assert messages[-2] == (
        0,
        {"event": {"end": {"exitCode": 1, "exited": True, "status": "exit status 1"} | {"error": "exit status 1"}}},
    )
    assert messages[-1] == (2, {})


def test_wire_calls_that_fail_say_so_in_the_protocols_words(client: httpx.Client) -> None:
    made, other = new(client), new(client)
    slow = {"process": {"cmd": "/bin/sh", "args": ["-c", "sleep 30"]}, "stdin": False}
    late = stream(call(client, made, "process.Process/Start", slow, **{"connect-timeout-ms": "200"}).content)
    assert late[-1][1]["error"]["code"] == "deadline_exceeded"
    lost = stream(call(client, made, "process.Process/Connect", {"process": {"pid": 12345}}).content)
    assert lost == [
        (2, {"error": {"code": "not_found", "message": f"no program 12345 runs in sandbox {made['sandboxID']!r}"}})
    ]
    for name, fields, status, word in (
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGKILL"}, 404, "not_found"),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "HUP"}, 400, "invalid_argument"),
        ("process.Process/Dance", {}, 501, "unimplemented"),
        ("filesystem.Filesystem/Stat", {}, 400, "invalid_argument"),
        ("filesystem.Filesystem/WatchDir", {"path": "/"}, 501, "unimplemented"),
    ):
        response = call(client, made, name, fields)
        assert (response.status_code, response.json()["code"]) == (status, word), name
    assert call(client, made, "process.Process/List", {}, **{"x-access-token": ""}).status_code == 401
    stolen = {"x-access-token": other["envdAccessToken"]}
    assert call(client, made, "process.Process/List", {}, **stolen).status_code == 401
    client.post(f"/sandboxes/{made['sandboxID']}/pause")
    frozen = stream(call(client, made, "process.Process/Start", slow).content)
    assert frozen[-1][1]["error"]["code"] == "failed_precondition"


def test_uploads_to_the_daemon_are_bounded(fake_root: Assets) -> None:
    with served(fake_root, max_file=1000, max_body=1000) as client:
        made = new(client)
        way = {
            "e2b-sandbox-id": made["sandboxID"],
            "e2b-sandbox-port": "49983",
            "x-access-token": made["envdAccessToken"],
        }
        small = client.post("/files", params={"path": "/a"}, files={"file": ("/a", b"small")}, headers=way)
        assert small.json() == [{"name": "a", "path": "/a", "type": "file"}]
        for files in ({"file": ("/a", bytes(1001))}, {"file": ("/a", bytes(5000))}):
            assert client.post("/files", params={"path": "/a"}, files=files, headers=way).status_code == 413
        assert client.get("/files", params={"path": "/a"}, headers=way).content == b"small"
        assert client.post("/files", content=b"x", headers=way).status_code == 400


def test_a_program_is_listened_to_again(client: httpx.Client) -> None:
    made = new(client)
    start = {"process": {"cmd": "/bin/sh", "args": ["-c", "cat"]}, "stdin": True, "tag": "mine"}
    first: list[Any] = []
    thread = threading.Thread(
        target=lambda: first.extend(
            stream(call(client, made, "process.Process/Start", start, **{"keepalive-ping-interval": "1"}).content)
        )
    )
    thread.start()
    time.sleep(2.0)
    (one,) = call(client, made, "process.Process/List", {}).json()["processes"]
    assert one["tag"] == "mine"
    second: list[Any] = []
    again = threading.Thread(
        target=lambda: second.extend(
            stream(call(client, made, "process.Process/Connect", {"process": {"tag": "mine"}}).content)
        )
    )
    again.start()
    time.sleep(0.8)
    data = base64.b64encode(b"typed").decode()
    which = {"process": {"pid": one["pid"]}}
    assert call(client, made, "process.Process/SendInput", which | {"input": {"stdin": data}}).status_code == 200
    assert call(client, made, "process.Process/CloseStdin", which).status_code == 200
    thread.join(50)
    again.join(50)
    assert {"event": {"keepalive": {}}} in [fields for _, fields in first]
    assert [fields["event"]["data"] for _, fields in second if "data" in fields.get("event", {})] == [{"stdout": data}]
    assert second[-1] == (2, {})
