"""Steps that begin before the tokens of the one before are known: the same answers, and nothing left behind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engines import alone, join, make, prompt, run, serve, small_model

from perilune.serve import Engine, Output, Params
from perilune.serve.cache import Placement
from perilune.serve.control import update_weights

MIX = [
    Params(max_tokens=30, temperature=0),
    Params(max_tokens=25, temperature=0.9, seed=3, logprobs=2),
    Params(max_tokens=7, temperature=0.7, top_p=0.9, seed=4),
    Params(max_tokens=1, temperature=0),
    Params(max_tokens=40, temperature=1.2, top_k=9, seed=5, logprobs=0),
]


def answers(engine: Engine, params: list[Params] = MIX) -> list[Output]:
    ids = [engine.add(prompt(50 + 11 * i, i), each) for i, each in enumerate(params)]
    outputs = run(engine)
    return [outputs[id] for id in ids]


def early(engine: Engine) -> list[int]:
    """Counts the steps that were begun early."""
    seen: list[int] = []
    follow = engine._follow

    def counted(flight):  # type: ignore[no-untyped-def]
        found = follow(flight)
        seen.append(len(found.chunks) if found else 0)
        return found

    engine._follow = counted  # type: ignore[method-assign]
    return seen


def test_answers_are_those_of_steps_one_after_the_other() -> None:
    model = small_model()
    plain, ahead = make(model, False, overlap=False), make(model, False, overlap=True)
    seen = early(ahead)
    for one, other in zip(answers(plain), answers(ahead), strict=True):
        assert (one.tokens, one.finished, one.versions) == (other.tokens, other.finished, other.versions)
        assert [x.token for x in one.logprobs or []] == [x.token for x in other.logprobs or []]
        for x, y in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert abs(x.logprob - y.logprob) < 1e-5
    assert sum(size > 0 for size in seen) >= 20
    assert plain.counters.decode == ahead.counters.decode  # nobody ends but by length: nothing was computed in vain


def test_a_stop_token_ends_while_the_next_step_runs() -> None:
    model = small_model()
    starts = [prompt(70 + i, 10 + i) for i in range(4)]
    free = [alone(model, start, 30, exact=False) for start in starts]
    stops = [tokens[5 + 4 * i] for i, tokens in enumerate(free)]
    engine = make(model, False, placement=Placement(min_turn=1))
    ids = [
        engine.add(start, Params(max_tokens=30, temperature=0, stop_ids=(stop,)))
        for start, stop in zip(starts, stops, strict=True)
    ]
    outputs = run(engine)
    for id, start, tokens, stop in zip(ids, starts, free, stops, strict=True):
        assert outputs[id].tokens == tokens[: tokens.index(stop) + 1]
        following = [*start, *outputs[id].tokens, 9]
        (then,) = serve(engine, [following])
        assert then.cached == len(following) - 1  # the stop token was computed
        assert then.tokens == alone(model, following, 8, exact=False)


def test_a_request_that_is_aborted_or_preempted_in_flight() -> None:
    model = small_model()
    engine = make(model, False)
    starts = [prompt(60 + i, i) for i in range(3)]
    ids = [engine.add(start, Params(max_tokens=20, temperature=0)) for start in starts]
    whole: dict[int, Output] = {}
    for _ in range(6):
        for output in engine.step():
            join(whole, output)
    assert engine._flight is not None
    engine.abort(ids[0])
    parked = next(request for request in engine.scheduler.running if request.id == ids[1])
    engine.scheduler.preempt(parked, engine.clock(), park=True)
    engine.check_integrity()
    while engine.busy:
        for output in engine.step():
            join(whole, output)
        engine.check_integrity()
    assert whole[ids[0]].finished == "abort"
    for id, start in zip(ids[1:], starts[1:], strict=True):
        assert whole[id].tokens == alone(model, start, 20, exact=False)


def test_new_requests_start_at_once() -> None:
    engine = make(small_model(), False)
    engine.add(prompt(60, 0), Params(max_tokens=30, temperature=0))
    for _ in range(5):
        engine.step()
    id = engine.add(prompt(40, 1), Params(max_tokens=3, temperature=0))
    waited = 0
    while not any(output.id == id and output.tokens for output in engine.step()):
        waited += 1
    assert waited <= 1  # the step that had begun


def test_an_update_waits_for_the_step_that_had_begun() -> None:
    old, new = small_model(0), small_model(1)
    model = type(old)(old.config)
    model.load_state_dict(old.state_dict())
    engine = make(model, False)
    start = prompt(80, 0)
    id = engine.add(start, Params(max_tokens=30, temperature=0))
    whole: dict[int, Output] = {}
    for _ in range(8):
        for output in engine.step():
            join(whole, output)
    update_weights(engine, new.state_dict().items(), 1)
    for output in run(engine).values():
        join(whole, dataclasses.replace(output, id=id))
    made = whole[id].versions.count(0)
    assert 0 < made < 30
    assert whole[id].versions == [0] * made + [1] * (30 - made)
    assert whole[id].tokens[:made] == alone(old, start, made, exact=False)
    assert whole[id].tokens[made:] == alone(new, start + whole[id].tokens[:made], 30 - made, exact=False)


@pytest.mark.parametrize("option", [{"drafts": 3}, {"exact": True}])
def test_it_is_off_with_drafts_and_in_exact_mode(option: dict[str, int]) -> None:
    engine = make(small_model(), **({"exact": False} | option))  # type: ignore[arg-type]
    seen = early(engine)
    answers(engine, MIX[:1])
    assert not any(seen)


def test_a_request_with_a_mask_or_penalty_waits_for_its_tokens() -> None:
    engine = make(small_model(), False)
    seen = early(engine)
    allowed = torch.ones(64, dtype=torch.bool)
    serve(engine, [prompt(30, 0)], MIX[0], mask=lambda tokens: allowed)
    answers(engine, [dataclasses.replace(MIX[0], frequency_penalty=0.5)])
    assert not any(seen)
