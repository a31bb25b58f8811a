"""Any interleaving of requests, aborts, preemption, eviction and speculation gives the bits of a cold, lonely run.

The model is a dict: text -> log probabilities of one full pass. In exact mode equality is bitwise; the paged runner in
float64 is within 1e-10 of it, whatever was cached by prefill or by decoding.
"""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch
from engines import join, make, prompt, small_model, with_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune import ModelConfig, Sequences, Transformer
from perilune.model import EXACT, initialize
from perilune.serve import Engine, Output, Params
from perilune.serve.cache import Placement, live
from perilune.serve.request import State

TEXTS = [prompt(330, 100), prompt(330, 100)[:130] + prompt(200, 101), prompt(90, 102) + [1, 2, 3, 4] * 50]

ADD = st.tuples(
    st.just("add"),
    st.integers(0, 2),
    st.sampled_from([1, 30, 63, 64, 65, 128, 129, 140, 200, 257, 290]),
    st.integers(1, 12),
)
ACT = st.tuples(
    st.sampled_from(["step", "step", "step", "abort", "park", "recompute", "clear", "follow"]), st.integers(0, 7)
)


class Remembering:
    """Proposes what followed the same text before, every third token wrong."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def propose(self, requests, width):  # type: ignore[no-untyped-def]
        rows = []
        for request in requests:
            size = request.length
            row = next((t[size : size + width] for t in self.texts if t[:size] == request.tokens), [])
            rows.append([(token + (size + i) % 3 // 2) % 64 for i, token in enumerate(row)])
            if len(self.texts) < 50 and size % 4 == 0:
                self.texts.insert(0, list(request.tokens))
        return rows


@lru_cache(maxsize=400)
def full_pass(text: tuple[int, ...], exact: bool) -> torch.Tensor:
    """float64 log probabilities [T, V] of the text in one pass."""
    model = small_model().with_parts(EXACT) if exact else small_model(dtype=torch.float64)
    with torch.inference_mode():
        logits = model(torch.tensor(text), Sequences.from_lengths([len(text)]))
    return torch.log_softmax(logits.double(), -1)


def check(prompt_: list[int], output: Output, exact: bool) -> None:
    if output.finished != "length":
        return
    text = prompt_ + output.tokens
    rows = torch.arange(len(prompt_) - 1, len(text) - 1)
    scores = full_pass(tuple(text), exact)[rows]
    own = scores[torch.arange(len(rows)), torch.tensor(output.tokens)]
    assert output.logprobs is not None
    given_ = torch.tensor([entry.logprob for entry in output.logprobs], dtype=torch.float64)
    if exact:
        assert torch.equal(given_, own)
        assert output.tokens == scores.argmax(-1).tolist()
    else:
        assert (given_ - own).abs().max() <= 1e-10


def play(engine: Engine, actions: list[tuple], exact: bool) -> None:  # type: ignore[type-arg]
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, Output] = {}
    ended: list[int] = []

    def step() -> None:
        for output in engine.step():
            join(outputs, output)
            if output.finished is not None:
                ended.append(output.id)
        engine.check_integrity()

    def add(tokens: list[int], count: int) -> None:
        id = engine.add(tokens, Params(max_tokens=count, temperature=0, logprobs=0))
        prompts[id] = tokens

    for action, number, *rest in actions:
        alive = sorted(engine.scheduler.requests(), key=lambda request: request.id)
        if action == "add":
            add(TEXTS[number][: rest[0]], rest[1])
        elif action == "step":
            for _ in range(1 + number):
                step()
        elif action == "abort" and alive:
            engine.abort(alive[number % len(alive)].id)
        elif action in ("park", "recompute") and alive:
            request = alive[number % len(alive)]
            if request.state in (State.PREFILL, State.DECODE):
                engine.scheduler.preempt(request, engine.clock(), park=action == "park")
        elif action == "clear":
            live.clear(engine.cache)
        elif action == "follow" and ended:
            # The next turn of a conversation: answer and a few more tokens.
            id = ended[number % len(ended)]
            if len(prompts[id]) < 400:
                add([*prompts[id], *outputs[id].tokens, number, 5], 4)
        engine.check_integrity()
    while engine.busy:
        step()
    for id, output in outputs.items():
        check(prompts[id], output, exact)
    assert engine.cache.leases == 0
    assert len(engine.scheduler.slots) == engine.config.slots


@settings(max_examples=12)
@given(
    actions=st.lists(st.one_of(ADD, ACT), min_size=4, max_size=14),
    budget=st.sampled_from([67, 100, 1000]),
    slots=st.sampled_from([1, 3]),
    drafts=st.sampled_from([0, 5]),
    pages=st.sampled_from([16, 60]),
    host=st.sampled_from([0, 40]),
    wide=st.booleans(),
)
def test_exact_mode_is_bitwise_whatever_happens(
    actions: list[tuple],  # type: ignore[type-arg]
    budget: int,
    slots: int,
    drafts: int,
    pages: int,
    host: int,
    wide: bool,
) -> None:
    size = 256 if wide else 64
    pages = pages // 4 + 4 if wide else pages
    engine = make(
        small_model(),
        True,
        pages,
        host_pages=host,
        page_tokens=size,
        token_budget=budget,
        slots=slots,
        drafts=drafts,
        drafter=Remembering(),
        reserve=0.0,
        placement=Placement(min_turn=1),
    )
    play(engine, actions, exact=True)


@settings(max_examples=10)
@given(
    actions=st.lists(st.one_of(ADD, ACT), min_size=4, max_size=14),
    drafts=st.sampled_from([0, 5]),
    host=st.sampled_from([0, 40]),
    graphs=st.booleans(),
)
def test_the_paged_runner_stays_within_rounding(
    actions: list[tuple],  # type: ignore[type-arg]
    drafts: int,
    host: int,
    graphs: bool,
) -> None:
    model = small_model(dtype=torch.float64)
    placement = Placement(min_turn=1)
    drafter = Remembering()
    engine = make(model, False, 40, host_pages=host, drafts=drafts, drafter=drafter, reserve=0.0, placement=placement)
    if graphs:
        with_graphs(engine)
    play(engine, actions, exact=False)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("exact", [False, True])
def test_a_thousand_lifetimes_of_nano_leak_nothing(exact: bool) -> None:
    """The shape of the quickstart, real pages and states; 10^5 lifetimes run on a fake device in test_scheduler."""
    model = initialize(Transformer(ModelConfig.from_pretrained("nano")), 0)
    drafts = 3 if exact else 0
    engine = make(model, exact, 90, host_pages=60, slots=8, token_budget=256, drafts=drafts, reserve=0.1)
    draw = random.Random(1)
    texts = [prompt(150, seed, 2048) for seed in range(6)]
    made, ended, alive = 0, 0, list[int]()
    while ended < 1000:
        while made < 1000 and len(alive) < 20:
            start = draw.choice(texts)[: draw.randrange(1, 150)] + prompt(draw.randrange(1, 9), made, 2048)
            temperature = draw.choice([0.0, 0.0, 1.0])
            params = Params(max_tokens=draw.randrange(1, 12), temperature=temperature, logprobs=draw.choice([None, 1]))
            alive.append(engine.add(start, params, hold=draw.choice([None] * 9 + [0.2]), salt=draw.choice(["", "a"])))
            made += 1
        if draw.random() < 0.05:
            engine.abort(draw.choice(alive))
        for output in engine.step():
            if output.finished is not None:
                assert output.finished in ("length", "abort")
                alive.remove(output.id)
                ended += 1
        if ended % 20 == 0:
            engine.check_integrity()
    engine.land()
    for number in [*engine.scheduler.holds]:
        engine.cache.release(engine.scheduler.holds.pop(number))
    engine.clear_cache()
    engine.check_integrity()
    assert [arena.free_pages for arena in engine.cache.arenas] == [arena.capacity for arena in engine.cache.arenas]
    assert sorted(engine.scheduler.slots) == list(range(8))
    assert engine.cache.leases == 0
    assert engine.counters.cached > 0
