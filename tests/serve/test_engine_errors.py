"""What an engine says of itself has a type of its own, whatever the words; the server makes a status of it."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from engines import prompt, small_model

from perilune import Error
from perilune.serve import LLM, AsyncLLM, EngineConfig, EngineError, Params
from perilune.serve.server.errors import refusal

CONFIG = EngineConfig(4_000_000, slots=4, token_budget=1024, exact=True)


@pytest.mark.parametrize(("kind", "status"), [("draining", 503), ("unavailable", 503), ("failed", 500)])
def test_the_kind_decides_the_status_and_words_do_not(kind: str, status: int) -> None:
    error = EngineError("max_tokens is odd today", kind)  # type: ignore[arg-type]
    assert isinstance(error, Error)
    answer = refusal(error)
    assert (answer.status, answer.message, answer.param) == (status, "max_tokens is odd today", None)
    assert ("Retry-After" in answer.headers) == (status == 503)
    for text in ("the engine has failed", "the engine sleeps", "replica 1 has ended", "no replica is left"):
        assert refusal(Error(text)).status == 400


def test_it_goes_through_a_pipe_whole() -> None:
    again = pickle.loads(pickle.dumps(EngineError("it sleeps", "unavailable")))
    assert (type(again), str(again), again.kind) == (EngineError, "it sleeps", "unavailable")


def kind_of(error: pytest.ExceptionInfo[EngineError]) -> str:
    return error.value.kind


def test_an_engine_that_sleeps_or_pauses_is_unavailable() -> None:
    llm = LLM(small_model(), CONFIG)
    llm.sleep(1)
    for call in (lambda: llm.generate([[1, 2]]), lambda: llm.update_weights([], 1)):
        with pytest.raises(EngineError) as error:
            call()
        assert kind_of(error) == "unavailable"
    llm.wake()
    llm.pause()
    with pytest.raises(EngineError) as error:
        llm.generate([[1, 2]])
    assert kind_of(error) == "unavailable"
    llm.resume()
    assert llm.failure is None
    # A request that is wrong stays an Error that names its field.
    with pytest.raises(Error, match="tokens holds id 64") as wrong:
        llm.generate([[64]])
    assert not isinstance(wrong.value, EngineError)


def test_a_drained_engine_says_so() -> None:
    async def main() -> None:
        llm = AsyncLLM(LLM(small_model(), CONFIG))
        await llm.drain()
        with pytest.raises(EngineError) as error:
            await llm.generate(prompt(10, 0), Params(max_tokens=2))
        assert kind_of(error) == "draining"

    asyncio.run(asyncio.wait_for(main(), 60))
