"""Small models and engines whose free memory is poisoned, for tests of the serve room."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from models import random_tokens, tiny_config, tiny_model

from perilune import Transformer
from perilune.model import EXACT, Sampling, generate, initialize
from perilune.serve import Engine, EngineConfig, Params
from perilune.serve.graphs import Recorder
from perilune.serve.request import Output
from perilune.serve.runner_paged import PagedRunner

GREEDY = Params(max_tokens=8, temperature=0)


@lru_cache
def small_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """Two KDA layers and an MLA layer, one of them sparse; vocabulary 64. Weights large enough to matter."""
    base = tiny_config("kimi_linear")
    config = dataclasses.replace(
        base,
        vocab_size=64,
        num_layers=3,
        dense_layers=2,
        kda=dataclasses.replace(base.kda, layers=(0, 1), num_heads=2),
        mla=dataclasses.replace(base.mla, layers=(2,), num_heads=2),
    )
    model = initialize(Transformer(config), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.endswith(("conv_CW", "dt_bias_HK")):
                parameter.mul_(4.0)
    return model.to(dtype)


def make(model: Transformer, exact: bool = True, pages: int = 400, **options: Any) -> Engine:
    """An engine of so many pages; every page that is free holds NaN."""
    drafter = options.pop("drafter", None)
    clock = options.pop("clock", None)
    host = options.pop("host_pages", 0)
    options = {"slots": 4, "token_budget": 128, "watermark": 0.0} | options
    probe = Engine(model, EngineConfig(10**7, exact=exact, **options))
    size = probe.cache.geometry.page_bytes
    config = EngineConfig(pages * size, host * size, exact=exact, **options)
    engine = Engine(model, config, drafter, **({} if clock is None else {"clock": clock}))
    for page in range(engine.pools.bytes_PB.shape[0]):
        engine.pools.poison(page)
    engine.pools.host_PB.fill_(0xFF)
    engine.cache.arenas[0].freed = engine.pools.poison
    return engine


def run(engine: Engine, check: bool = True) -> dict[int, Output]:
    """Step until nothing is left; the outputs of each request joined."""
    whole: dict[int, Output] = {}
    while engine.busy:
        for output in engine.step():
            join(whole, output)
        if check:
            engine.check_integrity()
    return whole


def join(whole: dict[int, Output], output: Output) -> None:
    mine = whole.setdefault(output.id, Output(output.id))
    mine.tokens += output.tokens
    mine.versions += output.versions
    mine.cached, mine.finished, mine.error, mine.hold = output.cached, output.finished, output.error, output.hold
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(output, name) is not None:
            setattr(mine, name, [*(getattr(mine, name) or []), *getattr(output, name)])


def serve(engine: Engine, prompts: list[list[int]], params: Params = GREEDY, **options: Any) -> list[Output]:
    """All prompts at once; their outputs in order."""
    ids = [engine.add(prompt, params, **options) for prompt in prompts]
    outputs = run(engine)
    return [outputs[id] for id in ids]


def alone(model: Transformer, prompt: list[int], count: int, exact: bool = True) -> list[int]:
    """What `perilune.model.generate` makes of a prompt, greedily."""
    model = model.with_parts(EXACT) if exact else model
    return list(generate(model, prompt, count, Sampling(temperature=0), exact=exact))


class Again:
    """What a CUDA graph does to its tensors: everything is computed from the buffers, in place of the first results.

    later: graphs that were captured after it in the same memory. What it computes on the way may lie where they have
    their results.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.result, self.later = work, work(), list[Again]()

    def replay(self) -> None:
        for graph in self.later:
            for old in graph.tensors():
                old.fill_(float("nan") if old.is_floating_point() else -99)
        result = self.work()
        for old, new in zip(self.tensors(), Again.tensors(self, result), strict=True):
            old.copy_(new)

    def tensors(self, result: Any = None) -> list[torch.Tensor]:
        found = []
        for part in (self.result if result is None else result) or ():
            if isinstance(part, torch.Tensor):
                found.append(part)
                continue
            (group,) = part.decoding
            found += [getattr(group, name) for name in ("slots_N", "tail_N", "cached_N", "table_MNW")]
            for drafted in part.drafted:
                found += [x for inputs in drafted for x in vars(inputs).values()]
        return found


class Recomputing(Recorder):
    """Captures on a CPU."""

    def _capture(self, work, pool):  # type: ignore[no-untyped-def]
        graph = Again(work)
        for earlier in self._pools.setdefault(pool, []):
            earlier.later.append(graph)
        self._pools[pool].append(graph)
        return graph, graph.result


def with_graphs(engine: Engine) -> PagedRunner:
    runner = engine.runner
    assert isinstance(runner, PagedRunner)
    runner.use_graphs(Recomputing(torch.device("cpu")))
    return runner


def prompt(length: int, seed: int, vocabulary: int = 64) -> list[int]:
    return random_tokens(length, vocabulary, seed).tolist()


__all__ = ["GREEDY", "alone", "join", "make", "prompt", "run", "serve", "small_model", "tiny_model", "with_graphs"]


def soon(what: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
