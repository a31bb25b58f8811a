"""Decoding from explicit state equals one pass: any split, rollback over the grid, every fork.

Tolerances: 5e-5 absolute on float32 logits of magnitude about 1 (the decode form sums in another order), 1e-10 in
float64, bitwise with exact states and exact parts.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_tokens, tiny_model

from perilune import Error, Sequences, Transformer
from perilune.model import EXACT, SequenceState

LENGTH = 150


def one_pass(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens, Sequences.from_lengths([tokens.shape[0]]))


def in_pieces(model: Transformer, tokens: torch.Tensor, cuts: list[int], state: SequenceState) -> torch.Tensor:
    begin = state.length
    bounds = [begin, *[c for c in sorted(set(cuts)) if begin < c < tokens.shape[0]], tokens.shape[0]]
    with torch.inference_mode():
        logits = [model(tokens[a:b], Sequences.from_lengths([b - a]), [state]) for a, b in itertools.pairwise(bounds)]
    return torch.cat(logits)


def empty(model: Transformer, exact: bool) -> SequenceState:
    return SequenceState.empty(model.config, exact, dtype=model.lm_head.weight.dtype)


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("prefill", [1, 5, 63, 64, 65, 100, 128, 149])
def test_prefill_then_decode_equals_one_pass(family: str, prefill: int) -> None:
    model = tiny_model(family)
    tokens = random_tokens(LENGTH, model.config.vocab_size)
    expected = one_pass(model, tokens)
    logits = in_pieces(model, tokens, list(range(prefill, LENGTH)), empty(model, exact=False))
    assert (logits - expected).abs().max() <= 5e-5
    assert expected.abs().max() > 0.3
    assert expected.isfinite().all()


def test_prefill_then_decode_in_float64(family: str) -> None:
    model = tiny_model(family, torch.float64)
    tokens = random_tokens(LENGTH, model.config.vocab_size)
    logits = in_pieces(model, tokens, list(range(70, LENGTH)), empty(model, exact=False))
    assert (logits - one_pass(model, tokens)).abs().max() <= 1e-10


@pytest.mark.parametrize("prefill", [1, 64, 100, 131])
def test_exact_decode_is_bitwise(family: str, prefill: int) -> None:
    model = tiny_model(family).with_parts(EXACT)
    tokens = random_tokens(140, model.config.vocab_size)
    logits = in_pieces(model, tokens, list(range(prefill, 140)), empty(model, exact=True))
    assert torch.equal(logits, one_pass(model, tokens))


@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 199), max_size=8), exact=st.booleans())
def test_any_chunking(cuts: list[int], exact: bool) -> None:
    model = tiny_model().with_parts(EXACT)
    tokens = random_tokens(200, model.config.vocab_size)
    logits = in_pieces(model, tokens, cuts, empty(model, exact))
    expected = one_pass(model, tokens)
    assert torch.equal(logits, expected) if exact else (logits - expected).abs().max() <= 5e-5


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("at", [64, 67, 72, 130])
def test_rollback_over_the_grid(exact: bool, count: int, at: int) -> None:
    model = tiny_model().with_parts(EXACT)
    tokens = random_tokens(LENGTH, model.config.vocab_size)
    wrong = random_tokens(LENGTH, model.config.vocab_size, seed=9)
    state = empty(model, exact)
    drafted = torch.cat([tokens[: at - count], wrong[at - count : at]])
    in_pieces(model, drafted, [at - count], state)
    state.rollback(count)
    assert state.length == at - count
    logits = in_pieces(model, tokens, list(range(at - count, LENGTH)), state)
    expected = one_pass(model, tokens)[at - count :]
    assert torch.equal(logits, expected) if exact else (logits - expected).abs().max() <= 5e-5


def test_rollback_of_single_steps_and_again() -> None:
    model = tiny_model().with_parts(EXACT)
    tokens = random_tokens(LENGTH, model.config.vocab_size)
    state = empty(model, exact=True)
    in_pieces(model, tokens[:75], [60, *range(61, 75)], state)
    state.rollback(5)
    state.rollback(3)
    with pytest.raises(Error, match="rollback"):
        state.rollback(1)
    logits = in_pieces(model, tokens, [70, 71], state)
    assert torch.equal(logits, one_pass(model, tokens)[67:])


@pytest.mark.parametrize("exact", [False, True])
def test_forks_continue_from_the_same_instant_and_diverge(exact: bool) -> None:
    model = tiny_model().with_parts(EXACT)
    vocab = model.config.vocab_size
    trunk = random_tokens(90, vocab)
    state = empty(model, exact)
    in_pieces(model, trunk, [80], state)
    branches = [torch.cat([trunk, random_tokens(50, vocab, seed)]) for seed in (1, 2, 3)]
    forks = [state.fork() for _ in branches]
    # Interleaved, so that a shared buffer written by one branch would show in another.
    steps = [[] for _ in branches]
    for t in range(90, 140):
        for fork, branch, out in zip(forks, branches, steps, strict=True):
            with torch.inference_mode():
                out.append(model(branch[t : t + 1], Sequences.from_lengths([1]), [fork]))
    assert state.length == 90
    for branch, out in zip([*branches], steps, strict=True):
        expected = one_pass(model, branch)[90:]
        logits = torch.cat(out)
        assert torch.equal(logits, expected) if exact else (logits - expected).abs().max() <= 5e-5


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model = tiny_model().with_parts(EXACT)
    vocab = model.config.vocab_size
    lengths = [70, 0, 1, 129, 64]
    tokens = [random_tokens(n, vocab, seed) for seed, n in enumerate(lengths)]
    with torch.inference_mode():
        packed = model(torch.cat(tokens), Sequences.from_lengths(lengths)).split(lengths)
    for mine, alone in zip(packed, tokens, strict=True):
        if alone.numel():
            assert torch.equal(mine, one_pass(model, alone))


def test_mixed_prefill_and_decode_in_one_call() -> None:
    model = tiny_model().with_parts(EXACT)
    vocab = model.config.vocab_size
    documents = [random_tokens(n, vocab, seed) for seed, n in enumerate((80, 150, 30))]
    states = [empty(model, exact=True) for _ in documents]
    outputs = [[] for _ in documents]
    with torch.inference_mode():
        for lengths in ((20, 100, 0), (1, 37, 29), (59, 0, 1), (0, 13, 0)):
            pieces = [d[s.length : s.length + n] for d, s, n in zip(documents, states, lengths, strict=True)]
            logits = model(torch.cat(pieces), Sequences.from_lengths(lengths), states)
            for out, piece in zip(outputs, logits.split(lengths), strict=True):
                out.append(piece)
    for document, out in zip(documents, outputs, strict=True):
        assert torch.equal(torch.cat(out), one_pass(model, document))


def test_later_tokens_never_change_earlier_logits() -> None:
    model = tiny_model().with_parts(EXACT)
    tokens = random_tokens(130, model.config.vocab_size)
    expected = one_pass(model, tokens)
    for t in (1, 40, 64, 100):
        other = tokens.clone()
        other[t:] = random_tokens(130 - t, model.config.vocab_size, seed=7)
        assert torch.equal(one_pass(model, other)[:t], expected[:t])


def test_state_has_the_promised_shape() -> None:
    model = tiny_model()
    state = empty(model, exact=False)
    in_pieces(model, random_tokens(200, model.config.vocab_size), [], state)
    kda = [layer for layer in state.layers if hasattr(layer, "boundary")]
    assert {layer.boundary for layer in kda} == {192}
    assert {layer.origin for layer in kda} == {"prefill"}
    in_pieces(model, random_tokens(270, model.config.vocab_size), list(range(200, 270)), state)
    kda = [layer for layer in state.layers if hasattr(layer, "boundary")]
    assert {layer.boundary for layer in kda} == {256}
    assert {layer.origin for layer in kda} == {"decode"}
    assert all(layer.conv_WC.shape[0] == 11 for layer in kda)


@pytest.mark.parametrize(
    ("lengths", "states", "named"),
    [([3], 2, "state holds"), ([4], 1, "tokens has 3")],
)
def test_what_does_not_fit_is_refused(lengths: list[int], states: int, named: str) -> None:
    model = tiny_model()
    with pytest.raises(Error, match=named):
        model(torch.arange(3), Sequences.from_lengths(lengths), [empty(model, False) for _ in range(states)])


def test_starts_must_match_the_states() -> None:
    model = tiny_model()
    with pytest.raises(Error, match="starts"):
        model(torch.arange(3), Sequences.from_lengths([3], [5]), [empty(model, False)])
    with pytest.raises(Error, match="integers"):
        model(torch.zeros(3), Sequences.from_lengths([3]))
    for bad in (-1, model.config.vocab_size):
        with pytest.raises(Error, match=f"tokens holds id {bad}"):
            model(torch.tensor([0, bad]), Sequences.from_lengths([2]))


def test_one_state_given_twice_is_refused() -> None:
    model = tiny_model()
    state = empty(model, False)
    with pytest.raises(Error, match="same SequenceState twice"):
        model(torch.arange(4), Sequences.from_lengths([2, 2]), [state, state])
