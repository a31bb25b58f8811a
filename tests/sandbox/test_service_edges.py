"""The service where requests end early, lie about themselves, or are of no known kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator
from http.server import HTTPServer
from typing import Any

import httpx
import pytest

from perilune.sandbox.assets import Assets
from perilune.sandbox.driver import Step
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.gates import Gates
from perilune.sandbox.service.proxy import forwarded
from perilune.sandbox.service.streaming import Stream
from tests.sandbox.served import KEY, new, served
from tests.sandbox.test_service import Site
from tests.sandbox.worlds import run

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_whose_listener_has_gone_is_closed(begun: bool) -> None:
    """Also if it had gone before the first piece: then the generator never ran, and what it began is ended by us."""
    closed: list[str] = []

    async def source() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x"
            await asyncio.sleep(0)

    async def end() -> None:
        closed.append("closed")

    async def test() -> None:
        sent: list[Any] = []
        enough = asyncio.Event()

        async def receive() -> dict[str, str]:
            if begun:
                await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > 3:
                enough.set()

        await Stream(source(), closed=end)({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        assert (len(sent) > 1) == begun

    run(test())
    assert closed == ["closed"]


def test_headers_of_one_connection_stay_on_it() -> None:
    """RFC 9110, 7.6.1: those that `Connection` names too; RFC 9112, 6.3: a length beside chunks is no length."""
    headers = [
        *((b"Connection", b"close, X-Inner"), (b"connection", b"x-other"), (b"X-Inner", b"1"), (b"x-other", b"1")),
        *((b"Upgrade", b"websocket"), (b"TE", b"trailers"), (b"Host", b"a"), (b"Keep-Alive", b"5"), (b"x-kept", b"1")),
    ]
    assert forwarded([*headers, (b"Content-Length", b"3")]) == [(b"x-kept", b"1"), (b"content-length", b"3")]
    both = [(b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"3"), (b"x-kept", b"1")]
    assert forwarded(both) == [(b"x-kept", b"1")]


def talk(url: str, request: bytes) -> list[bytes]:
    """What is answered to these very bytes and to an honest request after them, until the connection closes."""
    address = httpx.URL(url)
    answer = b""
    connection = socket.create_connection((address.host, address.port or 80), timeout=50)
    with connection, contextlib.suppress(ConnectionError):  # it may hang up before it has read everything
        connection.sendall(request + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while data := connection.recv(65536):
            answer += data
    return answer.split(b"HTTP/1.1 ")[1:]


def test_one_request_never_becomes_two(fake_root: Assets) -> None:
    """Two lengths, a length and chunks, an upgrade, a target that is no path: one answer or a refusal, and the guest
    hears one request or none."""
    heard: list[str] = []

    class Counted(Site):
        def parse_request(self) -> bool:
            heard.append(self.raw_requestline.decode("latin-1").split(" ")[1])
            return super().parse_request()

        def do_POST(self) -> None:
            if self.headers.get("transfer-encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    self.rfile.read(size + 2)
                self.rfile.readline()
            super().do_POST()

    site = HTTPServer(("127.0.0.1", 0), Counted)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    hidden = b"POST /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
    cases = {
        b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n%b" % (len(hidden), hidden): (b"400",),
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n%b" % chunked: (b"400", b"203"),
        b"Transfer-Encoding: chunked\r\n\r\n%b" % chunked: (b"203",),
        b"Transfer-Encoding: chunked, gzip\r\n\r\n%b" % chunked: (b"400", b"501"),
        b"Transfer-Encoding : chunked\r\n\r\n%b" % chunked: (b"400",),
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n": (b"203",),
        b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n": (b"400", b"203"),
        b"X: %b\r\n\r\n" % (b"a" * (1 << 20)): (b"400", b"431"),
    }
    try:
        with served(fake_root) as client:
            to = b"E2b-Sandbox-Id: %b\r\nE2b-Sandbox-Port: %d\r\nX-Api-Key: %b\r\nHost: x\r\n"
            to %= (new(client)["sandboxID"].encode(), site.server_address[1], KEY.encode())
            for rest, allowed in cases.items():
                heard.clear()
                answers = talk(str(client.base_url), b"POST /asked HTTP/1.1\r\n" + to + rest)
                assert answers[0][:3] in allowed, (rest[:80], answers)
                refused = answers[0].startswith(b"4")
                assert heard == ([] if refused else ["/asked"])
                assert [b'"status":"ok"' in answer for answer in answers[1:]] == ([] if refused else [True])
            answers = talk(str(client.base_url), b"POST /a\xff HTTP/1.1\r\n" + to + b"Content-Length: 0\r\n\r\n")
            assert answers[0].startswith(b"400")
    finally:
        site.shutdown()
        site.server_close()


def test_a_host_name_may_have_capitals(fake_root: Assets) -> None:
    with served(fake_root, domain="box.test") as client:
        box = new(client)["sandboxID"]
        for host in (f"1-{box}.box.test", f"1-{box}.BOX.Test:80"):
            assert client.get("/", headers={"host": host}).status_code == 502  # the guest's port, which is closed


def test_methods_that_somebody_made_up_are_one_series(fake_root: Assets) -> None:
    """Metrics do not grow with what strangers send."""
    with served(fake_root) as client:
        bare = httpx.Client(base_url=client.base_url)
        for method in ("BREW", "WHEN", "PROPFIND"):
            bare.request(method, "/nothing")
        text = bare.get("/metrics").text
        assert 'method="other",route="none",status="404"} 3.0' in text
        assert "BREW" not in text


@pytest.mark.parametrize("size", [{"rows": -1}, {"cols": 1 << 40}, {"rows": "many"}, []])
def test_sizes_of_terminals_are_checked_on_every_way(fake_root: Assets, size: Any) -> None:
    with served(fake_root) as client:
        made = new(client)
        head = {"e2b-sandbox-id": made["sandboxID"], "e2b-sandbox-port": "49983"}
        head["x-access-token"] = made["envdAccessToken"]
        pid = client.post(f"/sandboxes/{made['sandboxID']}/exec", json={"cmd": "cat", "interactive": True}).json()[
            "pid"
        ]
        body = {"process": {"pid": pid}, "pty": {"size": size}}
        answer = client.post("/process.Process/Update", json=body, headers=head)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
        data = json.dumps({"process": {"cmd": "cat"}, "pty": {"size": size}}).encode()
        answer = client.post(
            "/process.Process/Start", content=b"\0" + len(data).to_bytes(4, "big") + data, headers=head
        )
        assert b"invalid_argument" in answer.content


def test_forks_that_have_ended_before_they_are_told(fake_root: Assets, gates: Gates) -> None:
    """One whose life cannot be renewed is an error of its own; the others are told of."""
    managers: list[Any] = []
    with served(fake_root, gate=gates, keep=managers) as client:
        box = new(client)["sandboxID"]
        keep_alive, calls = managers[0].keep_alive, []

        def ended_at_first(one: str, timeout_s: float) -> Any:
            calls.append(one)
            if len(calls) == 1:
                raise SandboxError(f"box {one!r} is ended")
            return keep_alive(one, timeout_s)

        managers[0].keep_alive = ended_at_first
        results = client.post(f"/sandboxes/{box}/fork", json={"count": 3, "timeout": 50}).json()
        assert sorted(next(iter(result)) for result in results) == ["error", "sandbox", "sandbox"]
        assert Step.SPAWNED in {step for step, _ in gates.passed}
