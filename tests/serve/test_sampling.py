"""Drawing tokens: distributions, penalties, masks, reproducibility; speculation draws what would have been drawn."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from engines import make, prompt, serve, small_model

from perilune import Error, Sequences
from perilune.model.sampling import Sampling, draw, ordered
from perilune.serve import NgramDrafter, Params
from perilune.serve.request import Request
from perilune.serve.sampling import _broken, shape, uniform
from perilune.serve.speculate import Width


def weights(logits: torch.Tensor, **options: object) -> list[float]:
    found, ids = ordered(logits[None], [Sampling(**options)])  # type: ignore[arg-type]
    return torch.zeros(len(logits), dtype=found.dtype).index_add(0, ids[0], found[0] / found.sum()).tolist()


def test_filters_against_their_definitions() -> None:
    probs = [0.4, 0.3, 0.15, 0.1, 0.05]
    logits = torch.tensor(probs, dtype=torch.float64).log()
    assert weights(logits) == pytest.approx(probs)
    assert weights(logits, temperature=0.5) == pytest.approx([p * p / sum(q * q for q in probs) for p in probs])
    assert weights(logits, top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0])
    assert weights(logits, top_p=0.7) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0])
    assert weights(logits, top_p=0.71) == pytest.approx([p / 0.85 for p in probs[:3]] + [0, 0])
    assert weights(logits, min_p=0.3) == pytest.approx([p / 0.85 for p in probs[:3]] + [0, 0])
    assert weights(logits, top_p=1e-9) == [1, 0, 0, 0, 0]
    assert weights(logits, top_k=4, top_p=0.9, min_p=0.3) == pytest.approx([p / 0.85 for p in probs[:3]] + [0, 0])


def test_rows_keep_their_own_parameters() -> None:
    logits = torch.randn(3, 20, dtype=torch.float64)
    each = [Sampling(temperature=2.0), Sampling(top_k=3), Sampling(top_p=0.5, min_p=0.2)]
    together, ids = ordered(logits, each)
    for row, sampling in enumerate(each):
        own, own_ids = ordered(logits[row : row + 1], [sampling])
        assert torch.equal(together[row], own[0])
        assert torch.equal(ids[row], own_ids[0])


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_the_extreme_numbers_draw_tokens_that_have_weight(number: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf")]], dtype=torch.float64)
    found, ids = ordered(logits, [Sampling(top_k=2)])
    assert draw(found, ids, torch.tensor([number])).item() in (1, 2)


def chi_square(counts: Counter[int], probs: torch.Tensor, total: int) -> float:
    """Pooled so that each cell expects at least 5; in standard deviations of the statistic."""
    order = probs.argsort(descending=True).tolist()
    cells, rest, seen = [], 0.0, 0
    for token in order:
        if probs[token] * total >= 5:
            cells.append((counts[token], float(probs[token]) * total))
        else:
            rest, seen = rest + float(probs[token]) * total, seen + counts[token]
    if rest >= 5:
        cells.append((seen, rest))
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    freedom = len(cells) - 1
    assert freedom >= 3
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_speculation_preserves_the_distribution() -> None:
    """First and second tokens of 1,500 seeds against the model's probabilities, drafts being the likeliest tokens.

    Fixed seeds; 4 standard deviations of chi-square would be exceeded by chance about once in 10,000 times.
    """
    model, start = small_model(), prompt(20, 5)
    cut = Sequences.from_lengths([20])
    with torch.inference_mode():
        first = torch.softmax(model(torch.tensor(start), cut)[-1].double() / 0.35, -1)
    likely = first.topk(3).indices.tolist()
    seconds = {}
    for token in likely:
        with torch.inference_mode():
            logits = model(torch.tensor([*start, token]), Sequences.from_lengths([21]))[-1]
        seconds[token] = torch.softmax(logits.double() / 0.35, -1)

    class Likeliest:
        def propose(self, requests, width):  # type: ignore[no-untyped-def]
            return [[int(seconds[r.tokens[-1]].argmax()), 1, 2] if r.tokens[-1] in seconds else [1] for r in requests]

    total = 1500
    engine = make(model, False, 800, drafts=3, drafter=Likeliest(), slots=64, token_budget=8192)
    prompts = [start] * total
    ids = [engine.add(p, Params(max_tokens=3, temperature=0.35, seed=seed)) for seed, p in enumerate(prompts)]
    answers: dict[int, list[int]] = {id: [] for id in ids}
    while engine.busy:
        for output in engine.step():
            answers[output.id] += output.tokens
    assert chi_square(Counter(a[0] for a in answers.values()), first, total) < 4
    for token in likely:
        mine = [answer[1] for answer in answers.values() if answer[0] == token]
        assert chi_square(Counter(mine), seconds[token], len(mine)) < 4
    assert engine.counters.decode > 2 * total  # drafts were verified


@pytest.mark.parametrize("exact", [True, False])
def test_sampled_answers_depend_on_the_seed_alone(exact: bool) -> None:
    model = small_model()
    params = [Params(max_tokens=12, temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)]
    starts = [[*prompt(60, 1), 1, 2, 3, 4, 1, 2, 3, 4]] * 4

    def answers(**options: object) -> list[list[int]]:
        engine = make(model, exact, **options)
        ids = [engine.add(start, each) for start, each in zip(starts, params, strict=True)]
        found: dict[int, list[int]] = {id: [] for id in ids}
        while engine.busy:
            for output in engine.step():
                found[output.id] += output.tokens
        return [found[id] for id in ids]

    reference = answers(slots=1)
    assert len({tuple(answer) for answer in reference}) == 4
    assert answers(slots=4, drafts=5) == reference
    assert answers(slots=2, token_budget=66, pages=6, reserve=0.0) == reference


def test_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(numbers)) == 10_000
    counts = Counter(int(number * 10) for number in numbers)
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 30  # 9 degrees of freedom
    assert min(numbers) >= 0
    assert max(numbers) < 1


def request(tokens: list[int], prompt: int, **params: object) -> Request:
    made = Request(0, tokens, Params(**params), 0.0)  # type: ignore[arg-type]
    made.prompt = prompt
    return made


def test_penalties_against_their_definitions() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0])
    shaped = shape(logits, request([0, 1, 1, 3], 1, repetition_penalty=2.0), [])
    assert shaped.tolist() == [1.0, -2.0, 0.5, 1.5, -2.0]
    shaped = shape(logits, request([0, 1, 1], 1, presence_penalty=1.0, frequency_penalty=0.25), [3])
    assert shaped.tolist() == [2.0, -2.5, 0.5, 1.75, -2.0]  # the prompt's 0 does not count, the draft 3 does
    shaped = shape(logits, request([0], 1, logit_bias={4: 100.0, 0: -100.0}), [])
    assert shaped.tolist() == [-98.0, -1.0, 0.5, 3.0, 98.0]
    masked = request([0, 1], 1)
    masked.mask = lambda tokens: torch.tensor([i == len(tokens) for i in range(5)])
    assert shape(logits, masked, [2]).isfinite().tolist() == [False, False, False, True, False]
    assert logits.tolist() == [2.0, -1.0, 0.5, 3.0, -2.0]


@pytest.mark.parametrize("size", [5, 32, 33, 64, 163])
def test_a_mask_of_bits_hides_what_the_same_mask_of_bools_hides(size: int) -> None:
    """Words as numpy packs them, the lowest bit first; bits after the vocabulary's end mean nothing."""
    allowed = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    padded = np.concatenate([allowed.numpy(), np.ones(-size % 32, dtype=bool)])
    words = torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int32))
    masked = request([0], 1)
    masked.mask = lambda tokens: words
    logits = torch.arange(float(size))
    assert torch.equal(shape(logits, masked, []).isfinite(), allowed)
    for wrong in (words.long(), words[:-1], torch.cat([words, words])):
        masked.mask = lambda tokens, wrong=wrong: wrong
        with pytest.raises(Error, match="mask gave"):
            shape(logits, masked, [])


def test_min_tokens_stop_tokens_and_bias_in_an_answer() -> None:
    engine = make(small_model())
    biased = Params(max_tokens=9, temperature=0, logit_bias={7: 1e4}, stop_ids=(7,), min_tokens=5)
    (output,) = serve(engine, [prompt(10, 0)], biased)
    assert 7 not in output.tokens[:4]
    assert (output.tokens[4:], output.finished) == ([7], "stop")


def test_a_mask_without_tokens_ends_the_request_and_harms_no_other() -> None:
    engine = make(small_model())
    start = prompt(130, 0)
    serve(engine, [start])
    for temperature in (0.0, 1.0):
        params = Params(max_tokens=4, temperature=temperature)
        (output,) = serve(engine, [start], params, mask=lambda tokens: torch.zeros(64, dtype=torch.bool))
        assert (output.tokens, output.finished) == ([], "error")
        assert output.error == "logit_bias and mask leave no token that may follow"
    assert serve(engine, [start])[0].cached == 128


def test_drafts_and_penalties_together_change_nothing() -> None:
    model = small_model()
    params = Params(max_tokens=30, temperature=0, frequency_penalty=0.6, repetition_penalty=1.1)
    start = [1, 2, 3, 4] * 12
    plain, drafted = (serve(make(model, drafts=drafts), [start], params)[0].tokens for drafts in (0, 6))
    assert plain == drafted


def test_prompt_lookup_finds_what_came_before() -> None:
    drafter = NgramDrafter(longest=3, shortest=2)
    asked = Request(0, [1, 2, 3, 9, 9, 4, 5, 6, 1, 2, 3], Params(), 0.0)
    assert drafter.propose([asked], 4) == [[9, 9, 4, 5]]
    asked.tokens += [7, 7, 1, 2]
    assert drafter.propose([asked], 3) == [[3, 7, 7]]  # the latest match counts
    asked.tokens += [8]
    assert drafter.propose([asked], 3) == [[]]
    asked.tokens += [5, 5, 5]
    assert drafter.propose([asked], 3) == [[5, 5, 5]]  # a run goes on


def test_the_width_follows_acceptance_and_the_measured_costs() -> None:
    assert Width(7).choose(1, 0.9) == 7  # drafts are free without a table
    flat = {(1, tokens): 1.0 + 0.01 * tokens for tokens in range(1, 9)}
    steep = {(64, tokens): float(tokens) for tokens in range(1, 9)}
    width = Width(7, flat | steep)
    assert width.choose(1, 0.8) == 7
    assert width.choose(64, 0.8) == 0  # each token costs as much as a step: never worth it
    assert width.choose(100, 0.8) == 0
    assert width.choose(1, 0.005) == 0
    for _ in range(200):
        width.observe(1, 8, 50.0)
    assert width.choose(1, 0.8) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_with_an_entry_that_is_no_number_are_found(dtype: torch.dtype) -> None:
    inf, most = float("inf"), torch.finfo(dtype).max
    rows = [[0.0, 1.0], [most, -most], [0.0, inf], [-inf, 0.0], [inf, -inf], [float("nan"), 1.0], [1.0, float("nan")]]
    logits_RV = torch.tensor(rows, dtype=dtype).repeat_interleave(40, dim=1)
    assert _broken(logits_RV).tolist() == [False, False, True, True, True, True, True]
