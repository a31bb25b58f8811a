"""A server's life: clients that go, the end, metrics, logs, spans; and the command that starts one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import soon
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import chat_model, serving, tiny_llm, tiny_tokenizer

from perilune import Error
from perilune.model import save
from perilune.serve.server import ServerConfig, build_app, tracing
from perilune.serve.server.backend import shared
from perilune.serve.server.logs import Lines
from perilune.serve.server.run import _listening, running

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 8000, "ignore_eos": True}


def metrics(client: httpx.Client) -> dict[str, float]:
    """Name, with its labels but the model's, -> value."""
    out = {}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            out[re.sub(r',model_name="[^"]*"|model_name="[^"]*",?', "", name).replace("{}", "")] = float(value)
    return out


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_takes_its_request_with_it(client: httpx.Client, stream: bool) -> None:
    def ended() -> float:
        return sum(value for name, value in metrics(client).items() if name.startswith("vllm:request_success_total"))

    def running() -> float:
        return metrics(client)["vllm:num_requests_running"]

    assert soon(lambda: running() == 0)
    before = ended()
    if stream:
        with client.stream("POST", CHAT, json={**LONG, "stream": True, "n": 2}) as response:
            pieces = response.iter_bytes()  # kept: one that is collected closes the connection
            next(pieces)
            assert soon(lambda: running() > 0)
    else:
        host, port = str(client.base_url).removeprefix("http://").strip("/").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            body = json.dumps(LONG).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            assert soon(lambda: running() > 0)
    assert soon(lambda: running() == 0)
    assert ended() == before


def test_nothing_is_left_after_clients_went() -> None:
    """Every page and slot comes back: the engine's own recount says so."""
    llm = tiny_llm()
    with running(build_app(ServerConfig(drain_seconds=2), llm)) as url:
        for i in range(6):
            with (
                httpx.Client(base_url=url, timeout=30) as client,
                client.stream("POST", CHAT, json={**LONG, "stream": True, "n": 2, "seed": i}) as response,
            ):
                for _, _chunk in zip(range(i + 1), response.iter_bytes(), strict=False):
                    pass
        with httpx.Client(base_url=url, timeout=30) as client:
            assert soon(lambda: metrics(client)["vllm:num_requests_running"] == 0)
    llm.engine.check_integrity()
    assert not [*llm.engine.scheduler.requests()]
    assert len(llm.engine.scheduler.slots) == llm.engine.config.slots
    llm.engine.clear_cache()
    assert llm.engine.cache.arenas[0].free_pages == llm.engine.cache.arenas[0].capacity


def test_the_metrics_count(client: httpx.Client) -> None:
    before = metrics(client)
    body = {"messages": [{"role": "user", "content": "count me " * 40}], "max_tokens": 5, "ignore_eos": True}
    usages = [client.post(CHAT, json=body).json()["usage"] for _ in range(2)]
    client.post(CHAT, json={})
    after = metrics(client)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    assert grown["vllm:prompt_tokens_total"] == prompt == grown["vllm:prefix_cache_queries_total"]
    assert grown["vllm:generation_tokens_total"] == 10
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown["vllm:prefix_cache_hits_total"] == cached > 0
    assert grown['vllm:request_success_total{finished_reason="length"}'] == 2
    assert grown['perilune:requests_refused_total{status="400"}'] == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
        assert grown[f"vllm:{name}_count"] == 2
    assert grown["vllm:inter_token_latency_seconds_count"] == 8
    assert after["perilune:min_hittable_tokens"] == 64
    assert "perilune:kv_matched_no_state_tokens_total" in after
    assert 0 <= after["vllm:kv_cache_usage_perc"] <= 1


def test_a_lower_priority_number_goes_first_where_priorities_count() -> None:
    """One slot, taken; three wait for it in the wrong order. vLLM's convention: lower numbers first."""
    order: list[int] = []
    with (
        serving(ServerConfig(priorities=True, drain_seconds=2), slots=1) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", CHAT, json={**LONG, "stream": True}) as taken,
    ):
        next(chunks := taken.iter_bytes())

        def ask(priority: int) -> None:
            body = {**LONG, "max_tokens": 2, "priority": priority}
            assert httpx.post(f"{url}{CHAT}", json=body, timeout=60).status_code == 200
            order.append(priority)

        threads = [threading.Thread(target=ask, args=(priority,)) for priority in (5, 0, -5)]
        for waiting, thread in enumerate(threads, start=1):
            thread.start()
            assert soon(lambda waiting=waiting: metrics(client)["vllm:num_requests_waiting"] == waiting)
        chunks.close()
        for thread in threads:
            thread.join(30)
    assert order == [-5, 0, 5]


def test_a_request_has_an_id_and_a_line(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3, "ignore_eos": True}
    with caplog.at_level(logging.INFO, "perilune.server"):
        response = client.post(CHAT, json=body, headers={"x-request-id": "my-id.1"})
        strange = client.post(CHAT, json={}, headers={"x-request-id": "a b\tc"})
        assert soon(lambda: len(caplog.records) >= 2)
    assert response.headers["x-request-id"] == "my-id.1"
    assert re.fullmatch(r"[0-9a-f]{32}", strange.headers["x-request-id"])
    lines = [json.loads(Lines().format(record)) for record in caplog.records if record.getMessage() == "request"]
    assert lines[0]["id"] == "my-id.1"
    assert lines[0]["prompt"] == response.json()["usage"]["prompt_tokens"]
    assert (lines[0]["status"], lines[0]["answer"], lines[0]["finished"], lines[0]["tenant"]) == (
        200,
        3,
        "length",
        "open",
    )
    assert (lines[1]["status"], lines[1]["param"]) == (400, "messages")
    assert "secret" not in json.dumps(lines)


def test_a_request_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    monkeypatch.setattr(tracing, "_provider", lambda endpoint: provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    config = ServerConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces", drain_seconds=2)
    with serving(config) as url:
        body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{url}{CHAT}", json=body, headers={"traceparent": parent}, timeout=60).json()
    (span,) = [span for span in seen.get_finished_spans() if span.name == f"POST {CHAT}"]
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]
    assert span.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert span.attributes["gen_ai.usage.output_tokens"] == 3


def test_who_asks_meanwhile_waits_for_the_same_look() -> None:
    """Also where the first who asked goes, and where it fails; afterwards there is a look of its own."""
    looks = 0

    async def look() -> int:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0.02)
        if looks == 2:
            raise Error("look failed")
        return looks

    async def ask() -> None:
        under_way: dict[str, asyncio.Future[Any]] = {}
        first = asyncio.create_task(shared(under_way, "a", look))
        await asyncio.sleep(0.001)
        others = [shared(under_way, "a", look) for _ in range(50)]
        first.cancel()
        assert await asyncio.gather(*others) == [1] * 50
        failed = await asyncio.gather(*(shared(under_way, "a", look) for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in failed] == ["look failed"] * 3
        assert not under_way
        assert await shared(under_way, "a", look) == 3

    asyncio.run(ask())


def test_small_pieces_are_sent_at_once() -> None:
    """A connection that waits for acknowledgements holds every token of a stream back, by up to 40 ms."""
    with _listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_stopping_server_finishes_what_runs_and_takes_nothing_new() -> None:
    """Within `drain_seconds` an answer is whole, past it the client is told."""
    for tokens, whole in ((100, True), (20_000, False)):
        app = build_app(ServerConfig(drain_seconds=60.0 if whole else 0.5), tiny_llm())
        got: list[str] = []
        begun = threading.Event()

        def ask(url: str, tokens: int = tokens, got: list[str] = got, begun: threading.Event = begun) -> None:
            body = {**LONG, "max_tokens": tokens, "stream": True}
            with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    got.append(line)
                    begun.set()

        with running(app) as url:
            thread = threading.Thread(target=ask, args=(url,))
            thread.start()
            assert begun.wait(60)
        thread.join(60)
        assert not thread.is_alive()
        text = "".join(got)
        assert ('"finish_reason":"length"' in text, '"code":503' in text) == (whole, not whole)
        assert text.endswith("data: [DONE]")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(chat_model(), folder)
    tiny_tokenizer().save(folder)
    return folder


def test_the_command_of_vllm_with_one_word_changed(checkpoint: Path) -> None:
    """It starts, answers, and SIGTERM lets the answer that runs end first."""
    flags = f"""serve {checkpoint} --trust-remote-code --tensor-parallel-size 1 --enable-expert-parallel
        --data-parallel-size 1 --load-format fastsafetensors --enable-prefix-caching --enable-auto-tool-choice
        --tool-call-parser kimi_k3 --reasoning-parser kimi_k3 --max-model-len 4096 --gpu-memory-utilization 0.5
        --max-num-seqs 4 --drain-seconds 60 --api-key k --served-model-name m --port 0
        --kv-cache-memory-bytes 20000000"""
    command = [sys.executable, "-c", "import sys; from perilune.cli import main; sys.exit(main())", *flags.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines: list[dict[str, Any]] = []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            lines.append(json.loads(line))
            if lines[-1]["what"] == "started":
                break
        assert any("no code of a model repository is ever run" in line["what"] for line in lines)
        port = next(line["port"] for line in lines if line["what"] == "listening")
        body = {**LONG, "max_tokens": 100, "stream": True, "model": "m"}
        url, headers = f"http://127.0.0.1:{port}{CHAT}", {"authorization": "Bearer k"}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            chunks = response.iter_lines()
            first = next(chunks)
            process.send_signal(signal.SIGTERM)
            rest = [first, *chunks]
        assert rest[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason":"length"' in "".join(rest)
        assert process.wait(60) == 0
        lines += [json.loads(line) for line in process.stderr]
        assert [line["what"] for line in lines[-3:]] == ["stopping", "request", "stopped"]
    finally:
        process.kill()
        process.wait()
