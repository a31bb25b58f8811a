"""Many clients at once: nothing leaks, nobody is lost, and short requests do not wait for long ones. Minutes each."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import tiny_llm

from perilune import ModelConfig, Transformer
from perilune.chat import train_bpe
from perilune.model import initialize
from perilune.serve import LLM, EngineConfig
from perilune.serve.server import ServerConfig, build_app
from perilune.serve.server.run import running

SECONDS = float(os.environ.get("PERILUNE_SOAK_SECONDS", "180"))
CLIENTS = 200
PREFIXES = [f"{i} shared words of a long prompt " * n for i, n in enumerate((2, 8, 20, 40))]


def memory() -> float:
    """Resident bytes of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def request(random_: random.Random) -> tuple[str, dict[str, Any]]:
    text = random_.choice(PREFIXES) + str(random_.randrange(50))
    fields: dict[str, Any] = {"max_tokens": random_.randint(1, 40), "stream": random_.random() < 0.6}
    match random_.randrange(3):
        case 0:
            return "/v1/completions", {**fields, "prompt": text, "n": random_.choice([1, 1, 2])}
        case 1:
            return "/v1/messages", {**fields, "model": "tiny", "messages": [{"role": "user", "content": text}]}
        case _:
            return "/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": text}]}


async def one(client: httpx.AsyncClient, random_: random.Random, seen: Counter[str]) -> None:
    """One request; three in ten clients go before the answer is whole."""
    path, body = request(random_)
    leaves = random_.random() < 0.3
    if not body["stream"]:
        try:
            response = await client.post(path, json=body, timeout=0.05 * random_.random() if leaves else 120)
        except httpx.TimeoutException:
            seen["left" if leaves else "lost"] += 1
            return
        seen["whole" if response.status_code == 200 else f"status {response.status_code}"] += 1
        return
    chunks, left, last = 0, random_.randint(0, 20), ""
    async with client.stream("POST", path, json=body, timeout=120) as response:
        if response.status_code != 200:
            seen[f"status {response.status_code}"] += 1
            return
        async for line in response.aiter_lines():
            chunks += 1
            last = line or last
            if leaves and chunks > left:
                seen["left"] += 1
                return
    end = "data: [DONE]" if path != "/v1/messages" else 'data: {"type":"message_stop"}'
    seen["whole" if last == end else "cut"] += 1


async def crowd(url: str, seconds: float, seen: Counter[str], resident: list[float]) -> None:
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)

    async def somebody(number: int) -> None:
        random_ = random.Random(number)
        while time.monotonic() < end:
            await one(client, random_, seen)

    async def look() -> None:
        while time.monotonic() < end:
            resident.append(memory())
            await asyncio.sleep(min(2.0, seconds / 10))

    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        await asyncio.gather(look(), *map(somebody, range(CLIENTS)))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 200)
def test_200_clients_that_come_and_go() -> None:
    """Every answer is whole unless its client left; then all pages and slots are back and memory stayed flat."""
    llm = tiny_llm(slots=32, arena_bytes=30_000_000, reserve=0.25)
    seen: Counter[str] = Counter()
    resident: list[float] = []
    with running(build_app(ServerConfig(model_names=("tiny",), drain_seconds=20), llm)) as url:
        asyncio.run(crowd(url, SECONDS, seen, resident))
        end = time.monotonic() + 20
        while 'num_requests_running{model_name="tiny"} 0.0' not in (
            page := httpx.get(f"{url}/metrics", timeout=60).text
        ):
            assert time.monotonic() < end, page
            time.sleep(0.1)
    half = len(resident) // 2
    early, late = sum(resident[half // 2 : half]) / (half - half // 2), sum(resident[-half:]) / half
    print(
        json.dumps({"seconds": SECONDS, **seen, "rss_mb": [round(early, 1), round(late, 1), round(max(resident), 1)]})
    )
    assert set(seen) == {"whole", "left"}, seen
    assert late < 1.03 * early
    llm.engine.check_integrity()
    assert len(llm.engine.scheduler.slots) == llm.engine.config.slots
    assert not llm._streams
    llm.engine.clear_cache()
    assert llm.engine.cache.arenas[0].free_pages == llm.engine.cache.arenas[0].capacity


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_short_requests_do_not_wait_for_long_ones() -> None:
    """Time to the first token under a burst of long prompts stays within twice the unloaded one, in one run.

    nano with random weights; long prompts are 4 times as long as short ones. Class budgets on.
    """
    words = train_bpe([Path(__file__).read_text(encoding="utf-8")], 2048)
    model = initialize(Transformer(ModelConfig.from_pretrained("nano")), 0)
    config = EngineConfig(400_000_000, slots=16, token_budget=512, long_tokens=2048, long_share=0.125, reserve=0.25)
    llm = LLM(model, config, tokenizer=words)
    ids = [words.encode("x")[0]] * 900

    async def first(client: httpx.AsyncClient, prompt: list[int]) -> float:
        begin = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body, timeout=120) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    return time.perf_counter() - begin
        raise AssertionError("no token came")

    def prompt(number: int, times: int = 1) -> list[int]:
        return [number % 1500 + 300, *(ids * times)]

    async def measure(url: str) -> tuple[list[float], list[float], int]:
        async with httpx.AsyncClient(base_url=url) as client:
            for number in range(5):
                await first(client, prompt(number))
            alone = [await first(client, prompt(number)) for number in range(10, 30)]
            burst = [asyncio.create_task(first(client, prompt(number, 4))) for number in range(100, 116)]
            await asyncio.sleep(0.3)
            loaded = []
            for number in range(200, 220):
                loaded.append(await first(client, prompt(number)))
            waiting = sum(not task.done() for task in burst)
            await asyncio.gather(*burst)
            return alone, loaded, waiting

    with running(build_app(ServerConfig(drain_seconds=5), llm)) as url:
        alone, loaded, waiting = asyncio.run(measure(url))
    medians = [sorted(each)[len(each) // 2] for each in (alone, loaded)]
    worst = [sorted(each)[int(len(each) * 0.9)] for each in (alone, loaded)]
    shown = {"alone": medians[0], "burst": medians[1], "alone_p90": worst[0], "burst_p90": worst[1]}
    print(json.dumps({name: round(value * 1e3, 1) for name, value in shown.items()} | {"long_left": waiting}))
    assert waiting > 0, "the burst was over before the short requests"
    assert medians[1] < 2 * medians[0]
