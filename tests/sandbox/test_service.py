"""The service over HTTP, on the fake driver: paths and status codes of E2B's interface, and what is ours beside it."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from perilune.sandbox.assets import Assets
from perilune.sandbox.driver import Step
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.gates import Gates
from perilune.sandbox.manager import Manager
from perilune.sandbox.options import Limits
from perilune.sandbox.service.run import _listening, running, serve
from tests.sandbox.served import KEY, new, served, service, sh

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def client(fake_root: Assets) -> Any:
    with served(fake_root) as client:
        yield client


def code(response: httpx.Response) -> int:
    """A status; an error must be our JSON."""
    if response.status_code >= 400:
        body = response.json()
        assert body["code"] == response.status_code
        assert body["message"]
        assert body["error_code"]
    return response.status_code


def test_a_life(client: httpx.Client) -> None:
    made = new(client, metadata={"run": "7"}, envVars={"A": "1"}, owner="me")
    box = made["sandboxID"]
    assert made["templateID"] == "busybox"
    assert made["envdAccessToken"] != made["trafficAccessToken"]
    assert sh(client, box, "echo hello > /f; cat /f") == {
        "exitCode": 0,
        "stdout": "hello\n",
        "stderr": "",
        "timedOut": False,
        "truncated": False,
    }
    detail = client.get(f"/sandboxes/{box}").json()
    assert detail["state"] == "running"
    assert detail["metadata"] == {"run": "7"}
    assert detail["owner"] == "me"
    assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "pause"}
    assert not detail["allowInternetAccess"]
    assert code(client.post(f"/sandboxes/{box}/pause")) == 204
    assert code(client.post(f"/sandboxes/{box}/pause")) == 409
    assert client.get(f"/sandboxes/{box}").json()["state"] == "paused"
    assert code(client.post(f"/sandboxes/{box}/exec", json={"cmd": "true"})) == 409
    assert code(client.post(f"/sandboxes/{box}/resume", json={"timeout": 50})) == 201
    assert code(client.post(f"/sandboxes/{box}/resume")) == 409
    assert sh(client, box, "cat /f")["stdout"] == "hello\n"
    assert code(client.delete(f"/sandboxes/{box}")) == 204
    assert code(client.delete(f"/sandboxes/{box}")) == 404
    assert code(client.get(f"/sandboxes/{box}")) == 404


def test_unknown_sandboxes_are_404(client: httpx.Client) -> None:
    for method_path in ("GET ", "DELETE ", "POST /pause", "POST /resume", "POST /connect", "POST /fork"):
        method, path = method_path.split(" ")
        response = client.request(method, f"/sandboxes/feed{path}", json={} if method == "POST" else None)
        assert code(response) == 404, method_path
        assert "feed" in response.json()["message"]


def test_connect_says_whether_it_resumed(client: httpx.Client) -> None:
    box = new(client)["sandboxID"]
    assert code(client.post(f"/sandboxes/{box}/connect", json={"timeout": 5})) == 200
    client.post(f"/sandboxes/{box}/pause")
    assert code(client.post(f"/v2/sandboxes/{box}/connect", json={"timeout": 500})) == 201


def test_a_shorter_time_on_connect_does_not_take_life_away(client: httpx.Client) -> None:
    box = new(client, timeout=500)["sandboxID"]
    before = client.get(f"/sandboxes/{box}").json()["endAt"]
    client.post(f"/sandboxes/{box}/connect", json={"timeout": 5})
    client.post(f"/sandboxes/{box}/refreshes", json={"duration": 5})
    assert client.get(f"/sandboxes/{box}").json()["endAt"] == before
    assert code(client.post(f"/sandboxes/{box}/timeout", json={"timeout": 5})) == 204
    assert client.get(f"/sandboxes/{box}").json()["endAt"] < before
    client.post(f"/sandboxes/{box}/refreshes", json={"duration": 900})
    assert client.get(f"/sandboxes/{box}").json()["endAt"] > before


def test_time_to_live_ends_in_a_pause(client: httpx.Client) -> None:
    kept = new(client, timeout=0.2)["sandboxID"]
    gone = new(client, timeout=0.2, autoPause=False)["sandboxID"]
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        states = [client.get(f"/sandboxes/{box}") for box in (kept, gone)]
        if states[1].status_code == 404 and states[0].json()["state"] == "paused":
            return
        time.sleep(0.1)
    pytest.fail(f"{[state.text for state in states]}")


def test_listing_filters_and_pages(client: httpx.Client) -> None:
    boxes = [new(client, metadata={"n": str(i), "a b": "c&d"}, owner=f"o{i % 2}")["sandboxID"] for i in range(5)]
    client.post(f"/sandboxes/{boxes[0]}/pause")
    assert [one["sandboxID"] for one in client.get("/sandboxes").json()] == boxes[:0:-1]
    assert {one["sandboxID"] for one in client.get("/v2/sandboxes").json()} == set(boxes)

    def find(**params: str) -> list[str]:
        return [one["sandboxID"] for one in client.get("/v2/sandboxes", params=params).json()]

    assert find(metadata="n=3") == [boxes[3]]
    assert find(metadata="n=3&a%20b=c%26d") == [boxes[3]]
    assert find(metadata="n=3&a%2520b=c%2526d") == [boxes[3]]  # as E2B's client quotes
    assert find(metadata="n=3&x=y") == []
    assert find(state="paused") == [boxes[0]]
    assert find(owner="o1") == [boxes[3], boxes[1]]
    assert find(template="other") == []
    assert find(startedAfter="2999-01-01T00:00:00Z") == []
    seen: list[str] = []
    token: dict[str, str] = {}
    for size in (2, 2, 1):
        response = client.get("/v2/sandboxes", params={"limit": 2, "order": "asc", **token})
        assert len(response.json()) == size
        seen += [one["sandboxID"] for one in response.json()]
        token = {"nextToken": response.headers.get("x-next-token", "")}
    assert seen == boxes
    assert token == {"nextToken": ""}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"timeout": 0}, "timeout"),
    ({"timeout": "soon"}, "timeout"),
    ({"templateId": "busybox"}, "templateId"),
    ({"envVars": {"A": 1}}, "envVars.A"),
    ({"memoryMB": 1}, "memoryMB"),
    ({"volumeMounts": [{"name": "v"}]}, "volumeMounts"),
    ({"network": {"rules": {"a": 1}}}, "network.rules"),
    ({"network": {"allowOut": ["no name"]}}, "network.allow"),
    ({"mcp": {}}, "mcp"),
]


def test_what_is_wrong_is_named(client: httpx.Client) -> None:
    for body, param in WRONG:
        response = client.post("/sandboxes", json=body)
        assert code(response) == 400, body
        assert response.json()["param"] == param
    assert client.get("/sandboxes").json() == []


def test_a_template_that_is_not_there(client: httpx.Client) -> None:
    response = client.post("/sandboxes", json={"templateID": "windows"})
    assert code(response) == 404
    assert "busybox" in response.json()["message"]
    assert [one["templateID"] for one in client.get("/templates").json()] == ["busybox"]


def test_the_network_is_shut_unless_asked_for(client: httpx.Client) -> None:
    box = new(client, network={"allowOut": ["192.0.2.1"], "denyOut": ["0.0.0.0/0"]})["sandboxID"]
    assert client.get(f"/sandboxes/{box}").json()["network"] == {"allowOut": ["192.0.2.1"], "denyOut": []}
    assert code(client.put(f"/sandboxes/{box}/network", json={"allow_internet_access": True})) == 204
    assert client.get(f"/sandboxes/{box}").json()["allowInternetAccess"]
    assert code(client.put(f"/sandboxes/{box}/network", json={})) == 204
    assert client.get(f"/sandboxes/{box}").json()["network"] == {"allowOut": [], "denyOut": []}
    assert code(client.put(f"/sandboxes/{box}/network", json={"allowOut": ["::1"]})) == 400
    assert code(client.put(f"/sandboxes/{box}/network", json={"denyOut": ["example.org"]})) == 400
    assert code(client.put(f"/sandboxes/{box}/network", json={"allowOut": ["example.org", "*.example.org"]})) == 204


def test_a_request_sent_again_makes_one_sandbox(client: httpx.Client) -> None:
    headers = {"idempotency-key": "a-1"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.post("/v2/sandboxes", json={}, headers=headers).json(), range(4)))
    assert len({answer["sandboxID"] for answer in answers}) == 1
    assert len(client.get("/sandboxes").json()) == 1


# Snapshots and forks


def test_snapshots_labels_barriers_and_rollback(client: httpx.Client) -> None:
    box = new(client)["sandboxID"]
    sh(client, box, "echo 1 > /n")
    response = client.post(f"/sandboxes/{box}/snapshots", json={"label": "one", "barrierID": "step-1"})
    assert code(response) == 201
    first = response.json()
    assert first["names"] == ["one"]
    assert first["barrierID"] == "step-1"
    assert first["sandboxID"] == box
    sh(client, box, "echo 2 > /n")
    second = client.post(f"/sandboxes/{box}/snapshots", json={"name": "two"}).json()
    assert second["parentID"] == first["snapshotID"]
    listed = client.get("/snapshots", params={"sandboxID": box}).json()
    assert [one["snapshotID"] for one in listed] == [first["snapshotID"], second["snapshotID"]]
    assert [one["label"] for one in client.get("/snapshots", params={"barrierID": "step-1"}).json()] == ["one"]
    assert code(client.post(f"/sandboxes/{box}/rollback", json={"snapshotID": "one"})) == 200
    assert sh(client, box, "cat /n")["stdout"] == "1\n"
    other = new(client, templateID=second["snapshotID"])["sandboxID"]
    assert sh(client, other, "cat /n")["stdout"] == "2\n"
    assert new(client, templateID="one")["sandboxID"]
    refused = client.post("/sandboxes", json={"templateID": "one", "memoryMB": 256})
    assert code(refused) == 400
    assert code(client.delete(f"/snapshots/{second['snapshotID']}")) == 204
    assert code(client.delete(f"/snapshots/{second['snapshotID']}x")) == 404
    assert code(client.post(f"/sandboxes/{box}/snapshots", json={"name": "a", "label": "b"})) == 400


@pytest.mark.parametrize("paused", [False, True])
def test_forks_have_tokens_of_their_own(client: httpx.Client, paused: bool) -> None:
    made = new(client, metadata={"m": "1"})
    box = made["sandboxID"]
    sh(client, box, "echo before > /f")
    if paused:
        client.post(f"/sandboxes/{box}/pause")
    response = client.post(f"/sandboxes/{box}/fork", json={"count": 3, "label": "l", "barrierID": "b", "timeout": 99})
    assert code(response) == 201
    kids = [result["sandbox"] for result in response.json()]
    tokens = {kid[name] for kid in [made, *kids] for name in ("envdAccessToken", "trafficAccessToken")}
    assert len(tokens) == 8
    for i, kid in enumerate(kids):
        assert sh(client, kid["sandboxID"], f"cat /f; echo {i} > /f")["stdout"] == "before\n"
    assert client.get("/snapshots").json()[-1]["barrierID"] == "b"
    assert client.get(f"/sandboxes/{box}").json()["state"] == ("paused" if paused else "running")
    assert client.get(f"/sandboxes/{kids[0]['sandboxID']}").json()["metadata"] == {"m": "1", "parent": box}


def test_some_forks_fail_and_the_others_run(fake_root: Assets, gates: Gates) -> None:
    with served(fake_root, gate=gates) as client:
        box = new(client)["sandboxID"]
        gates.fail(Step.LOADED, SandboxError("no memory for this one"))
        results = client.post(f"/sandboxes/{box}/fork", json={"count": 4}).json()
        failed = [result["error"] for result in results if "error" in result]
        assert [error["message"] for error in failed] == ["no memory for this one"]
        assert failed[0]["code"] == 500
        for result in results:
            if "sandbox" in result:
                assert sh(client, result["sandbox"]["sandboxID"], "echo here")["stdout"] == "here\n"
        assert len(client.get("/sandboxes").json()) == 4


def test_at_most_16_forks_in_a_call(client: httpx.Client) -> None:
    box = new(client)["sandboxID"]
    for count in (0, 17, 64):
        response = client.post(f"/sandboxes/{box}/fork", json={"count": count})
        assert code(response) == 400
        assert response.json()["param"] == "count"


def test_memory_that_is_used_up_is_429(fake_root: Assets) -> None:
    with served(fake_root, limits=Limits(memory=100 << 20)) as client:
        new(client)
        response = client.post("/sandboxes", json={})
        assert code(response) == 429
        assert response.headers["retry-after"] == "1"


def test_two_at_once(fake_root: Assets, gates: Gates) -> None:
    """A second pause joins the first, a fork meanwhile is a conflict, a kill waits."""
    with served(fake_root, gate=gates) as client, ThreadPoolExecutor(4) as pool:
        box = new(client)["sandboxID"]
        barrier = gates.hold(Step.STATE_SAVED)
        pauses = [pool.submit(client.post, f"/sandboxes/{box}/pause") for _ in range(2)]
        while client.get(f"/sandboxes/{box}").json()["phase"] != "pausing":
            time.sleep(0.01)
        assert client.get(f"/sandboxes/{box}").json()["state"] == "running"
        assert code(client.post(f"/sandboxes/{box}/fork", json={})) == 409
        kill = pool.submit(client.delete, f"/sandboxes/{box}")
        time.sleep(0.05)
        assert not kill.done()
        barrier.release._loop.call_soon_threadsafe(barrier.release.set)  # type: ignore[attr-defined]
        assert [pause.result().status_code for pause in pauses] == [204, 204]
        assert kill.result().status_code == 204
        assert code(client.get(f"/sandboxes/{box}")) == 404


# Who may do what


def test_keys_and_tokens(fake_root: Assets) -> None:
    with served(fake_root, api_keys=(KEY, "second")) as client:
        one, two = new(client), new(client)
        box = one["sandboxID"]
        body = {"cmd": "echo x"}
        bare = httpx.Client(base_url=client.base_url)
        for path in ("/sandboxes", "/v2/sandboxes", "/snapshots", "/templates", "/top", f"/sandboxes/{box}"):
            assert code(bare.get(path)) == 401, path
            assert code(bare.get(path, headers={"x-api-key": "wrong"})) == 401
            assert code(bare.get(path, headers={"x-api-key": "second"})) == 200
            assert code(bare.get(path, headers={"authorization": f"Bearer {KEY}"})) == 200
        for token, status in ((one["envdAccessToken"], 200), (two["envdAccessToken"], 401), ("", 401)):
            headers = {"x-access-token": token}
            assert code(bare.post(f"/sandboxes/{box}/exec", json=body, headers=headers)) == status
        assert code(bare.post(f"/sandboxes/{box}/exec", json=body)) == 401
        # The token of a sandbox opens nothing else.
        assert code(bare.get("/sandboxes", headers={"x-access-token": one["envdAccessToken"]})) == 401
        assert code(bare.delete(f"/sandboxes/{box}", headers={"x-access-token": one["envdAccessToken"]})) == 401
        assert bare.get("/health").json()["status"] == "ok"
        assert bare.get("/openapi.json").json()["info"]["title"] == "Perilune sandboxes"


def test_without_keys_only_this_host_is_listened_on(fake_root: Assets) -> None:
    with pytest.raises(ValueError, match=r"host is '0\.0\.0\.0'; without an API key"):
        serve(service(fake_root, api_keys=()), "0.0.0.0", 0)


# Programs


def test_output_streams_as_it_comes(client: httpx.Client) -> None:
    box = new(client)["sandboxID"]
    body = {"cmd": "echo one; sleep 1; echo two; false", "stream": True}
    with client.stream("POST", f"/sandboxes/{box}/exec", json=body) as response:
        times, lines = [], []
        for line in response.iter_lines():
            times.append(time.monotonic())
            lines.append(json.loads(line))
    assert set(lines[0]) == {"pid"}
    text = [base64.b64decode(line["data"]) for line in lines[1:-1]]
    assert text == [b"one\n", b"two\n", b""] or text == [b"one\n", b"two\n"]
    assert lines[-1] == {"exitCode": 1, "timedOut": False}
    assert times[2] - times[1] > 0.15


def test_an_interactive_program(client: httpx.Client) -> None:
    box = new(client)["sandboxID"]
    nothing = client.post(f"/sandboxes/{box}/exec", json={})
    assert (nothing.status_code, nothing.json()["error_code"]) == (400, "invalid")
    assert "no program of its own" in nothing.json()["message"]
    started = client.post(f"/sandboxes/{box}/exec", json={"cmd": "cat", "interactive": True, "tag": "t"}).json()
    pid = started["pid"]
    assert [one["pid"] for one in client.get(f"/sandboxes/{box}/exec").json()] == [pid]
    data = base64.b64encode(b"hello").decode()
    with client.stream("GET", f"/sandboxes/{box}/exec/{pid}") as heard:  # it listens from its answer's head on
        assert code(client.post(f"/sandboxes/{box}/exec/{pid}/input", json={"data": data, "close": True})) == 204
        lines = [json.loads(line) for line in heard.iter_lines()]
    assert base64.b64decode(lines[0]["data"]) == b"hello"
    assert lines[-1]["exitCode"] == 0
    bad = client.post(f"/sandboxes/{box}/exec/{pid}/input", json={"data": "?"})
    assert code(bad) == 400
    assert bad.json()["param"] == "data"
    assert code(client.get(f"/sandboxes/{box}/exec/999")) == 404


def test_time_limits_signals_and_bounds(client: httpx.Client) -> None:
    box = new(client)["sandboxID"]
    assert sh(client, box, "sleep 9", timeout=0.1) | {"stdout": ""} == {
        "exitCode": 137,
        "stdout": "",
        "stderr": "",
        "timedOut": True,
        "truncated": False,
    }
    bounded = sh(client, box, "yes", timeout=0.3, maxOutput=1000)
    assert bounded["truncated"]
    assert len(bounded["stdout"]) == 1000
    pid = client.post(f"/sandboxes/{box}/exec", json={"cmd": "sleep 99", "detach": True}).json()["pid"]
    assert code(client.post(f"/sandboxes/{box}/exec/{pid}/signal", json={"signal": 15})) == 204
    assert json.loads(client.get(f"/sandboxes/{box}/exec/{pid}").text)["exitCode"] == 143


def test_a_client_that_goes_takes_its_program_along(client: httpx.Client) -> None:
    box = new(client)["sandboxID"]
    with pytest.raises(httpx.ReadTimeout):
        client.post(f"/sandboxes/{box}/exec", json={"cmd": "sleep 1.5; echo late > /f"}, timeout=0.3)
    time.sleep(1.5)
    assert code(client.get(f"/sandboxes/{box}/files", params={"path": "/f"})) == 404


def test_a_listener_that_goes_takes_its_program_along(client: httpx.Client) -> None:
    box = new(client)["sandboxID"]
    with client.stream("POST", f"/sandboxes/{box}/exec", json={"cmd": "yes", "stream": True}) as response:
        next(response.iter_raw())
    deadline = time.monotonic() + 50
    while client.get(f"/sandboxes/{box}/exec").json():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_paused_sandbox_is_resumed_by_its_use_if_it_was_asked_for(client: httpx.Client) -> None:
    box = new(client, autoResume={"enabled": True})["sandboxID"]
    client.post(f"/sandboxes/{box}/pause")
    assert sh(client, box, "echo up")["stdout"] == "up\n"
    assert client.get(f"/sandboxes/{box}").json()["lifecycle"]["autoResume"]


# Files


def test_files_are_bounded(fake_root: Assets) -> None:
    with served(fake_root, max_file=1000, max_body=300) as client:
        box = new(client)["sandboxID"]
        url = f"/sandboxes/{box}/files"
        data = bytes(range(256)) * 3
        assert code(client.put(url, params={"path": "/a/../b"}, content=data)) == 204
        assert client.get(url, params={"path": "/b"}).content == data
        assert code(client.get(url, params={"path": "/none"})) == 404
        assert code(client.get(url, params={"path": "b"})) == 400
        assert code(client.put(url, params={"path": "/c"}, content=bytes(1001))) == 413
        pieces = (bytes(400) for _ in range(10**5))  # without a length: it must end at the limit, not after it
        with contextlib.suppress(httpx.TransportError):  # the service may have hung up
            assert code(client.put(url, params={"path": "/c"}, content=pieces)) == 413
        sh(client, box, "echo " + "x" * 200 + " > /long; cat /long >> /big; cat /long >> /big")
        for _ in range(4):
            sh(client, box, "cat /big >> /bigger")
        assert code(client.get(url, params={"path": "/bigger"})) == 413
        assert code(client.post("/sandboxes", json={"metadata": {"a": "x" * 400}})) == 413
        assert code(client.put(url, params={"path": "/c", "mode": "999"}, content=b"")) == 400


# Ports


class Site(BaseHTTPRequestHandler):
    """A guest's web server: says what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = self.headers.get("content-length")
        data = self.rfile.read(int(length)) if length else b""
        body = json.dumps({"path": self.path, "headers": dict(self.headers), "data": data.decode()}).encode()
        self.send_response(203, "Well")
        self.send_header("x-mine", "1")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None: ...


def test_ports_of_a_guest_through_the_proxy(fake_root: Assets) -> None:
    site = HTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    port = site.server_address[1]
    try:
        with served(fake_root, domain="box.test") as client:
            made, other = new(client), new(client)
            box = made["sandboxID"]
            bare = httpx.Client(base_url=client.base_url)
            by_header = {"e2b-sandbox-id": box, "e2b-sandbox-port": str(port)}
            by_host = {"host": f"{port}-{box}.box.test:80"}
            token = {"e2b-traffic-access-token": made["trafficAccessToken"]}
            for way in (by_header, by_host):
                response = bare.post("/a%20b?c=d", content=b"data", headers=way | token | {"x-some": "thing"})
                assert response.status_code == 203
                assert response.headers["x-mine"] == "1"
                said = response.json()
                assert said["path"] == "/a%20b?c=d"
                assert said["data"] == "data"
                names = {name.lower(): value for name, value in said["headers"].items()}
                assert names["host"] == f"localhost:{port}"
                assert names["x-some"] == "thing"
                assert not {"e2b-traffic-access-token", "e2b-sandbox-id", "x-api-key", "x-access-token"} & set(names)
                assert code(bare.get("/", headers=way)) == 401
                wrong = {"e2b-traffic-access-token": other["trafficAccessToken"]}
                assert code(bare.get("/", headers=way | wrong)) == 401
                access = {"e2b-traffic-access-token": made["envdAccessToken"]}
                assert code(bare.get("/", headers=way | access)) == 401
            assert client.get("/", headers=by_header).status_code == 203  # an API key opens it too
            closed = client.get("/", headers=by_header | {"e2b-sandbox-port": "1"})
            assert code(closed) == 502
            assert "port is not open" in closed.json()["message"]
            assert code(client.get("/", headers=by_header | {"e2b-sandbox-port": "99999"})) == 400
            assert code(client.get("/", headers={"e2b-sandbox-id": "none", "e2b-sandbox-port": "80"})) == 404
            assert code(client.get("/", headers={"host": f"{port}-{box}.else.test"})) == 404
    finally:
        site.shutdown()
        site.server_close()


# Metrics, and the end


def test_metrics_and_top(client: httpx.Client) -> None:
    boxes = [new(client)["sandboxID"] for _ in range(3)]
    client.post(f"/sandboxes/{boxes[0]}/pause")
    client.post(f"/sandboxes/{boxes[1]}/snapshots")
    client.get("/sandboxes/none")
    text = client.get("/metrics").text
    for line in (
        'perilune_sandbox_boxes{state="running"} 2.0',
        'perilune_sandbox_boxes{state="paused"} 1.0',
        "perilune_sandbox_machines 2.0",
        'perilune_sandbox_events_total{event="pause",outcome="ok"} 1.0',
        'perilune_sandbox_event_seconds_count{event="checkpoint"} 1.0',
        'perilune_sandbox_http_requests_total{method="POST",route="/sandboxes",status="201"} 3.0',
        'perilune_sandbox_http_requests_total{method="GET",route="/sandboxes/{sandbox_id}",status="404"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert boxes[0] not in text
    rows = {row["sandboxID"]: row for row in client.get("/top").json()}
    assert set(rows) == set(boxes)
    assert rows[boxes[0]]["phase"] == "paused"
    assert rows[boxes[1]]["age"] > 0
    assert rows[boxes[1]]["left"] > 0
    (now,) = client.get(f"/sandboxes/{boxes[1]}/metrics").json()
    assert now["memTotal"] == 128 << 20


@pytest.mark.parametrize("on_stop", ["pause", "kill"])
def test_a_stop_leaves_sandboxes_in_a_stated_state(fake_root: Assets, on_stop: str) -> None:
    with served(fake_root, on_stop=on_stop) as client:
        runs, paused = (new(client, metadata={"n": name})["sandboxID"] for name in "rp")
        for box in (runs, paused):
            sh(client, box, "echo kept > /f")
        client.post(f"/sandboxes/{paused}/pause")
    with served(fake_root) as client:
        listed = {one["sandboxID"]: one["state"] for one in client.get("/v2/sandboxes").json()}
        assert listed == {paused: "paused"} | ({runs: "paused"} if on_stop == "pause" else {})
        for box in listed:
            assert code(client.post(f"/sandboxes/{box}/resume")) == 201
            assert sh(client, box, "cat /f")["stdout"] == "kept\n"
        if on_stop == "kill":
            gone = client.get(f"/sandboxes/{runs}")
            assert code(gone) == 404
            assert "the service ended while it was running" in gone.json()["message"]


def test_requests_under_way_end_well_when_it_stops(fake_root: Assets, gates: Gates) -> None:
    managers: list[Manager] = []
    with ThreadPoolExecutor(1) as pool:
        with served(fake_root, gate=gates, keep=managers, drain_s=10.0) as client:
            box = new(client)["sandboxID"]
            slow = pool.submit(
                httpx.post,
                f"{client.base_url}/sandboxes/{box}/exec",
                json={"cmd": "sleep 0.5; echo done"},
                headers={"x-api-key": KEY},
            )
            while not managers[0].driver.vms[box].processes:  # type: ignore[attr-defined]
                assert not slow.done(), slow.result()
                time.sleep(0.01)
        assert slow.result().json()["stdout"] == "done\n"
    with pytest.raises(Exception, match="closed database"):
        managers[0].store.count()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_root_that_is_in_use_is_not_opened(fake_root: Assets) -> None:
    with served(fake_root), pytest.raises(SandboxError, match="did not start"), running(service(fake_root)):
        pass


def test_small_answers_do_not_wait_for_acknowledgements() -> None:
    with _listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_random_requests_are_never_a_500(client: httpx.Client) -> None:
    random_ = random.Random(0)
    box = new(client)["sandboxID"]
    paths = ["/sandboxes", "/v2/sandboxes", "/snapshots", f"/sandboxes/{box}/exec", f"/sandboxes/{box}/fork"]
    paths += [f"/sandboxes/{box}/files?path=/a", "/process.Process/Start", "/files?path=a", "/health"]
    for _ in range(80):
        headers = {}
        if random_.random() < 0.5:
            headers = {"e2b-sandbox-id": random_.choice([box, "x"]), "e2b-sandbox-port": random_.choice(["49983", "a"])}
        body = random_.choice([b"", b"{", b"[]", b"null", b'{"cmd": 1}', random_.randbytes(40), b'{"count": []}'])
        method = random_.choice(["GET", "POST", "PUT", "DELETE"])
        response = client.request(method, random_.choice(paths), content=body, headers=headers)
        assert response.status_code not in (500, 502) or "e2b-sandbox-id" in headers, response.text
        assert response.status_code != 500, response.text
