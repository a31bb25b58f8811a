"""One long prompt: alone, again after a hit, and another one with short requests beside it.

Short requests arrive at random moments, --rate a second on average, whether or not those before have ended; each asks
for a few tokens more than the first. The time to the first token counts from the moment of arrival, which usually lies
inside a step.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from serve_floor import prefill_seconds

from perilune import Transformer
from perilune.serve import Engine, EngineConfig, Params

VOCABULARY = 163840
SHORT, ANSWER = 200, 16  # tokens


def prompts(count: int, length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count, length), generator=generator).tolist()


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def first_token(engine: Engine, tokens: list[int]) -> tuple[float, int]:
    """Seconds from `add` to the first token, and how many prompt tokens were cached."""
    begin = now()
    id = engine.add(tokens, Params(max_tokens=1, temperature=0))
    while True:
        for output in engine.step():
            if output.id == id and output.tokens:
                return now() - begin, output.cached


def long(model: Transformer, options: Any) -> Iterator[dict[str, Any]]:
    engine = Engine(model, EngineConfig(options.arena, slots=16, token_budget=options.budget))
    vocabulary, length = model.config.vocab_size, options.long
    warm_up(engine, options.budget, vocabulary)
    texts = [prompts(1, length, seed, vocabulary)[0] for seed in (2, 3)]
    cold, _ = first_token(engine, texts[0])
    least = prefill_seconds(model, length, 0, options.bandwidth)
    yield {"case": "cold", "tokens": length, "s": round(cold, 3), "floor_s": round(least, 3)}
    tails = prompts(6, 3, 4, vocabulary)
    warm = [first_token(engine, [*texts[0], *tail]) for tail in tails][1:]  # the first one records its graph
    times = [seconds for seconds, _ in warm]
    yield {"case": "warm", "tokens": length + 3, "hit": warm[0][1], "ms": rounded(times, 1e3, 2)}
    engine.clear_cache()
    yield {"case": "beside", "tokens": length, **beside(engine, texts[1], options.rate)}


def warm_up(engine: Engine, budget: int, vocabulary: int) -> None:
    """The shapes of one prompt, of two, of a short one and its answer."""
    first_token(engine, prompts(1, budget // 2, 1, vocabulary)[0])
    for tokens in [*prompts(2, budget + 200, 5, vocabulary), *prompts(3, SHORT, 6, vocabulary)]:
        engine.add(tokens, Params(max_tokens=ANSWER, temperature=0))
    while engine.busy:
        engine.step()
    engine.clear_cache()


def beside(engine: Engine, text: list[int], rate: float) -> dict[str, Any]:
    """The long prompt's time, and those of the short requests that came before its end."""
    draw, vocabulary = random.Random(0), engine.model.config.vocab_size
    first, gaps, steps = list[float](), list[float](), list[float]()
    waiting: dict[int, float] = {}
    begin = now()
    arrival, seed, took = begin + draw.expovariate(rate), 100, None
    id = engine.add(text, Params(max_tokens=1, temperature=0))
    last: dict[int, float] = {}
    while took is None or waiting:
        before = now()
        while took is None and arrival <= before:
            seed += 1
            new = engine.add(prompts(1, SHORT, seed, vocabulary)[0], Params(max_tokens=ANSWER, temperature=0))
            waiting[new], arrival = arrival, arrival + draw.expovariate(rate)
        outputs, after = engine.step(), now()
        steps.append(after - before)
        for output in outputs:
            if output.id == id:
                took = after - begin if output.tokens else took
            elif output.tokens:
                if output.id in waiting:
                    first.append(after - waiting.pop(output.id))
                else:
                    gaps.append(after - last[output.id])
                last[output.id] = after
    assert took is not None
    return {
        "s": round(took, 3),
        "short_tokens": SHORT,
        "short_count": len(first),
        "short_ttft_ms": rounded(first, 1e3, 1),
        "short_gap_ms": rounded(gaps, 1e3, 1),
        "step_ms": rounded(steps, 1e3, 1),
    }


def rounded(values: list[float], scale: float, digits: int) -> list[float]:
    """Smallest, median, largest."""
    found = (min(values), statistics.median(values), max(values)) if values else ()
    return [round(scale * value, digits) for value in found]


__all__ = ["VOCABULARY", "first_token", "long", "now", "prompts"]
