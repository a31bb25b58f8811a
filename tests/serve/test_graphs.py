"""Buckets, padding and static buffers of the decode graphs, with a graph that replays by running its work again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines import alone, make, prompt, serve, small_model

from perilune.serve import Engine, Params
from perilune.serve.graphs import DecodeGraphs, Step, _bucket
from perilune.serve.runner_paged import PagedRunner


class Again:
    """What a CUDA graph does to its tensors: everything is computed from the buffers, in place of the first results."""

    def __init__(self, work: Callable[[], Step]) -> None:
        self.work = work
        self.batch, self.x_TD = work()

    def replay(self) -> None:
        batch, x_TD = self.work()
        self.x_TD.copy_(x_TD)
        (old,), (new,) = self.batch.decoding, batch.decoding
        for name in ("slots_N", "tail_N", "cached_N", "table_MNW"):
            getattr(old, name).copy_(getattr(new, name))
        self.batch.drafted[:] = batch.drafted


class Replayed(DecodeGraphs):
    def _record(self, work):  # type: ignore[no-untyped-def]
        graph = Again(work)
        return graph, graph.batch, graph.x_TD


def with_graphs(engine: Engine) -> Replayed:
    runner = engine.runner
    assert isinstance(runner, PagedRunner)
    graphs = Replayed(runner._compute, runner._locate, runner._tables, torch.device("cpu"))
    runner._graphs = graphs
    return graphs


@pytest.mark.parametrize("drafts", [0, 5])
def test_replayed_steps_give_the_tokens_of_generate(drafts: int) -> None:
    model = small_model()
    engine = make(model, False, slots=7, drafts=drafts, token_budget=512)
    graphs = with_graphs(engine)
    prompts = [prompt(60 + 7 * i, i) for i in range(5)] + [[1, 2, 3, 4] * 20]
    lengths = [5, 9, 30, 70, 90, 80]  # batches shrink through the buckets, over page and grid boundaries
    ids = [engine.add(p, Params(max_tokens=n, temperature=0)) for p, n in zip(prompts, lengths, strict=True)]
    answers: dict[int, list[int]] = {id: [] for id in ids}
    while engine.busy:
        for output in engine.step():
            answers[output.id] += output.tokens
        engine.check_integrity()
    for id, start, count in zip(ids, prompts, lengths, strict=True):
        assert answers[id] == alone(model, start, count, exact=False)
    assert {key[0] for key in graphs._captured} == {1, 2, 4, 8}
    if drafts:
        assert max(key[1] for key in graphs._captured) > 1


def test_capturing_changes_no_state() -> None:
    """Slots, arena and tails are the same before and after a capture, which runs on padding."""
    model = small_model()
    engine = make(model, False, slots=3, token_budget=512)
    engine.add(prompt(70, 0), Params(max_tokens=30, temperature=0))
    for _ in range(4):
        engine.step()
    runner = engine.runner
    assert isinstance(runner, PagedRunner)
    pools = [
        x for pool in runner.slots for x in (pool.matrix_SHKV, pool.window_S3C, pool.tail.k_SHRK, pool.tail.u_SHRV)
    ]
    before = [x.clone() for x in [*pools, engine.pools.bytes_PB]]
    with torch.inference_mode():
        with_graphs(engine)._capture(2, 1, 16)
        with_graphs(engine)._capture(4, 3, 32)
    assert all(torch.equal(x, y) for x, y in zip([*pools, engine.pools.bytes_PB], before, strict=True))


def test_buckets() -> None:
    assert [_bucket(n) for n in (1, 2, 3, 5, 31, 32, 33, 64, 65, 200)] == [1, 2, 4, 8, 32, 32, 64, 64, 96, 224]


def test_a_batch_of_sampled_answers_is_that_of_eager_steps() -> None:
    model = small_model()
    params = Params(max_tokens=20, temperature=0.8, seed=5)
    prompts = [prompt(40, i) for i in range(3)]
    plain = make(model, False)
    replayed = make(model, False)
    with_graphs(replayed)
    assert [o.tokens for o in serve(plain, prompts, params)] == [o.tokens for o in serve(replayed, prompts, params)]
