"""Engine against `perilune.model.generate`: bitwise logits in exact mode, so equal tokens; and against transformers.

The paged runner sums in another order: logits within 5e-5 (float32), 1e-10 (float64), and equal greedy tokens on these
models, whose best and second best logits are further apart.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from engines import GREEDY, alone, make, prompt, run, serve, small_model, tiny_model

from perilune import Error
from perilune.model import save
from perilune.serve import EngineConfig, Params
from perilune.serve.cache.placement import Placement

LENGTHS = [200, 150, 70, 300, 64, 5, 1, 128]


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_greedy_tokens_are_those_of_generate(family: str, exact: bool, drafts: int) -> None:
    model = tiny_model(family)
    prompts = [prompt(n, seed, model.config.vocab_size) for seed, n in enumerate(LENGTHS)]
    prompts[1] = prompts[0][:130] + prompts[1][:40]  # shares a prefix with the first
    prompts[2] = [3, 4, 5, 6] * 17  # repeats itself: prompt lookup has something to say
    engine = make(model, exact, drafts=drafts)
    for prompt_, output in zip(prompts, serve(engine, prompts), strict=True):
        assert output.tokens == alone(model, prompt_, 8, exact)
        assert output.finished == "length"


@pytest.mark.parametrize("exact", [True, False])
def test_the_cache_is_used_and_changes_nothing(exact: bool) -> None:
    model = small_model()
    engine = make(model, exact)
    first = prompt(200, 0)
    assert serve(engine, [first])[0].cached == 0
    extended = first + prompt(30, 1)
    again, longer = serve(engine, [first, extended])
    assert (again.cached, longer.cached) == (192, 192)
    assert again.tokens == alone(model, first, 8, exact)
    assert longer.tokens == alone(model, extended, 8, exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 191, 192, 193])
def test_a_prompt_again_and_its_extension_hit_at_every_length(exact: bool, length: int) -> None:
    """Lengths at, below and above the grid: a boundary capped at length - 1 must not lose the extension's hit."""
    model = small_model()
    engine = make(model, exact)
    first = prompt(length, 0)
    serve(engine, [first])
    again, longer = (serve(engine, [p])[0] for p in (first, [*first, 1, 2, 3]))
    assert again.cached == longer.cached == (length - 1) // 64 * 64
    assert again.tokens == alone(model, first, 8, exact)
    assert longer.tokens == alone(model, [*first, 1, 2, 3], 8, exact)


@pytest.mark.parametrize("exact", [True, False])
def test_the_next_turn_begins_where_the_answer_ended(exact: bool) -> None:
    model = small_model()
    engine = make(model, exact, placement=Placement(min_turn=1))
    first = prompt(100, 0)
    answer = serve(engine, [first], Params(max_tokens=70, temperature=0))[0].tokens
    following = first + answer + prompt(20, 1)
    # The answer's last token was sampled but never computed; exact states lie on the grid only.
    expected = 128 if exact else 169
    output = serve(engine, [following])[0]
    assert output.cached == expected
    assert output.tokens == alone(model, following, 8, exact)


def test_float64_paged_logprobs_equal_a_full_pass() -> None:
    model = small_model(dtype=torch.float64)
    engine = make(model, exact=False)
    tokens = prompt(150, 3)
    params = Params(max_tokens=40, temperature=0, logprobs=2, prompt_logprobs=0)
    (output,) = serve(engine, [tokens], params)
    from perilune import Sequences

    whole = tokens + output.tokens
    with torch.inference_mode():
        logits = model(torch.tensor(whole), Sequences.from_lengths([len(whole)]))
    scores = torch.log_softmax(logits, -1)
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    assert [entry.token for entry in output.prompt_logprobs] == tokens[1:]
    assert [entry.token for entry in output.logprobs] == output.tokens
    given = [entry.logprob for entry in [*output.prompt_logprobs, *output.logprobs]]
    expected = scores[torch.arange(len(whole) - 1), torch.tensor(whole[1:])]
    assert (torch.tensor(given, dtype=torch.float64) - expected).abs().max() <= 1e-10
    best = output.logprobs[0].top
    assert [token for token, _ in best] == scores[149].topk(2).indices.tolist()
    assert best[0][0] == output.tokens[0]


@pytest.mark.parametrize("exact", [True, False])
def test_prompt_logprobs_compute_the_whole_prompt_even_when_it_is_cached(exact: bool) -> None:
    engine = make(small_model(), exact)
    tokens = prompt(150, 3)
    params = Params(max_tokens=2, temperature=0, prompt_logprobs=1)
    first, again = (serve(engine, [tokens], params)[0] for _ in range(2))
    assert again.cached == 0
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 149
    if exact:
        assert first.prompt_logprobs == again.prompt_logprobs


@pytest.mark.parametrize("drafts", [0, 7])
@pytest.mark.parametrize("exact", [True, False])
def test_a_stop_token_ends_the_answer_and_the_state_is_exactly_before_it(exact: bool, drafts: int) -> None:
    model = small_model()
    # A text that repeats itself makes drafts run past the stop token.
    tokens = [9, 8, 7, 6, 5] * 20
    free = alone(model, tokens, 30, exact)
    stop = free[12]
    end = free.index(stop) + 1
    engine = make(model, exact, drafts=drafts, placement=Placement(min_turn=1))
    (output,) = serve(engine, [tokens], Params(max_tokens=30, temperature=0, stop_ids=(stop,)))
    assert (output.tokens, output.finished) == (free[:end], "stop")
    following = [*tokens, *output.tokens, 3, 3]
    (then,) = serve(engine, [following])
    # The stop token itself is computed where the next step begins before it is known.
    state = len(tokens) + end - (1 if drafts else 0)
    assert then.cached == ((len(tokens) + end - 1) // 64 * 64 if exact else state)
    assert then.tokens == alone(model, following, 8, exact)


@pytest.mark.parametrize("exact", [True, False])
def test_drafts_are_accepted_and_wrong_ones_leave_no_trace(exact: bool) -> None:
    model = small_model()

    class Oracle:
        """Right for `right` tokens, then wrong: every verify step rolls back."""

        def __init__(self, answers: dict[int, list[int]], right: int) -> None:
            self.answers, self.right = answers, right

        def propose(self, requests, width):  # type: ignore[no-untyped-def]
            rows = []
            for request in requests:
                made = request.length - request.prompt
                row = self.answers[request.id][made : made + width]
                rows.append([t if i < self.right else (t + 1) % 64 for i, t in enumerate(row)])
            return rows

    prompts = [prompt(90, 0), prompt(61, 1), prompt(128, 2)]
    expected = {i: alone(model, p, 70, exact) for i, p in enumerate(prompts)}
    for right in (0, 1, 3, 7):
        engine = make(model, exact, drafts=7, drafter=Oracle(expected, right))
        outputs = serve(engine, prompts, Params(max_tokens=70, temperature=0))
        assert {i: output.tokens for i, output in enumerate(outputs)} == expected
        steps = engine.counters.steps
        assert steps <= 8 + 70 // (1 + right) + 12, (right, steps)


def test_rows_in_fp8_stay_close() -> None:
    """e4m3 has 3 bits of mantissa: rows are off by up to 6 %, which these logits of magnitude 1 feel by some 0.1."""
    model = small_model()
    params = Params(max_tokens=30, temperature=0, logprobs=0)
    start = prompt(200, 0)
    full, fp8 = (serve(make(model, False, kv=kv), [start], params)[0] for kv in ("model", "fp8"))
    assert full.logprobs is not None
    assert fp8.logprobs is not None
    same = next((i for i in range(30) if full.tokens[i] != fp8.tokens[i]), 30)
    off = [abs(a.logprob - b.logprob) for a, b in zip(full.logprobs[:same], fp8.logprobs[:same], strict=True)]
    assert same >= 1
    assert 0 < max(off) < 0.3
    engines = [make(model, False, kv=kv) for kv in ("model", "fp8")]
    assert engines[0].layout.digest != engines[1].layout.digest
    assert engines[1].cache.geometry.token_bytes * 4 == engines[0].cache.geometry.token_bytes


def test_admission_refuses_what_can_never_run_and_names_the_field() -> None:
    model = small_model()
    engine = make(model, pages=20)
    with pytest.raises(Error, match=r"needs 32 pages; allowed: 20"):
        engine.add(prompt(1024, 0), Params(max_tokens=1024))
    with pytest.raises(Error, match="tokens holds id 64"):
        engine.add([64])
    with pytest.raises(Error, match="tokens is empty"):
        engine.add([])
    with pytest.raises(Error, match="stop_ids holds id -1"):
        engine.add([1], Params(stop_ids=(-1,)))
    with pytest.raises(Error, match="max_tokens is 0"):
        Params(max_tokens=0)
    with pytest.raises(Error, match=r"engine\.drafts is 8"):
        EngineConfig(1, drafts=8)
    with pytest.raises(Error, match="token_budget is 100; must be >= 128"):
        EngineConfig(1, token_budget=100)
    with pytest.raises(Error, match="exact needs float32"):
        make(model.to(torch.float32), kv="fp8")
    assert not engine.busy


def test_a_request_ends_wherever_it_stands() -> None:
    now = [0.0]
    engine = make(small_model(), slots=1, clock=lambda: now[0])
    running, waiting = (engine.add(prompt(100, i), Params(max_tokens=50, temperature=0)) for i in range(2))
    late = engine.add(prompt(100, 2), GREEDY, deadline=5.0)
    engine.step()
    engine.abort(running)
    engine.abort(waiting)
    engine.abort(10**6)
    now[0] = 6.0
    outputs = run(engine)
    assert {id: outputs[id].finished for id in (running, waiting, late)} == {
        running: "abort",
        waiting: "abort",
        late: "deadline",
    }
    assert engine.cache.leases == 0


def test_transformers_continues_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_model("kimi_linear")
    save(model, tmp_path)
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = prompt(100, 0, model.config.vocab_size)
    ids = torch.tensor([tokens])
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    engine = make(model, exact=False)
    (output,) = serve(engine, [tokens], dataclasses.replace(GREEDY, max_tokens=12))
    assert output.tokens == expected[0, 100:].tolist()
