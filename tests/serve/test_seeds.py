"""Public bugs of other engines that a hybrid engine can have, each as a test of ours (serving notes, numbered there).

Not listed here because another test is about nothing else: a prompt of exactly k units and its extension, a resend of
the same prompt, stop tokens and drafts, transferred segments (test_engine, test_control); leases, pins, host tier,
quarantine, fluctuating prefixes (test_cache); lost slots and pages (test_scheduler).
"""

from __future__ import annotations

import pytest
from engines import GREEDY, alone, make, prompt, run, serve, small_model
from test_cache import SMALL, chain
from test_cache import request as ask

from perilune.ops.kda.decode import GRID
from perilune.serve import Params
from perilune.serve.cache import Placement, PrefixCache, check_integrity
from perilune.serve.cache.geometry import GRID as CACHE_GRID

BOTH = pytest.mark.parametrize("exact", [True, False])


def test_checkpoints_lie_on_the_grid_of_the_kernel() -> None:
    """17: a grid of its own changes the numerics of what follows."""
    assert GRID == CACHE_GRID == 64


@BOTH
def test_the_third_sibling_hits_where_the_first_two_parted(exact: bool) -> None:
    """3: a checkpoint in each unique suffix gives no reuse; it belongs where the shared text ends."""
    model = small_model()
    engine = make(model, exact)
    shared = prompt(200, 0)
    starts = [shared + prompt(100, 1 + i) for i in range(4)]
    hits = [serve(engine, [start])[0].cached for start in starts]
    assert hits == [0, 0, 192, 192]
    assert engine.counters.stateless == 192  # what the second request found without a state
    assert serve(engine, [starts[3]])[0].tokens == alone(model, starts[3], 8, exact)


def hits(cache: PrefixCache, prompts: list[list[int]]) -> list[int]:
    return [cache.match(chain(tokens)).depth for tokens in prompts]


def test_a_busy_session_renews_the_state_it_uses_and_none_above_it() -> None:
    """6: where a hit renews every state on its way, one long session drives out all that wait for their next turn."""
    turns = [list(range(8 * i + 1)) for i in range(1, 7)]
    waiting = [list(range(100 * i, 100 * i + 17)) for i in (1, 2)]
    cache = PrefixCache(SMALL, 60 * SMALL.page_bytes, 0, Placement(keep=0), "lru")
    for now, tokens in enumerate([*turns, *waiting]):
        ask(cache, tokens, float(now))
    for now in range(20, 30):
        assert ask(cache, turns[-1], float(now)) == 48
    lost = []
    for i in range(8):
        ask(cache, list(range(1000 * i + 1000, 1000 * i + 1017)), 30.0 + i)
        lost += [depth for depth in (8, 16, 24, 32, 40, 48) if cache.match(chain(list(range(depth + 1)))).depth < depth]
        if hits(cache, waiting) != [16, 16]:
            break
    assert set(lost) == {8, 16, 24, 32, 40}  # the states that the busy session has left behind went first
    assert hits(cache, [turns[-1]]) == [48]


@pytest.mark.parametrize("eviction", ["auto", "gain", "lru"])
def test_a_session_that_grows_leaves_two_states_and_drives_nobody_out(eviction: str) -> None:
    """6: there is room for the rows of its 20 turns and two of its states, not for one state a turn."""
    turns = [list(range(8 * i + 1)) for i in range(1, 21)]
    waiting = [list(range(1000 * i, 1000 * i + 17)) for i in (1, 2, 3)]
    pages = len(waiting) * (4 + SMALL.state_pages) + 40 + 3 * SMALL.state_pages  # a third while a turn is left
    cache = PrefixCache(SMALL, pages * SMALL.page_bytes, 0, Placement(), eviction)
    for now, tokens in enumerate([*waiting, *turns]):
        ask(cache, tokens, float(now))
    assert hits(cache, [*waiting, turns[-1]]) == [16, 16, 16, 160]


@BOTH
def test_a_prompt_that_is_sent_again_hits_every_time(exact: bool) -> None:
    """12: a state stored on misses only gives a hit every other time."""
    engine = make(small_model(), exact)
    start = prompt(130, 0)
    assert [serve(engine, [start])[0].cached for _ in range(5)] == [0, 128, 128, 128, 128]


@BOTH
def test_a_state_that_has_the_last_token_in_it_is_of_no_use_to_its_prompt(exact: bool) -> None:
    """32: the last token is computed for its logits; a state with it inside would take it twice."""
    model = small_model()
    engine = make(model, exact)
    start = prompt(128, 0)
    serve(engine, [start + prompt(64, 1)], marks=(64, 128))
    (output,) = serve(engine, [start])
    assert output.cached == 64
    assert output.tokens == alone(model, start, 8, exact)


@BOTH
def test_a_prefix_below_the_shortest_that_can_hit_is_told(exact: bool) -> None:
    """2: a cache that cannot hit looks like a cold one."""
    engine = make(small_model(), exact, match_unit=128, page_tokens=128)
    assert engine.cache.min_hittable_tokens() == 128
    assert [serve(engine, [prompt(n, 0)])[0].cached for n in (128, 128, 129, 129)] == [0, 0, 0, 128]


@BOTH
def test_a_boundary_before_the_generation_prompt_can_be_marked(exact: bool) -> None:
    """13: the next turn does not contain the generation prompt, so a state behind it is of no use."""
    model = small_model()
    engine = make(model, exact)
    history, ending = prompt(192, 0), prompt(70, 1)
    serve(engine, [history + ending], marks=(192,))
    following = history + prompt(80, 2)
    (output,) = serve(engine, [following])
    assert output.cached == 192
    assert output.tokens == alone(model, following, 8, exact)
    unmarked = make(model, exact)
    serve(unmarked, [history + ending])
    assert serve(unmarked, [following])[0].cached == 0


@BOTH
def test_requests_are_served_where_nothing_can_be_cached(exact: bool) -> None:
    """15: a full cache must not fail a request. Four pages: the request's own three, and none for a state."""
    model = small_model()
    engine = make(model, exact, pages=3, slots=1)
    for seed in (0, 0, 1):
        (output,) = serve(engine, [prompt(150, seed)])
        assert (output.finished, output.cached) == ("length", 0)
        assert output.tokens == alone(model, prompt(150, seed), 8, exact)


@BOTH
def test_warm_starts_with_drafts(exact: bool) -> None:
    """9, 20, 22, 25: drafts over page and grid boundaries right after a hit, in a slot that others have used."""
    model = small_model()
    engine = make(model, exact, drafts=7, slots=2, placement=Placement(min_turn=1))
    start = [1, 2, 3, 4, 5] * 12  # 60 tokens: the first verified row crosses a page
    long = Params(max_tokens=80, temperature=0)
    whole, other = alone(model, start, 148, exact), alone(model, prompt(70, 1), 80, exact)
    assert serve(engine, [start], long)[0].tokens == whole[:80]
    for cut in (3, 4, 5, 67, 68):
        again, beside = serve(engine, [start + whole[:cut], prompt(70, 1)], long)
        assert again.tokens == whole[cut : cut + 80]
        assert beside.tokens == other
    assert engine.counters.cached > 0
    assert engine.counters.drafted > 0


@BOTH
def test_computed_tokens_never_include_drafts(exact: bool) -> None:
    """18: drafts counted as computed free or publish states too early."""

    class Wrong:
        def propose(self, requests, width):  # type: ignore[no-untyped-def]
            return [[(r.tokens[-1] + 1) % 64] * width for r in requests]

    engine = make(small_model(), exact, drafts=7, drafter=Wrong(), placement=Placement(min_turn=1))
    id = engine.add(prompt(60, 0), Params(max_tokens=20, temperature=0))
    while engine.busy:
        engine.step()
        for request in engine.scheduler.requests():
            assert request.computed <= request.length - 1
            assert (request.id, request.length) <= (id, 80)
        engine.check_integrity()
    depths = [node.end for node in engine.cache.tree.nodes() if node.state is not None]
    assert depths == ([64] if exact else [79])


@BOTH
def test_the_published_layout(exact: bool) -> None:
    """Figure 12 of the Kimi-K3 report: a 6144-token page filled to 2800 tokens hits at 2560; 240 are computed again."""
    model = small_model()
    engine = make(model, exact, pages=8, page_tokens=6144, match_unit=512, token_budget=4096)
    start = prompt(2800, 0)
    few = Params(max_tokens=2, temperature=0)
    id = engine.add(start, Params(max_tokens=40, temperature=0))
    while engine.counters.prefill < 2800:
        engine.step()
    # The first request goes on writing behind 2800 in the page that the second one hits.
    writer = next(request for request in engine.scheduler.requests() if request.id == id)
    before, copied = engine.counters.prefill, []
    engine.runner.copy_pages, old = (lambda a, b: (copied.append((a, b)), old(a, b))), engine.runner.copy_pages  # type: ignore[method-assign]
    other = engine.add([*start, *prompt(30, 7)], few)
    outputs = run(engine)
    assert outputs[other].cached == 2560
    assert engine.counters.prefill - before == 240 + 30
    ((shared,), (own,)) = next((a, b) for a, b in copied if len(a))
    assert shared != own
    assert outputs[other].tokens == alone(model, [*start, *prompt(30, 7)], 2, exact)
    assert writer.tokens[2800:] == alone(model, start, 40, exact)
    check_integrity(engine.cache)


@BOTH
def test_tenants_do_not_see_each_other(exact: bool) -> None:
    engine = make(small_model(), exact)
    start = prompt(130, 0)
    assert [serve(engine, [start], GREEDY, salt=salt)[0].cached for salt in ("a", "b", "a", "b")] == [0, 0, 128, 128]
