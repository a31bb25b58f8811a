"""Two engines behind one queue: the tokens of one, requests where their prefix is, what ends takes its own with it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import alone, prompt, small_model

from perilune import Error
from perilune.model import save
from perilune.serve import LLM, EngineConfig, EngineError, Params, Replicas, processes
from perilune.serve.router import RUNNING, UNIT, Router

pytestmark = pytest.mark.timeout(300)
CONFIG = EngineConfig(4_000_000, slots=4, token_budget=1024, exact=True)
GREEDY = Params(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save(small_model(), path)
    return path


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main, 240)

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
    (one,) = LLM(small_model(), CONFIG).generate([prompts[0]], dataclasses.replace(GREEDY, routing=True))
    whole = one.routing
    assert whole is not None

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
            while await llm.call(leases) == [0, 0]:  # the leaver's or its own
                await asyncio.sleep(0.01)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            while await llm.call(leases) != [0, 0]:  # an aborted request that runs on does so until the time limit
                await asyncio.sleep(0.01)
            assert [(load.work, load.running) for load in llm.router.loads] == [(0, set())] * 2
            with pytest.raises(ZeroDivisionError):
                await llm.call(fails)
            with pytest.raises(Error, match="Refusal: no, never"):
                await llm.call(refuses)
            routed = await llm.generate(torch.tensor(prompts[0]), dataclasses.replace(GREEDY, routing=True))  # type: ignore[arg-type]
            assert routed.tokens == expected[0]
            assert routed.routing is not None
            assert torch.equal(routed.routing, whole[routed.computed_from :])
        with pytest.raises(Error, match="drained"):
            await llm.generate(prompts[0], GREEDY)

    run(main())


def fails(llm: LLM) -> float:
    return 1 / 0


class Refusal(Exception):  # noqa: N818 - of a client
    def __init__(self, what: str, how_long: str) -> None:
        super().__init__(f"{what}, {how_long}")


def refuses(llm: LLM) -> None:
    raise Refusal("no", "never")


def test_a_replica_that_ends_fails_its_requests_and_the_other_goes_on(folder: Path) -> None:
    async def main() -> None:
        llm = Replicas(folder, CONFIG, 2, device="cpu")
        long = Params(max_tokens=1500, temperature=0)
        running = [asyncio.create_task(llm.generate(prompt(600, i), long)) for i in (0, 1)]
        while await llm.call(leases) != [1, 1]:
            await asyncio.sleep(0.01)
        llm._processes[1].kill()
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        running[0].cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert isinstance(ends[1], Error)
        assert "replica 1 has ended" in str(ends[1])
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


def instead(monkeypatch: pytest.MonkeyPatch, replica: Callable[[Connection], None]) -> list[processes.Process]:
    """Replicas that are threads of this process, each beside a process that does nothing until it is ended."""
    started = list[processes.Process]()

    def start(module: str) -> tuple[processes.Process, Connection]:
        mine, theirs = Pipe()
        threading.Thread(target=replica, args=(theirs,), daemon=True).start()
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1], mine

    monkeypatch.setattr(processes, "start", start)
    return started


def garbled(pipe: Connection) -> None:
    """The first call and the first request get what cannot be read; a later call, the kinds of all that came."""
    pipe.recv()
    pipe.send(None)
    heard = list[str]()
    while True:
        kind, id, _ = pipe.recv()
        heard.append(kind)
        if heard.count(kind) == 1 and kind != "abort":
            lost = pickle.dumps(Only(1)).replace(b"Only", b"Lost")
            pipe.send([("delta" if kind == "add" else "result", id, lost)])
        elif kind == "call":
            pipe.send([("result", id, pickle.dumps(heard))])


def test_what_cannot_be_read_is_an_error_of_its_own_and_the_others_are_heard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = instead(monkeypatch, garbled)

    async def main() -> None:
        llm = Replicas(folder, CONFIG, 1, device="cpu")
        with pytest.raises(Error, match="cannot be read"):
            await llm.call(process)
        with pytest.raises(Error, match="cannot be read"):
            await llm.generate(prompt(10, 0), GREEDY)
        with pytest.raises(Error, match="call cannot be sent"):
            await llm.call(lambda _: None)
        # The request that nobody reads any more is aborted; nothing of the others is kept.
        assert await llm.call(process) == [["call", "add", "abort", "call"]]
        assert (llm._tickets, llm._results, llm.router.loads[0].work) == ([{}], [{}], 0)

    run(main())
    processes.end(started[0], 0)


def once(pipe: Connection) -> None:
    """Ends with the first thing that it hears."""
    pipe.recv()
    pipe.send(None)
    pipe.recv()
    pipe.close()


@pytest.mark.parametrize("what", ["call", "generate"])
def test_all_who_wait_for_a_replica_that_ends_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    started = instead(monkeypatch, once)

    async def main() -> None:
        llm = Replicas(folder, CONFIG, 1, device="cpu")
        for match in ("replica 0 has ended", "no replica is left"):
            with pytest.raises(EngineError, match=match) as error:
                await (llm.call(process) if what == "call" else llm.generate(prompt(10, 0), GREEDY))
            assert error.value.kind == "unavailable"
        assert (llm._tickets, llm._results) == ([{}], [{}])

    run(main())
    processes.end(started[0], 0)


@pytest.mark.parametrize("hears", [0, 1])
def test_a_replica_that_ends_before_it_is_ready_is_told_and_none_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hears: int
) -> None:
    def ends(pipe: Connection) -> None:
        for _ in range(hears):
            pipe.recv()
        pipe.close()

    started = instead(monkeypatch, ends)
    with pytest.raises(Error, match="its own output says why"):
        Replicas(folder, CONFIG, 2, device="cpu")
    assert [process.returncode is not None for process in started] == [True, True]


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
