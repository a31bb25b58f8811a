"""The engine in its own thread under asyncio: the answers of `LLM.generate`, aborts, errors, control, the end."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from engines import alone, prompt, small_model

from perilune import Error
from perilune.serve import LLM, Answer, AsyncLLM, Delta, EngineConfig, EngineError, Params

CONFIG = EngineConfig(4_000_000, slots=4, token_budget=128, exact=True)
GREEDY = Params(max_tokens=8, temperature=0)
LONG = Params(max_tokens=4000, temperature=0)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main, 60)

    return asyncio.run(bounded())


def llm_of(**options: Any) -> LLM:
    return LLM(small_model(), EngineConfig(4_000_000, **{"slots": 4, "token_budget": 128, "exact": True} | options))


async def untouched(llm: AsyncLLM) -> None:
    """Nothing runs, is leased or queued."""

    def look(inner: LLM) -> None:
        inner.engine.check_integrity()
        assert inner.engine.cache.leases == 0
        assert len(inner.engine.scheduler.slots) == inner.engine.config.slots
        assert not list(inner.engine.scheduler.requests())

    await llm.call(look)


def test_deltas_join_to_the_answers_of_one_call() -> None:
    prompts = [prompt(30 + 17 * i, i) for i in range(9)]
    expected = [alone(small_model(), start, 8) for start in prompts]

    async def main() -> None:
        async with AsyncLLM(llm_of()) as llm:

            async def one(start: list[int]) -> list[Delta]:
                return [delta async for delta in llm.stream(start, GREEDY)]

            for start, tokens, deltas in zip(prompts, expected, await asyncio.gather(*map(one, prompts)), strict=True):
                assert (deltas[0].output.tokens, deltas[0].output.finished) == ([], None)
                assert [token for delta in deltas for token in delta.output.tokens] == tokens
                assert [delta.answer is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
                answer = deltas[-1].answer
                assert answer is not None
                assert (answer.prompt, answer.tokens, answer.finished) == (start, tokens, "length")
            again = await llm.generate([*prompts[8], 5], GREEDY)
            assert again.cached == 128
            await untouched(llm)

    run(main())


def test_whoever_leaves_aborts_its_request_and_no_other() -> None:
    expected = alone(small_model(), prompt(40, 0), 60)

    async def main() -> None:
        async with AsyncLLM(llm_of()) as llm:
            stays = asyncio.create_task(llm.generate(prompt(40, 0), Params(max_tokens=60, temperature=0)))
            early = asyncio.create_task(llm.generate(prompt(40, 1), LONG))
            await asyncio.sleep(0)  # sent, perhaps not yet accepted
            early.cancel()
            cancelled = asyncio.create_task(llm.generate(prompt(40, 2), LONG))
            leaver = llm.stream(prompt(40, 3), LONG)
            async for delta in leaver:
                if delta.output.tokens:
                    break
            await leaver.aclose()
            cancelled.cancel()
            for task in (early, cancelled):
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await stays).tokens == expected
            await untouched(llm)

    run(main())


def test_wrong_requests_are_refused_before_the_first_delta() -> None:
    async def main() -> None:
        async with AsyncLLM(llm_of()) as llm:
            for bad, options in (([], {}), ([64], {}), ("text", {}), ([1], {"salt": "a", "deadline": float("nan")})):
                with pytest.raises(Error, match=r"tokens|tokenizer|deadline"):
                    await anext(llm.stream(bad, GREEDY, **options))
            with pytest.raises(TypeError):
                await anext(llm.stream([1], GREEDY, nonsense=1))
            await untouched(llm)

    run(main())


def test_what_a_step_raises_ends_its_requests_with_an_error_and_the_next_are_served() -> None:
    async def main() -> None:
        inner = llm_of()
        forward, broken = inner.engine.runner.forward, [True]

        def fails(*args: Any) -> torch.Tensor:
            if broken[0]:
                raise RuntimeError("on purpose")
            return forward(*args)

        inner.engine.runner.forward = fails  # type: ignore[method-assign]
        async with AsyncLLM(inner) as llm:
            answers = await asyncio.gather(*(llm.generate(prompt(20, i), GREEDY) for i in range(6)))
            assert {answer.finished for answer in answers} == {"error"}
            assert all("on purpose" in (answer.error or "") for answer in answers)
            broken[0] = False
            assert (await llm.generate(prompt(20, 0), GREEDY)).tokens == alone(small_model(), prompt(20, 0), 8)
            await untouched(llm)

    run(main())


def test_an_engine_that_is_lost_says_so_to_all() -> None:
    async def main() -> None:
        inner = llm_of()

        def lost(now: float) -> list[Any]:
            raise RuntimeError("device is gone")

        inner.engine.scheduler.schedule = lost  # type: ignore[method-assign]
        llm = AsyncLLM(inner)
        for task in [asyncio.create_task(llm.generate(prompt(20, i), GREEDY)) for i in range(3)]:
            with pytest.raises(Error, match="device is gone"):
                await task
        await llm.drain(5)

    run(main())


def test_drain_lets_what_runs_end_and_takes_nothing_new() -> None:
    async def main() -> None:
        llm = AsyncLLM(llm_of())
        running = llm.stream(prompt(30, 0), Params(max_tokens=50, temperature=0))
        await anext(running)
        end = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        with pytest.raises(Error, match="drained"):
            await llm.generate(prompt(30, 1), GREEDY)
        deltas = [delta async for delta in running]
        assert deltas[-1].answer is not None
        assert (deltas[-1].answer.finished, len(deltas[-1].answer.tokens)) == ("length", 50)
        await end
        with pytest.raises(Error, match="drained"):
            await llm.call(lambda inner: inner.engine.busy)
        await llm.drain()  # twice is no harm

    run(main())


@pytest.mark.parametrize("asleep", [False, True])
def test_drain_ends_the_slow_after_its_time_even_where_no_step_can(asleep: bool) -> None:
    async def main() -> None:
        llm = AsyncLLM(llm_of())
        slow = asyncio.create_task(llm.generate(prompt(30, 0), LONG))
        while not await llm.call(lambda inner: inner.engine.counters.decode):
            await asyncio.sleep(0)
        if asleep:
            await llm.call(lambda inner: inner.pause())
        await llm.drain(0.05)
        if asleep:
            with pytest.raises(Error, match="could not step"):
                await slow
        else:
            assert (await slow).finished == "abort"

    run(main())


def test_control_happens_between_steps_and_its_errors_come_back() -> None:
    async def main() -> None:
        inner = llm_of()
        weights = {name: value.clone() for name, value in inner.engine.model.state_dict().items()}
        async with AsyncLLM(inner) as llm:
            running = asyncio.create_task(llm.generate(prompt(30, 0), Params(max_tokens=120, temperature=0)))
            while not await llm.call(lambda inner: inner.engine.counters.decode):
                await asyncio.sleep(0)
            await llm.call(lambda inner: inner.pause())
            with pytest.raises(Error, match="version"):
                await llm.call(lambda inner: inner.update_weights([], 0))
            assert await llm.call(lambda inner: inner.update_weights(weights.items(), 1)) == len(weights)
            made = await llm.call(lambda inner: inner.engine.counters.decode)
            for _ in range(3):  # the thread comes by the engine, and leaves it alone
                assert await llm.call(lambda inner: inner.engine.counters.decode) == made
            assert not running.done()
            await llm.call(lambda inner: inner.resume())
            answer = await running
            assert set(answer.versions) == {0, 1}
            assert answer.versions == sorted(answer.versions)
            assert (await llm.generate(prompt(30, 0), GREEDY)).versions == [1] * 8

    run(main())


def test_holds_without_an_end_fail_the_requests_they_starve() -> None:
    async def main() -> None:
        inner = llm_of()
        size = inner.engine.cache.geometry.page_bytes
        inner = LLM(small_model(), EngineConfig(20 * size, slots=4, token_budget=128, exact=True, watermark=0.0))
        async with AsyncLLM(inner) as llm:
            held = await llm.generate(prompt(400, 0), GREEDY, hold=float("inf"))
            assert held.hold is not None
            starved = await llm.generate(prompt(1000, 1), GREEDY)
            assert starved.finished == "error"
            assert "holds" in (starved.error or "")
            hold = held.hold
            await llm.call(lambda inner: inner.release(hold))
            assert (await llm.generate(prompt(1000, 1), GREEDY)).finished == "length"

    run(main())


def test_deadlines_pass_while_others_run() -> None:
    async def main() -> None:
        async with AsyncLLM(llm_of(slots=1, token_budget=65)) as llm:
            first = asyncio.create_task(llm.generate(prompt(30, 0), Params(max_tokens=100, temperature=0)))
            await asyncio.sleep(0)
            late = await llm.generate(prompt(30, 1), LONG, deadline=0.0)
            assert (late.finished, late.tokens) == ("deadline", [])
            assert (await first).finished == "length"

    run(main())


def test_random_clients_never_lose_a_request() -> None:
    """Answers, aborts and errors at random times from many tasks: each hears its end, and memory is as before."""
    expected = {seed: alone(small_model(), prompt(20 + 9 * seed, seed), 12) for seed in range(8)}

    async def client(llm: AsyncLLM, dice: random.Random) -> str:
        seed = dice.randrange(8)
        stream = llm.stream(
            prompt(20 + 9 * seed, seed), Params(max_tokens=12, temperature=0), priority=dice.randrange(3)
        )
        patience = dice.choice([0, 1, 3, 99, 99])
        for _ in range(dice.randrange(40)):
            await asyncio.sleep(0)
        answer: Answer | None = None
        async for delta in stream:
            patience -= 1
            if patience < 0:
                await stream.aclose()
                return "left"
            answer = delta.answer
        assert answer is not None
        assert answer.tokens == expected[seed]
        return answer.finished

    async def main() -> None:
        async with AsyncLLM(llm_of()) as llm:
            ends = await asyncio.gather(*(client(llm, random.Random(i)) for i in range(80)))
            assert set(ends) == {"left", "length"}
            await untouched(llm)

    run(main())


def test_a_loop_that_was_closed_is_no_end_of_the_engine() -> None:
    """The client of another loop called, ran out of patience, and its loop is gone when the result comes."""
    llm, inside, go = AsyncLLM(llm_of()), threading.Event(), threading.Event()

    def slow(inner: LLM) -> None:
        inside.set()
        assert go.wait(30)

    async def impatient() -> None:
        call = asyncio.create_task(llm.call(slow))
        stream = asyncio.create_task(llm.generate(prompt(20, 0), LONG))
        while not inside.is_set():
            await asyncio.sleep(0)
        del call, stream

    run(impatient())
    go.set()

    async def other() -> None:
        assert (await llm.generate(prompt(20, 1), GREEDY)).finished == "length"
        while await llm.call(lambda inner: list(inner.engine.scheduler.requests())):
            await asyncio.sleep(0)  # the lost one is aborted
        await untouched(llm)
        await llm.drain()

    run(other())


def test_what_a_call_raises_comes_back_whatever_it_is() -> None:
    async def main() -> None:
        async with AsyncLLM(llm_of()) as llm:
            for error, raised in (
                (StopIteration(3), RuntimeError),
                (KeyError(3), KeyError),
                (queue.Empty(), queue.Empty),
            ):

                def fails(inner: LLM, error: Exception = error) -> None:
                    raise error

                with pytest.raises(raised):
                    await llm.call(fails)
            assert (await llm.generate(prompt(20, 1), GREEDY)).finished == "length"

    run(main())


def test_a_drain_ends_when_all_have_left_an_engine_that_cannot_step() -> None:
    async def main() -> None:
        llm = AsyncLLM(llm_of())
        leaver = llm.stream(prompt(30, 0), LONG)
        await anext(leaver)
        await llm.call(lambda inner: inner.pause())
        drained = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        await leaver.aclose()
        await drained

    run(main())


@pytest.mark.parametrize("drained", [True, False])
def test_a_thread_that_never_comes_back_is_given_up_and_all_are_told(
    drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a rank that is gone while the engine waits for it: those whom it never heard wait as well."""
    monkeypatch.setattr("perilune.serve.async_llm._LOST", 0.0)
    inner, inside, go = llm_of(), threading.Event(), threading.Event()

    def stuck(inner: LLM) -> None:
        inside.set()
        assert go.wait(30)

    async def main() -> None:
        llm = AsyncLLM(inner)
        running = llm.stream(prompt(30, 0), LONG)
        await anext(running)
        waiting: list[Any] = [llm.call(stuck), anext(aiter(llm.stream(prompt(30, 1), LONG))), llm.call(leased)]
        tasks = [asyncio.ensure_future(one) for one in waiting]
        while not inside.is_set():
            await asyncio.sleep(0)
        monkeypatch.setattr(LLM, "failure", "a rank has ended")
        if drained:
            await llm.drain()

        async def rest() -> None:
            async for _ in running:
                pass

        for one in (*tasks, rest(), llm.generate(prompt(30, 2), GREEDY), llm.call(leased)):
            with pytest.raises(EngineError, match="a rank has ended") as error:
                await one
            assert error.value.kind == "failed"
        await llm.drain()
        go.set()
        llm._thread.join(30)  # it has come back after all, and ends
        assert not llm._thread.is_alive()

    run(main())


def test_an_engine_that_fails_with_nothing_to_do_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.serve.async_llm._LOST", 0.0)

    async def main() -> None:
        llm = AsyncLLM(llm_of())
        await llm.generate(prompt(30, 0), GREEDY)
        monkeypatch.setattr(LLM, "failure", "a rank has ended")
        while llm._thread.is_alive():
            await asyncio.sleep(0.01)
        for one in (llm.generate(prompt(30, 2), GREEDY), llm.call(leased)):
            with pytest.raises(EngineError, match="a rank has ended") as error:
                await one
            assert error.value.kind == "failed"
        await llm.drain()

    run(main())


class Failing(LLM):
    """Steps raise once `reason` is set, as those of an engine whose rank has ended."""

    reason: str | None = None

    @property
    def failure(self) -> str | None:
        return self.reason

    def step(self) -> Any:
        if self.reason is not None:
            raise EngineError(self.reason, "failed")
        return super().step()


def failing() -> Failing:
    return Failing(small_model(), EngineConfig(4_000_000, slots=4, token_budget=128, exact=True))


class Gate:
    """A function that waits inside until `go`."""

    def __init__(self, function: Any) -> None:
        self.function, self.inside, self.go = function, threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.inside.set()
        assert self.go.wait(20)
        return self.function(*args, **kwargs)

    async def entered(self) -> None:
        while not self.inside.is_set():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("between", [False, True], ids=["after it was given up", "while it is given up"])
def test_a_request_that_is_added_too_late_is_told_and_the_thread_ends(
    between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread adds it when all who wait have been told already; as the engine is paused, no step ever says so."""
    monkeypatch.setattr("perilune.serve.async_llm._LOST", 0.0)

    async def main() -> None:
        inner = failing()
        llm = AsyncLLM(inner)
        await llm.call(lambda inner: inner.pause())
        inner.add = gate = Gate(inner.add)  # type: ignore[method-assign]
        lose = llm._lose

        def lost(failure: str) -> None:
            lose(failure)
            gate.go.set()
            while llm._obeyed is not None:
                time.sleep(0.001)

        if between:
            llm._lose = lost  # type: ignore[method-assign]
        waits = asyncio.create_task(llm.generate(prompt(9, 0), LONG))
        await gate.entered()
        inner.reason = "a rank has ended"
        await llm.drain()
        with pytest.raises(EngineError, match="a rank has ended") as error:
            await waits
        assert error.value.kind == "failed"
        gate.go.set()
        llm._thread.join(20)
        assert not llm._thread.is_alive()

    run(main())


def test_the_reason_stays_when_tickets_go_under_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.serve.async_llm._LOST", 0.0)

    async def main() -> None:
        inner = failing()
        llm = AsyncLLM(inner)
        for i in range(2):
            await anext(llm.stream(prompt(9, i), LONG))
        inner.abort = gate = Gate(inner.abort)  # type: ignore[method-assign]
        drained = asyncio.create_task(llm.drain(0))
        await gate.entered()
        inner.reason = "a rank has ended"
        await drained
        gate.go.set()
        llm._thread.join(20)
        assert not llm._thread.is_alive()
        assert llm.failure == "a rank has ended"

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_is_told_to_all() -> None:
    async def main() -> None:
        llm = AsyncLLM(llm_of())
        running = llm.stream(prompt(30, 0), LONG)
        await anext(running)

        def broken() -> None:
            raise RuntimeError("on purpose")

        llm._step = broken  # type: ignore[method-assign]

        async def rest() -> None:
            async for _ in running:
                pass

        for one in (rest(), llm.generate(prompt(30, 2), GREEDY), llm.call(leased)):
            with pytest.raises(EngineError, match=r"thread has ended.*on purpose"):
                await one
        assert "on purpose" in str(llm.failure)
        await llm.drain()

    run(main())


def leased(inner: LLM) -> int:
    return inner.engine.cache.leases
