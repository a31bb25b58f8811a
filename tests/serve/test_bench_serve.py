"""bench-serve against a server that is scripted here: what it measures is what the script did."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
import uvicorn
from engines import soon
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from perilune import Error
from perilune.cli import main
from perilune.serve.bench import (
    Record,
    Slo,
    Target,
    closed_loop,
    draw,
    measure,
    open_loop,
    poisson,
    random_items,
    shared_items,
    summarize,
    trace_items,
)
from perilune.serve.bench.client import find_model, lines, open_client, words_per_token
from perilune.serve.bench.workload import WORDS, Item
from perilune.serve.simulate.traces import Request as TraceRequest
from perilune.serve.simulate.traces import Trace

FIRST, NEXT, PIECES = 0.08, 0.03, 5


class Script:
    """A server of an OpenAI-compatible shape: two tokens a word, a template of 7, fixed delays, a cache of prompts."""

    def __init__(self):
        self.bodies, self.known, self.fails = [], set(), {}
        self.usage = True
        self.together = 0  # requests that have to be there before any gets its first token
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/v1/chat/completions")(self.completions)

    async def models(self):
        return {"data": [{"id": "scripted"}]}

    async def completions(self, request: Request):
        body = await request.json()
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        self.bodies.append(body | {"key": request.headers.get("authorization")})
        tokens = 2 * len(prompt.split()) + 7
        usage = {"prompt_tokens": tokens, "completion_tokens": 2 * PIECES}
        if not body["stream"]:
            return {"usage": usage} if self.usage else {}
        if len(self.bodies) in self.fails:
            return JSONResponse({"error": {"message": "busy"}}, self.fails[len(self.bodies)])
        start = " ".join(prompt.split()[:4])
        usage["prompt_tokens_details"] = {"cached_tokens": tokens // 2 if start in self.known else 0}
        self.known.add(start)

        async def stream():
            yield (
                "data: "
                + json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}, "text": ""}]})
                + "\n\n"
            )
            await asyncio.sleep(FIRST)
            while len(self.bodies) < self.together:
                await asyncio.sleep(0.01)
            for i in range(PIECES):
                piece = {"delta": {"content": "a b "}} if chat else {"text": "a b "}
                yield "data: " + json.dumps({"choices": [piece], "usage": None}) + "\n\n"
                await asyncio.sleep(NEXT if i < PIECES - 1 else 0)
            if self.usage:
                yield "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


@contextmanager
def serving(app):
    """The app on a loopback port of its own, in a thread; its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert soon(lambda: server.started, 60)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def url(script):
    with serving(script.app) as address:
        yield address


def go(url, items, concurrency=None, **options):
    """Records of a load on a server."""
    target = Target(url, "m", **options)

    async def load():
        async with open_client(target, 60) as client:

            async def send(item, begin, planned):
                return await measure(client, target, item, begin, planned)

            if concurrency:
                return await closed_loop(items, send, concurrency)
            return await open_loop(items, send)

    return asyncio.run(load())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_times_and_counts_of_a_request(url, script, endpoint):
    (record,) = go(url, [Item("one two three", 10)], endpoint=endpoint, api_key="k")
    assert record.error is None
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (13, 0, 10)
    # A busy machine makes times longer, never shorter; the empty first chunk is no token.
    assert record.ttft >= FIRST
    assert record.last - record.sent >= FIRST + (PIECES - 1) * NEXT
    assert len(record.gaps) == PIECES - 1
    assert record.ttft + sum(record.gaps) <= record.last - record.sent
    assert record.tpot == pytest.approx((record.last - record.first) / 9)
    body = script.bodies[0]
    assert body["key"] == "Bearer k"
    assert body["ignore_eos"]
    assert body["max_tokens"] == 10


def test_usage_that_a_server_does_not_send(url, script):
    script.usage = False
    (record,) = go(url, [Item("one", 10)], stop_at_eos=True)
    assert (record.prompt_tokens, record.output_tokens) == (0, PIECES)
    assert "ignore_eos" not in script.bodies[0]
    assert summarize([record], Slo())["hit_rate"] is None


def test_words_are_fitted_to_the_servers_tokens(url, script):
    async def fit():
        target = Target(url, "m")
        async with open_client(target, 20) as client:
            return await find_model(client, target), await words_per_token(client, target)

    assert asyncio.run(fit()) == ("scripted", 0.5)
    script.usage = False
    assert asyncio.run(fit()) == ("scripted", 1.0)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_lines_end_where_the_server_ends_them(end, size):
    """Other servers send U+2028 and its like as they are; pieces of the network are cut anywhere."""
    texts = ["data: " + json.dumps({"a": "é\x85\u2028\u2029"}, ensure_ascii=False), "", "data: \x1c\x0b", "last"]
    raw = end.join(texts).encode()

    async def pieces():
        for i in range(0, len(raw), size):
            yield raw[i : i + size]

    async def read():
        return [line async for line in lines(pieces())]

    assert asyncio.run(read()) == texts


def test_an_open_loop_does_not_wait(url, script):
    """None of ten is answered before the last has come: who waits for an answer waits for ever. No one is early."""
    script.together = 10
    items = [Item(f"prompt {i}", 10, at=0.02 * i) for i in range(10)]
    records = go(url, items)
    assert all(record.error is None for record in records)
    assert [record.planned for record in records] == [item.at for item in items]
    assert all(record.sent >= record.planned for record in records)
    assert max(record.sent for record in records) < min(record.first for record in records)


def test_a_closed_loop_keeps_as_many_on_their_way(url):
    records = go(url, [Item(f"prompt {i}", 10) for i in range(9)], concurrency=3)
    edges = sorted([(r.sent, 1) for r in records] + [(r.last, -1) for r in records])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    assert most == 3
    assert len(records) == 9
    with pytest.raises(Error, match="concurrency is 0"):
        asyncio.run(closed_loop([], None, 0))


def test_failures_are_counted_and_named(url, script):
    script.fails = {2: 503, 3: 400}
    records = go(url, [Item(f"p {i}", 10) for i in range(4)], concurrency=1)
    figures = summarize(records, Slo())
    assert figures["failed"] == 2
    assert sorted(error[:10] for error in figures["errors"]) == ["status 400", "status 503"]
    assert figures["goodput"]["share"] == 0.5
    (lost,) = go("http://127.0.0.1:9", [Item("p", 1)])
    assert lost.error.startswith("ConnectError")


def record(ttft, tpot, tokens=11, cached=0, error=None, planned=0.0):
    first = planned + ttft
    last = first + tpot * (tokens - 1)
    return Record(planned, planned, first, last, [tpot] * (tokens - 1), 100, cached, tokens, error)


def test_figures_of_known_records():
    records = [record(0.1, 0.01), record(0.2, 0.02, cached=50), record(0.4, 0.01, planned=1.0), record(9, 1, error="x")]
    figures = summarize(records, Slo(ttft_ms=250, tpot_ms=15))
    assert figures["ttft_ms"] == {"mean": pytest.approx(233.333, abs=1e-3), "p50": 200, "p90": 360, "p99": 396}
    assert figures["tpot_ms"]["p50"] == 10
    assert figures["itl_ms"]["mean"] == pytest.approx(40 / 3, abs=1e-3)
    assert figures["hit_rate"] == pytest.approx(50 / 300, abs=1e-4)
    assert figures["tokens"] == {"prompt": 300, "cached": 50, "output": 33}
    assert figures["seconds"] == 19.0  # of all, the failed one too
    # Within both bounds: the first; the second is slow to write, the third slow to start, the fourth failed.
    assert figures["goodput"]["share"] == 0.25
    assert figures["goodput"]["requests_per_s"] == pytest.approx(1 / 19, abs=1e-4)
    assert summarize(records, Slo())["goodput"]["share"] == 0.75
    one = Record(0.0, 0.0, 0.1, 0.1, [], 5, 0, 1)
    assert one.tpot is None
    assert Slo(tpot_ms=1).met(one)
    with pytest.raises(Error, match="slo_ttft_ms is 0"):
        Slo(ttft_ms=0)
    with pytest.raises(Error, match="no request"):
        summarize([], Slo())


def test_a_late_client_does_not_make_the_server_fast():
    late = Record(planned=1.0, sent=3.0, first=3.1, last=3.2, gaps=[], output_tokens=2)
    assert late.ttft == pytest.approx(2.1)


def test_random_prompts_share_nothing_and_are_the_same_for_a_seed():
    items = [*random_items(20, 100, 7, 0.5)]
    assert all(len(item.prompt.split()) == 50 for item in items)
    assert len({item.prompt.split()[0] + item.prompt.split()[1] for item in items}) > 15
    assert items == [*random_items(20, 100, 7, 0.5)]
    assert not {item.prompt for item in items} & {item.prompt for item in random_items(20, 100, 7, 0.5, seed=1)}
    assert len(set(WORDS)) == len(WORDS) > 200


def test_shared_prefixes_are_shared():
    items = [*shared_items(60, 4, 200, 20, 5, 1.0)]
    heads = {" ".join(item.prompt.split()[:200]) for item in items}
    assert len(heads) == 4
    assert len({item.prompt for item in items}) == 60
    assert all(len(item.prompt.split()) == 220 for item in items)
    with pytest.raises(Error, match="prefixes is 0"):
        shared_items(1, 0, 1, 1, 1, 1.0)


def test_a_traces_units_are_texts():
    """Two requests share two units, as texts too; times and lengths are scaled."""
    requests = [
        TraceRequest(10.0, 512 * 2 + 100, 64, [("a",), ("b",), ("out",)]),
        TraceRequest(30.0, 512 * 3, 1, [("a",), ("b",), ("c",)]),
    ]
    items = list(trace_items(Trace(requests, 512), 0.5, speed=4.0, shrink=8))
    assert [item.at for item in items] == [0.0, 5.0]
    assert [item.output for item in items] == [8, 1]
    first, second = (item.prompt.split() for item in items)
    assert len(first) == 2 * 32 + 6
    assert len(second) == 3 * 32
    assert first[:64] == second[:64]
    assert first[64:70] != second[64:70]
    for wrong in ({"shrink": 3}, {"shrink": 0}, {"speed": 0.0}):
        with pytest.raises(Error, match=next(iter(wrong))):
            list(trace_items(Trace(requests, 512), 0.5, **wrong))


def test_arrivals_are_a_poisson_process():
    times = [item.at for item in poisson([Item("", 1)] * 4000, 5.0)]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # Of an exponential distribution the deviation is the mean; 4000 draws know both within a few per cent.
    assert times[0] == 0
    assert mean == pytest.approx(0.2, rel=0.08)
    assert spread**0.5 == pytest.approx(0.2, rel=0.1)
    with pytest.raises(Error, match="rate is 0"):
        poisson([], 0)


def test_the_command(url, script, tmp_path, capsys):
    out, plot = tmp_path / "load.json", tmp_path / "load.png"
    common = [url, "--requests", "6", "--input-tokens", "40", "--output-tokens", "10"]
    assert main(["bench-serve", *common, "--rate", "40", "--out", str(out), "--plot", str(plot)]) == 0
    said = capsys.readouterr()
    assert "6 requests to scripted, 40 requests/s" in said.out
    assert "on their way" in said.err
    whole = json.loads(out.read_text())
    assert len(whole["records"]) == 6
    assert whole["tokens"]["prompt"] == 6 * 47
    assert whole["arguments"]["rate"] == 40
    assert plot.read_bytes().startswith(b"\x89PNG")
    more = ["--workload", "shared-prefix", "--prefixes", "2", "--prefix-tokens", "30", "--concurrency", "1", "--json"]
    assert main(["bench-serve", *common, *more, "--slo-ttft-ms", "1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["hit_rate"] > 0.2  # four of six prompts begin like one before, half of each is cached
    assert figures["goodput"]["share"] == 0
    trace = "tests/data/traces/conversation.jsonl"
    more = ["--workload", "trace", "--trace", trace, "--requests", "3", "--shrink", "64", "--speed", "1000", "--json"]
    assert main(["bench-serve", url, *more]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ftp://x"], "url is 'ftp://x'"),
        (["http://127.0.0.1:9", "--rate", "1", "--concurrency", "2"], "rate and concurrency"),
        (["http://127.0.0.1:9", "--workload", "trace"], "workload is 'trace'"),
        (["http://127.0.0.1:9", "--trace", "x"], "workload is 'random'"),
        (["http://127.0.0.1:9", "--requests", "0"], "requests is 0"),
        (["http://127.0.0.1:9", "--output-tokens", "0"], "output_tokens is 0"),
        (["http://127.0.0.1:9"], "names no model"),
        (["http://127.0.0.1:9", "--model", "m"], "does not answer"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said, capsys):
    assert main(["bench-serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_every_request_failed(url, script, capsys):
    script.fails = dict.fromkeys(range(3, 20), 500)  # after the two that fit the words
    assert main(["bench-serve", url, "--requests", "2", "--json"]) == 2
    assert "every request failed: status 500" in capsys.readouterr().err


def test_drawing_failures_alone_draws_something(tmp_path):
    draw([Record(0.0, 0.1, last=0.2, error="x")], Slo(1, 1), str(tmp_path / "x.png"), "t")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_the_client_needs_no_torch():
    """It runs on a machine that only sends."""
    code = "import sys; sys.modules['torch'] = None; import perilune.serve.bench, perilune.cli.bench_serve"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
