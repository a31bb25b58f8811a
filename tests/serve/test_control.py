"""New weights in traffic, sleep, holds and forks, segments between engines, the host tier, broken logits."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from engines import GREEDY, alone, join, make, prompt, run, serve, small_model

from perilune import Error, Transformer
from perilune.model import initialize
from perilune.serve import LLM, Engine, Output, Params
from perilune.serve.cache import Placement, check_integrity, live
from perilune.serve.control import sleep, update_weights, wake


def twin(model: Transformer) -> Transformer:
    """The same weights in memory of their own."""
    other = initialize(Transformer(model.config), 0)
    other.load_state_dict(model.state_dict())
    return other


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in small_model(seed).state_dict().items()}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("running", ["recompute", "keep", "abort"])
def test_no_token_crosses_a_change_of_weights(exact: bool, running: str) -> None:
    old, new = small_model(0), small_model(1)
    engine = make(twin(old), exact, placement=Placement(min_turn=1))
    shared = prompt(140, 0)
    (before,) = serve(engine, [shared])
    assert before.versions == [0] * 8
    ids = [engine.add(shared + prompt(9, i), Params(max_tokens=40, temperature=0)) for i in (1, 2)]
    waiting = [engine.add(prompt(100, 10 + i), GREEDY) for i in range(4)]  # more than there are slots
    outputs: dict[int, Output] = {}
    for _ in range(9):
        for output in engine.step():
            join(outputs, output)
    made = len(outputs[ids[0]].tokens)
    assert 0 < made < 40
    assert outputs[ids[0]].cached == 128
    assert update_weights(engine, weights_of(1).items(), 1, running) == len(old.state_dict())  # type: ignore[arg-type]
    engine.check_integrity()
    for id, output in run(engine).items():
        join(outputs, dataclasses.replace(output, id=id))
    if running == "abort":
        assert outputs[ids[0]].finished == "abort"
    else:
        whole = outputs[ids[0]]
        assert whole.versions.count(0) - made in (0, 1)  # a step may have begun before the update
        made = whole.versions.count(0)
        assert whole.versions == [0] * made + [1] * (40 - made)
        start = shared + prompt(9, 1)
        assert whole.tokens[:made] == alone(old, start, made, exact)
        if running == "recompute":
            assert whole.tokens[made:] == alone(new, start + whole.tokens[:made], 40 - made, exact)
    # Whatever was in the cache or was being computed by the old weights, the new ones start cold.
    fresh = [shared + prompt(9, 1), shared + outputs[ids[0]].tokens]
    again = serve(engine, [shared])[0]
    assert again.cached == (128 if running == "recompute" else 0)  # computed anew by the requests on their way
    assert again.tokens == alone(new, shared, 8, exact)
    for start in fresh:
        (output,) = serve(engine, [start])
        assert output.tokens == alone(new, start, 8, exact)
        assert set(output.versions) == {1}
    for id in waiting:
        assert running == "abort" or outputs[id].versions == sorted(outputs[id].versions)


def test_an_update_that_fails_leaves_no_engine_that_answers() -> None:
    engine = make(twin(small_model()))
    good = weights_of(1)
    name = next(iter(good))
    with pytest.raises(Error, match=r"version is 0; must be > 0"):
        update_weights(engine, good.items(), 0)
    with pytest.raises(Error, match="'nonsense', which the model does not have"):
        update_weights(engine, iter([(name, good[name]), ("nonsense", good[name])]), 1)
    engine.add(prompt(10, 0), GREEDY)
    with pytest.raises(Error, match="has failed"):
        engine.step()
    with pytest.raises(Error, match="weights lacks"):
        update_weights(engine, [(name, good[name])], 2)
    with pytest.raises(Error, match="weights lacks"):
        update_weights(engine, [(name, good[name])], 3)
    update_weights(engine, good.items(), 4)
    (output,) = run(engine).values()
    assert output.tokens == alone(small_model(1), prompt(10, 0), 8)
    assert output.versions == [4] * 8


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_goes_on(exact: bool, level: int) -> None:
    engine = make(twin(small_model()), exact)
    start = prompt(100, 0)
    id = engine.add(start, Params(max_tokens=20, temperature=0))
    outputs: dict[int, Output] = {}
    for _ in range(6):
        for output in engine.step():
            join(outputs, output)
    sleep(engine, level)
    assert engine.pools.bytes_PB.numel() == 0
    with pytest.raises(Error, match=f"sleeps at level {level}|were dropped"):
        engine.step()
    with pytest.raises(Error, match="already"):
        sleep(engine)
    wake(engine)
    with pytest.raises(Error, match="does not sleep"):
        wake(engine)
    if level == 2:
        with pytest.raises(Error, match="were dropped"):
            engine.step()
        update_weights(engine, weights_of(0).items(), 1)
    for output in run(engine).values():
        join(outputs, output)
    assert outputs[id].tokens == alone(small_model(), start, 20, exact)


@pytest.mark.parametrize("exact", [True, False])
def test_a_held_end_survives_pressure_and_is_forked(exact: bool) -> None:
    model = small_model()
    llm = LLM(model)
    llm.engine = make(model, exact, pages=16, placement=Placement(min_turn=10**9))
    start = prompt(100, 0)
    (answer,) = llm.generate([start], max_tokens=40, temperature=0, hold=60)
    assert answer.hold is not None
    state = 139 // 64 * 64 if exact else 139
    assert answer.hold.tokens == tuple([*start, *answer.tokens][:state])
    forks = llm.fork(answer.hold, 3)
    llm.release(answer.hold)
    for i in range(4):
        llm.generate([prompt(300, 20 + i)], max_tokens=2, temperature=0)
    worlds = [[*start, *answer.tokens, i, 7] for i in range(3)]
    for hold, world in zip(forks, llm.generate(worlds, max_tokens=6, temperature=0), strict=True):
        assert world.cached == state
        assert world.tokens == alone(model, world.prompt, 6, exact)
        llm.release(hold)
        llm.release(hold)  # harmless
    with pytest.raises(Error, match="has ended"):
        llm.fork(forks[0], 1)
    assert live.held_pages(llm.engine.cache) == 0
    llm.engine.check_integrity()
    assert llm.engine.cache.leases == 0


def test_a_hold_of_another_engine_is_refused_whatever_its_number() -> None:
    engines = [make(small_model()) for _ in range(2)]
    holds = []
    for engine in engines:
        (output,) = serve(engine, [prompt(100, 0)], hold=100.0)
        assert output.hold == 0
        holds.append(engine.held(output.hold, prompt(100, 0) + output.tokens))
    for engine, hold in zip(engines, reversed(holds), strict=True):
        verbs = (engine.release, engine.export, partial(engine.fork, copies=1), partial(engine.renew, seconds=5.0))
        for verb in verbs:
            with pytest.raises(Error, match="is of engine"):
                verb(hold)
        assert len(engine.scheduler.holds) == 1
        engine.check_integrity()


def test_a_hold_ends_with_its_time() -> None:
    now = [0.0]
    engine = make(small_model(), clock=lambda: now[0])
    (output,) = serve(engine, [prompt(100, 0)], hold=10)
    assert output.hold is not None
    hold = engine.held(output.hold, prompt(100, 0) + output.tokens)
    now[0] = 9.0
    engine.renew(hold, 5)
    now[0] = 12.0
    engine.step()
    assert engine.cache.leases == 1
    now[0] = 15.0
    engine.step()
    assert engine.cache.leases == 0
    with pytest.raises(Error, match="has ended"):
        engine.export(hold)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("pages", [(64, 64), (256, 64)])
def test_a_segment_moves_to_another_engine(exact: bool, pages: tuple[int, int]) -> None:
    model = small_model()
    options = {"page_tokens": pages[0], "match_unit": pages[1], "placement": Placement(min_turn=1)}
    prefill, decode = make(model, exact, **options), make(model, exact, **options)
    start = prompt(300, 0)
    (output,) = serve(prefill, [start], Params(max_tokens=1, temperature=0), hold=10)
    assert output.hold is not None
    segment = prefill.export(prefill.held(output.hold, start + output.tokens, ""))
    assert len(segment.tokens) == (256 if exact else 300)
    # The request waits for its segment where it will be decoded.
    id = decode.add(start + output.tokens, Params(max_tokens=10, temperature=0), remote=True)
    for _ in range(3):
        assert decode.step() == []
    assert decode.put(segment) == len(segment.tokens)
    decode.delivered(id)
    decode.check_integrity()
    whole = run(decode)[id]
    assert whole.cached == len(segment.tokens)
    assert output.tokens + whole.tokens == alone(model, start, 11, exact)

    flipped = segment.state_B.clone()
    flipped[5] ^= 1
    for broken, message in (
        (dataclasses.replace(segment, state_B=flipped), "checksum"),
        (dataclasses.replace(segment, layout="0" * 32), "layout"),
        (dataclasses.replace(segment, version=3), "version is 3"),
        (dataclasses.replace(segment, rows_TML=segment.rows_TML[:-1]), "must be"),
    ):
        with pytest.raises(Error, match=message):
            decode.put(broken)
    if not exact:
        with pytest.raises(Error, match="an exact engine takes 'exact' ones only"):
            make(model, True, **options).put(segment)
    assert make(model, exact, pages=1, **options).put(segment) == 0  # no room is no error
    decode.check_integrity()


@pytest.mark.parametrize("exact", [True, False])
def test_what_was_evicted_to_the_host_comes_back_with_its_state(exact: bool) -> None:
    """Exact chunk boundary included: a restored state must not count its last token twice."""
    model = small_model()
    engine = make(model, exact, pages=24, host_pages=200)
    starts = [prompt(129 + i, i) for i in range(8)]
    serve(engine, starts)
    assert engine.cache.moved[0] > 0
    fetched = engine.cache.moved[1]
    for start in starts:
        (output,) = serve(engine, [start])
        assert output.cached == 128
        assert output.tokens == alone(model, start, 8, exact)
    assert engine.cache.moved[1] > fetched


def test_broken_logits_end_the_request_and_poison_nothing() -> None:
    model = twin(small_model())
    engine = make(model, exact=False)
    start = prompt(130, 0)
    serve(engine, [start])
    bad = engine.add([*start, 5], GREEDY)
    engine.step()  # its tail is computed, then the weights break
    kept = model.lm_head.weight.data.clone()
    model.lm_head.weight.data.fill_(float("nan"))
    output = run(engine)[bad]
    assert (output.finished, output.error) == ("error", "logits are not finite numbers")
    model.lm_head.weight.data.copy_(kept)
    again = serve(engine, [start])[0]
    assert again.cached == 0  # its segments are in quarantine
    assert again.tokens == alone(model, start, 8, exact=False)
    check_integrity(engine.cache)


def test_pause() -> None:
    engine: Engine = make(small_model())
    id = engine.add(prompt(20, 0), GREEDY)
    engine.step()
    engine.pause()
    assert engine.step() == []
    engine.resume()
    assert len(run(engine)[id].tokens) >= 7
