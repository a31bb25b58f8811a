"""Two engines behind one queue: the tokens of one, requests where their prefix is, what ends takes its own with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from engines import alone, prompt, small_model

from perilune import Error
from perilune.model import save
from perilune.serve import LLM, EngineConfig, Params, Replicas
from perilune.serve.router import RUNNING, UNIT, Router

pytestmark = pytest.mark.timeout(120)
CONFIG = EngineConfig(4_000_000, slots=4, token_budget=1024, exact=True)
GREEDY = Params(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save(small_model(), path)
    return path


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main, 90)

    return asyncio.run(bounded())


def leases(llm: LLM) -> int:
    llm.engine.check_integrity()
    return llm.engine.cache.leases


def process(llm: LLM) -> int:
    return os.getpid()


def end(llm: LLM) -> None:
    os._exit(3)


class Only:
    """A mask that lets one token through; it is sent to the other process."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, tokens: list[int]) -> list[bool]:
        return [id == self.token for id in range(64)]


def test_two_replicas_answer_as_one_and_remember_who_has_what(folder: Path) -> None:
    prompts = [prompt(600 + 20 * i, i) for i in range(6)]
    expected = [alone(small_model(), start, 8) for start in prompts]

    async def main() -> None:
        async with Replicas(folder, CONFIG, 2, device="cpu") as llm:
            assert len(set(await llm.call(process))) == 2
            answers = await asyncio.gather(*(llm.generate(start, GREEDY) for start in prompts))
            assert [answer.tokens for answer in answers] == expected
            used = [len(load.known) for load in llm.router.loads]
            assert used == [3, 3]  # one key each
            again = await asyncio.gather(*(llm.generate([*start, 5], GREEDY) for start in prompts))
            assert all(answer.cached >= UNIT for answer in again)
            masked = await llm.generate(prompts[0], GREEDY, mask=Only(7))
            assert masked.tokens == [7] * 8
            with pytest.raises(Error, match="sent to another process"):
                await llm.generate(prompts[0], GREEDY, mask=lambda tokens: None)
            with pytest.raises(Error, match="tokens holds id 64"):
                await llm.generate([64], GREEDY)
            leaver = llm.stream(prompts[1], Params(max_tokens=2000, temperature=0))
            async for delta in leaver:
                if delta.output.tokens:
                    break
            await leaver.aclose()
            slow = asyncio.create_task(llm.generate(prompts[2], Params(max_tokens=2000, temperature=0)))
            await asyncio.sleep(0.05)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            for _ in range(200):
                if await llm.call(leases) == [0, 0]:
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("an aborted request runs on")
            assert [(load.work, load.running) for load in llm.router.loads] == [(0, set())] * 2
            with pytest.raises(ZeroDivisionError):
                await llm.call(fails)
        with pytest.raises(Error, match="drained"):
            await llm.generate(prompts[0], GREEDY)

    run(main())


def fails(llm: LLM) -> float:
    return 1 / 0


def test_a_replica_that_ends_fails_its_requests_and_the_other_goes_on(folder: Path) -> None:
    async def main() -> None:
        llm = Replicas(folder, CONFIG, 2, device="cpu")
        running = [
            asyncio.create_task(llm.generate(prompt(600, i), Params(max_tokens=60, temperature=0))) for i in (0, 1)
        ]
        await asyncio.sleep(0.1)
        llm._processes[1].kill()
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert sum(isinstance(one, Error) and "replica 1 has ended" in str(one) for one in ends) == 1
        answers = await asyncio.gather(*(llm.generate(prompt(40, i), GREEDY) for i in range(4)))
        assert [answer.tokens for answer in answers] == [alone(small_model(), prompt(40, i), 8) for i in range(4)]
        with pytest.raises(Error, match="replica 0 has ended"):
            await llm.call(end)
        with pytest.raises(Error, match="no replica is left"):
            await llm.generate(prompt(40, 0), GREEDY)
        await llm.drain(1)

    run(main())


def test_drain_lets_requests_end(folder: Path) -> None:
    async def main() -> None:
        llm = Replicas(folder, CONFIG, 1, device="cpu")
        stream = llm.stream(prompt(40, 0), Params(max_tokens=40, temperature=0))
        await anext(stream)
        done = asyncio.create_task(llm.drain())
        last = None
        async for delta in stream:
            last = delta.answer
        assert last is not None
        assert (last.finished, len(last.tokens)) == ("length", 40)
        await done
        assert llm._processes[0].returncode == 0

    run(main())


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(Error):
        Replicas(tmp_path, CONFIG, 1, device="cpu")
    with pytest.raises(Error, match="one page needs"):
        Replicas(folder, EngineConfig(10, slots=4), 1, device="cpu")
    with pytest.raises(Error, match="count is 0"):
        Replicas(folder, CONFIG, 0)


def test_the_router_weighs_prefixes_against_queues() -> None:
    router = Router(2)
    text = list(range(10 * UNIT))
    assert router.choose(0, text) == 0
    assert router.choose(1, [7] * UNIT) == 1  # the first is busy
    assert router.choose(2, [*text, 1, 2]) == 0  # its prefix is worth the wait: 10 units are left to wait for
    router.began(0, 0)
    router.began(0, 2)
    assert router.loads[0].work == 2 * RUNNING
    assert router.choose(3, [*text, 1, 3]) == 0
    assert router.choose(4, text, salt="another") == 1  # nobody's: the shorter queue
    for request in range(5):
        for engine in (0, 1):
            router.ended(engine, request)
    assert [load.work for load in router.loads] == [0, 0]
    router.loads[0].alive = False
    assert router.choose(5, text) == 1
    router.loads[1].alive = False
    assert router.choose(6, text) is None
