"""Wrong parameters, callbacks and models that raise, abandoned iterators, threads: told before work begins, or the end
of the requests concerned and of nothing else."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines import GREEDY, alone, join, make, prompt, run, serve, small_model
from test_control import twin, weights_of

from perilune import Error
from perilune.serve import LLM, Engine, EngineConfig, Output, Params
from perilune.serve.cache import Placement
from perilune.serve.control import sleep, update_weights, wake

NAN, INF = float("nan"), float("inf")


def llm_of(exact: bool = False, **options: Any) -> LLM:
    """An LLM on an engine with poisoned memory."""
    model = small_model()
    llm = LLM(model, EngineConfig(10**6))
    llm.engine = make(model, exact, **options)
    return llm


def untouched(engine: Engine) -> None:
    """Nothing is queued, running, leased or waiting to be told."""
    engine.check_integrity()
    assert not engine.busy
    assert engine.cache.leases == 0
    assert len(engine.scheduler.slots) == engine.config.slots


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", x) for x in (NAN, INF, -1.0, 1e-320, "hot", None)),
        *(("top_p", x) for x in (0.0, 1.5, NAN, "all")),
        *(("min_p", x) for x in (0.0, NAN)),
        *(("top_k", x) for x in (0, -1, 2.5)),
        *(("max_tokens", x) for x in (0, -1, 2.5, None, "3")),
        *(("min_tokens", x) for x in (-1, 99, 0.5)),
        *(("repetition_penalty", x) for x in (0.0, NAN, INF, 1e-320)),
        *(("presence_penalty", x) for x in (NAN, INF, "much")),
        *(("frequency_penalty", x) for x in (NAN, -INF)),
        *(("logit_bias", x) for x in ({5: NAN}, {5: INF}, {5: 1e300}, {"5": 1.0}, {64: 1.0}, {-1: 1.0}, {1.5: 1.0})),
        *(("stop_ids", x) for x in (5, ["a"], [64], [-1], [1.5])),
        *(("logprobs", x) for x in (-1, 1.5)),
        *(("seed", x) for x in ("a", 1.5)),
        *(("deadline", x) for x in (NAN,)),
        *(("hold", x) for x in (NAN, -1.0)),
        ("stop", "abc"),
        ("remote", True),
    ],
)
def test_a_wrong_parameter_is_named_and_leaves_nothing_behind(field: str, value: Any) -> None:
    llm = llm_of()
    with pytest.raises(Error, match=field):
        llm.generate([prompt(20, 0), prompt(30, 1)], **{"max_tokens": 4, field: value})
    untouched(llm.engine)


@pytest.mark.parametrize("bad", [[], [1.5], ["a"], [-1], [64], None, 5, [1] * 100_000, torch.tensor([0.5])])
def test_a_wrong_prompt_takes_the_whole_call_back(bad: Any) -> None:
    llm = llm_of()
    with pytest.raises(Error, match=r"prompt|tokens"):
        llm.generate([prompt(20, 0), bad], max_tokens=4)
    llm.step()  # forgets what was queued before the wrong one
    untouched(llm.engine)
    assert llm.step() == ([], [])


def test_extreme_parameters_that_are_allowed_still_draw() -> None:
    llm = llm_of()
    ban = dict.fromkeys(range(63), -INF)
    for extreme in (
        {"temperature": 1e-6, "logit_bias": {5: 1e6, 6: -1e6}, "repetition_penalty": 1e-3},
        {"temperature": 1e6, "logit_bias": ban},
        {"temperature": 1e6, "repetition_penalty": 1e3, "top_p": 1e-9, "min_p": 1.0, "top_k": 10**9},
    ):
        answers = llm.generate([prompt(20, 0), prompt(30, 1)], max_tokens=4, logprobs=2, **extreme)
        for answer in answers:
            assert (answer.finished, len(answer.tokens)) == ("length", 4)
        if extreme.get("logit_bias") is ban:
            assert answers[0].tokens == [63] * 4
    (stuck,) = llm.generate([prompt(20, 0)], logit_bias=ban | {63: -INF})
    assert (stuck.finished, stuck.tokens) == ("error", [])
    untouched(llm.engine)


@pytest.mark.parametrize("field", ["arena_bytes", "slots", "token_budget", "page_tokens", "host_bytes", "drafts"])
def test_sizes_are_integers(field: str) -> None:
    with pytest.raises(Error, match=f"engine.{field} is 5000000.0; must be an integer"):
        EngineConfig(**{"arena_bytes": 10**7, field: 5e6})  # type: ignore[arg-type]


# --- what raises inside a step


def fails_at(engine: Engine, calls: set[int], error: type[BaseException], where: str) -> None:
    """Make a method of the runner raise at these calls, after it has done its work."""
    real, count = getattr(engine.runner, where), iter(range(10**9))

    def call(*args: Any) -> Any:
        result = real(*args)
        if next(count) in calls:
            raise error("on purpose")
        return result

    setattr(engine.runner, where, call)


@pytest.mark.parametrize("where", ["forward", "head", "accept", "save", "load"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_a_step_that_breaks_off_never_leaves_a_state_to_go_on_from(exact: bool, drafts: int, where: str) -> None:
    """KDA states advance in place: a step that raised and was made again would have computed its tokens twice."""
    model = small_model()
    engine = make(model, exact, drafts=drafts, placement=Placement(min_turn=1))
    prompts = [[3, 4, 5, 6] * 20, prompt(150, 0), prompt(30, 1)]
    expected = [alone(model, start, 12, exact) for start in prompts]
    for call, error in ((0, RuntimeError), (2, KeyboardInterrupt), (5, RuntimeError)):
        fails_at(engine, {call}, error, where)
        ids = [engine.add(start, Params(max_tokens=12, temperature=0)) for start in prompts]
        outputs: dict[int, Output] = {}
        raised = 0
        while engine.busy:
            try:
                for output in engine.step():
                    join(outputs, output)
            except error:
                raised += 1
            engine.check_integrity()
        assert raised <= 1
        for id, right in zip(ids, expected, strict=True):
            mine = outputs[id]
            assert mine.tokens == right[: len(mine.tokens)]
            assert mine.finished == "length" or (mine.finished == "error" and "on purpose" in str(mine.error))
        assert raised or all(outputs[id].finished == "length" for id in ids)
        assert raised or where in ("save", "load", "accept")
        vars(engine.runner).pop(where)
    for start, right in zip(prompts, expected, strict=True):
        (output,) = serve(engine, [start], Params(max_tokens=12, temperature=0))
        assert output.tokens == right  # with whatever the broken steps left in the cache


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_callback_that_raises_ends_its_own_request(drafts: int) -> None:
    model = small_model()
    engine = make(model, drafts=drafts)
    good = engine.add(prompt(90, 0), GREEDY)
    wrong: list[tuple[str, Any]] = [
        ("stop", lambda token: 1 / 0),
        ("mask", lambda tokens: [True] * 3),
        ("mask", lambda tokens: [1] * 64),  # integers would pick rows instead of hiding them
        ("mask", lambda tokens: engine.step()),
    ]
    bad = [engine.add([3, 4, 5] * 9, GREEDY, **{name: value}) for name, value in wrong]
    outputs = run(engine)
    assert outputs[good].tokens == alone(model, prompt(90, 0), 8)
    said = ["stop failed: ZeroDivisionError", "must be torch.bool", "must be torch.bool", "a step of this engine"]
    for id, text in zip(bad, said, strict=True):
        assert outputs[id].finished == "error"
        assert text in str(outputs[id].error)
    untouched(engine)


@pytest.mark.parametrize("exact", [True, False])
def test_one_request_without_numbers_leaves_the_others_alone(exact: bool) -> None:
    """A token whose embedding is NaN, beside other requests; then its slot and pages serve others."""
    model = twin(small_model())
    starts = [[t % 50 for t in prompt(n, n)] for n in (70, 130, 40)]
    expected = [alone(model, start, 8, exact) for start in starts]
    broken = next(token for token in range(50, 64) if not any(token in tokens for tokens in expected))
    model.embed.weight.data[broken] = NAN
    engine = make(model, exact, slots=4)
    for bad in ([broken], [*starts[1][:100], broken, *starts[1][:80]], [*starts[1], broken]):
        ids = [engine.add(start, GREEDY) for start in (bad, *starts)]
        outputs = run(engine)
        assert (outputs[ids[0]].finished, outputs[ids[0]].error) == ("error", "logits are not finite numbers")
        assert [outputs[id].tokens for id in ids[1:]] == expected
    untouched(engine)


# --- iterators, threads, ends


def test_streams_side_by_side_lose_nothing() -> None:
    llm = llm_of()
    options = {"temperature": 0}
    lengths = (20, 5, 11)
    streams = [llm.stream(prompt(10, i), max_tokens=n, **options) for i, n in enumerate(lengths)]
    tokens: list[list[int]] = [list(next(stream)[1].tokens) for stream in streams]
    ends = []
    for mine, stream in zip(tokens, streams, strict=True):  # the first one's steps end the others
        for _, output in stream:
            mine += output.tokens
        ends.append(output.finished)
    assert tokens == [alone(small_model(), prompt(10, i), n, False) for i, n in enumerate(lengths)]
    assert ends == ["length"] * 3
    assert llm.step() == ([], [])
    untouched(llm.engine)


@pytest.mark.parametrize("way", ["close", "collect", "inside a step", "paused", "raise"])
def test_an_abandoned_stream_leaves_nothing(way: str) -> None:
    llm = llm_of()
    other = llm.add(prompt(100, 1), GREEDY)
    stream: Iterator[Any] | None = llm.stream(prompt(50, 0), max_tokens=500, temperature=0)
    assert stream is not None
    next(stream)
    if way == "close":
        stream.close()  # type: ignore[attr-defined]
    elif way == "collect":
        stream = None
        gc.collect()
    elif way == "inside a step":
        real = llm.engine.runner.forward

        def forward(*args: Any) -> torch.Tensor:
            stream.close()  # type: ignore[union-attr]
            return real(*args)

        llm.engine.runner.forward = forward  # type: ignore[method-assign]
    elif way == "paused":
        llm.pause()
        with pytest.raises(Error, match="paused"):
            next(stream)
        llm.resume()
    else:
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError())  # type: ignore[attr-defined]
    tokens: list[int] = []
    while llm.engine.busy or llm._kept[0]:
        pieces, _ = llm.step()
        assert {output.id for _, output in pieces} <= {other}
        tokens += [token for _, output in pieces for token in output.tokens]
        llm.engine.check_integrity()
    assert tokens == alone(small_model(), prompt(100, 1), 8, False)
    assert llm.step() == ([], [])
    assert not llm._streams
    untouched(llm.engine)


def test_a_call_that_raises_takes_its_requests_along() -> None:
    llm = llm_of()
    llm.pause()
    with pytest.raises(Error, match="paused"):
        llm.generate([prompt(20, 0)], max_tokens=30)
    llm.resume()
    fails_at(llm.engine, {1}, KeyboardInterrupt, "forward")
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(20, 0), prompt(90, 1)], max_tokens=30)
    (answer,) = llm.generate([prompt(20, 2)], max_tokens=5, temperature=0)
    assert answer.tokens == alone(small_model(), prompt(20, 2), 5, False)
    assert llm.step() == ([], [])
    untouched(llm.engine)


def test_a_step_that_raises_loses_no_piece_of_other_requests() -> None:
    """Pieces that another call's steps gave are kept for the next step, and after it if it raises."""
    llm = llm_of()
    id = llm.add(prompt(30, 0), Params(max_tokens=3, temperature=0))
    llm.generate([prompt(20, 1)], max_tokens=10)
    fails_at(llm.engine, {0}, RuntimeError, "forward")
    llm.add(prompt(20, 2))
    with pytest.raises(RuntimeError, match="on purpose"):
        llm.step()
    llm.sleep()
    with pytest.raises(Error, match="sleeps"):
        llm.step()
    llm.wake()
    pieces, finished = llm.step()
    tokens = [token for _, output in pieces for token in output.tokens if output.id == id]
    assert tokens == alone(small_model(), prompt(30, 0), 3, False)
    assert sorted((answer.id, answer.finished) for answer in finished) == [(id, "length"), (id + 2, "error")]
    untouched(llm.engine)


def test_a_second_thread_is_told() -> None:
    engine = make(small_model(), exact=False)
    (output,) = serve(engine, [prompt(90, 9)], hold=60.0)
    assert output.hold is not None
    held = engine.held(output.hold, prompt(90, 9) + output.tokens)
    segment = engine.export(held)
    first = engine.add(prompt(60, 0), GREEDY)
    second = engine.add(prompt(60, 1), GREEDY)
    inside, go = threading.Event(), threading.Event()
    real, errors = engine.runner.forward, list[BaseException]()

    def forward(*args: Any) -> torch.Tensor:
        inside.set()
        assert go.wait(30)
        return real(*args)

    engine.runner.forward = forward  # type: ignore[method-assign]
    thread = threading.Thread(target=engine.step)
    thread.start()
    assert inside.wait(30)
    calls: list[Callable[[], Any]] = [
        engine.step,
        lambda: engine.add([1], GREEDY),
        lambda: update_weights(engine, weights_of(1).items(), 1),
        lambda: sleep(engine),
        lambda: engine.hold(prompt(60, 0), 1.0),
        lambda: engine.fork(held, 2),
        lambda: engine.release(held),
        lambda: engine.export(held),
        lambda: engine.put(segment),
        lambda: engine.delivered(first),
        engine.clear_cache,
    ]
    for call in calls:
        try:
            call()
        except Error as error:
            errors.append(error)
    engine.abort(second)  # the next step does it
    go.set()
    thread.join(30)
    assert [str(error)[:31] for error in errors] == ["a step of this engine is runnin"] * len(calls)
    outputs = run(engine)
    assert outputs[second].finished == "abort"
    assert outputs[first].finished == "length"
    engine.release(held)
    untouched(engine)


@pytest.mark.parametrize("verb", ["sleep", "new weights", "clear"])
def test_an_iterator_may_be_collected_while_the_engine_is_at_work(verb: str) -> None:
    """Garbage is collected wherever memory is asked for: here as soon as a page is freed, in the middle of a verb."""
    engine = make(twin(small_model()), exact=False)
    serve(engine, [prompt(90, i) for i in range(3, 6)])
    ids = [engine.add(prompt(90 + i, i), Params(max_tokens=30, temperature=0)) for i in range(3)]
    for _ in range(3):
        engine.step()
    collected, poison = list[int](), engine.cache.arenas[0].freed

    def freed(page: int) -> None:
        if not collected:
            collected.extend(ids[1:])
            for id in collected:
                engine.abort(id)
        poison(page)

    engine.cache.arenas[0].freed = freed
    if verb == "sleep":
        sleep(engine)
        wake(engine)
    elif verb == "new weights":
        update_weights(engine, weights_of(1).items(), 1)
    else:
        engine.clear_cache()
    engine.cache.arenas[0].freed = poison
    engine.check_integrity()
    outputs = run(engine)
    assert [outputs[id].finished for id in ids] == ["length", "abort", "abort"]


@pytest.mark.parametrize("after", range(1, 5))
def test_a_hold_that_new_weights_ended_is_no_hold(after: int) -> None:
    """The last token may be taken while the weights change: its output comes when its hold is gone."""
    llm = LLM(twin(small_model()), EngineConfig(10**6))
    id = llm.add(prompt(20, 0), Params(max_tokens=3, temperature=0), hold=60.0)
    finished = []
    for _ in range(after):
        finished += llm.step()[1]
    llm.update_weights(weights_of(1).items(), 1)
    while llm.engine.busy:
        finished += llm.step()[1]
    (answer,) = finished
    assert (answer.id, answer.finished, len(answer.tokens)) == (id, "length", 3)
    if answer.hold is not None:
        if answer.hold.version == 1:
            llm.export(answer.hold)
        llm.release(answer.hold)
    untouched(llm.engine)


def test_a_hold_past_its_time_has_ended_before_any_step() -> None:
    (answer,) = llm_of().generate([prompt(20, 0)], max_tokens=2, hold=0)
    assert (answer.finished, answer.hold) == ("length", None)
    now = [0.0]
    engine = make(small_model(), exact=False, clock=lambda: now[0])
    (output,) = serve(engine, [prompt(100, 0)], hold=10)
    assert output.hold is not None
    hold = engine.held(output.hold, prompt(100, 0) + output.tokens)
    now[0] = 10.0
    for verb in (lambda: engine.fork(hold, 2), lambda: engine.export(hold), lambda: engine.renew(hold, 5)):
        with pytest.raises(Error, match="has ended"):
            verb()
    with pytest.raises(Error, match="seconds is nan"):
        engine.hold([1, 2], NAN)
    engine.release(hold)
    engine.release(hold)
    untouched(engine)


@pytest.mark.parametrize("exact", [True, False])
def test_a_segment_that_says_anything_else_is_refused(exact: bool) -> None:
    engine, other = make(small_model(), exact), make(small_model(), exact)
    (output,) = serve(engine, [prompt(100, 0)], hold=10)
    assert output.hold is not None
    segment = engine.export(engine.held(output.hold, prompt(100, 0) + output.tokens))
    said = {"tokens": (1, *segment.tokens[1:]), "salt": "x", "origin": "exact" if not exact else "prefill"}
    for field, value in said.items():
        with pytest.raises(Error, match=r"checksum|origin"):
            other.put(dataclasses.replace(segment, **{field: value}))
    untouched(other)
    used = []
    for _ in range(3):  # again and again changes nothing
        assert other.put(segment) == len(segment.tokens)
        other.check_integrity()
        used.append(other.cache.cached_pages)
    assert used[0] == used[1] == used[2]
    sleep(other)
    with pytest.raises(Error, match="sleeps"):
        other.put(segment)


@pytest.mark.parametrize("running", ["recompute", "keep", "abort"])
def test_a_collection_of_wrong_weights_changes_nothing(running: Any) -> None:
    engine = make(twin(small_model()))
    start = prompt(70, 0)
    serve(engine, [start])
    id = engine.add(start, Params(max_tokens=12, temperature=0))
    outputs: dict[int, Output] = {}
    for _ in range(4):
        for output in engine.step():
            join(outputs, output)
    good = weights_of(1)
    name = next(iter(good))
    wrong: list[dict[str, Any]] = [
        good | {"extra": good[name]},
        good | {name: good[name][:-1]},
        good | {name: None},
        good | {name: good[name].long()},
    ]
    for weights in wrong:
        with pytest.raises(Error, match=f"extra|{name}"):
            update_weights(engine, weights.items(), 1, running)
        with pytest.raises(Error, match=f"extra|{name}"):
            update_weights(engine, list(weights.items()), 1, running)
    for output in run(engine).values():
        join(outputs, output)
    assert outputs[id].tokens == alone(small_model(), start, 12)
    assert outputs[id].versions == [0] * 12
    assert serve(engine, [start])[0].cached == 64
    assert update_weights(engine, good.items(), 1) == len(good)


def test_drafts_change_no_shaped_answer() -> None:
    """Penalties, bias, stop ids and least lengths see the tokens that drafts stand for, as they would one by one."""
    model = small_model()
    starts = [[3, 4, 5, 6] * 20, [7, 7, 7, 8] * 9]
    shaped = [
        Params(30, 0.7, seed=1, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        Params(30, 0, frequency_penalty=1.5, stop_ids=range(0, 64, 5), min_tokens=11),
        Params(30, 1.0, seed=5, logit_bias={3: 4.0, 4: 4.0, 5: 4.0}, stop_ids=[9, 10, 11], top_p=0.9),
    ]
    for params in shaped:
        plain, drafted = (serve(make(model, drafts=drafts), starts, params) for drafts in (0, 5))
        assert [x.tokens for x in plain] == [x.tokens for x in drafted]
        assert [x.finished for x in plain] == [x.finished for x in drafted]


@pytest.mark.timeout(30)
def test_holds_without_an_end_that_fill_the_memory_are_told() -> None:
    llm = llm_of(pages=60)
    held = []

    def fill() -> None:
        for i in range(40):
            held.extend(llm.generate([prompt(300, i)], max_tokens=2, hold=INF))

    with pytest.raises(Error, match=r"full of \d+ holds without an end"):
        fill()
    assert held
    for answer in held:
        assert answer.hold is not None
        llm.release(answer.hold)
    assert llm.generate([prompt(300, 99)], max_tokens=2)[0].finished == "length"
    untouched(llm.engine)
