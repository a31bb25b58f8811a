"""Buckets, padding and static buffers of the decode graphs, with a graph that replays by running its work again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from engines import alone, make, prompt, serve, small_model, with_graphs

from perilune import Sequences
from perilune.model.mla import MlaLayer
from perilune.model.paged import prefix_piece
from perilune.model.paged_static import ROWS, Piece, Static
from perilune.ops.kda.triton_layout import checkpoint_slots, layout
from perilune.serve import Params
from perilune.serve.cache import Placement
from perilune.serve.graphs import _bucket
from perilune.serve.runner_paged import PagedRunner


@pytest.mark.parametrize("drafts", [0, 5])
def test_replayed_steps_give_the_tokens_of_generate(drafts: int) -> None:
    model = small_model()
    engine = make(model, False, slots=7, drafts=drafts, token_budget=512)
    runner = with_graphs(engine)
    graphs = runner._graphs
    assert graphs is not None
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
        x[:-1]  # the last slot is the captures'
        for pool in runner.slots
        for x in (pool.matrix_SHKV, pool.window_S3C, pool.tail.k_SHRK, pool.tail.u_SHRV)
    ]
    before = [x.clone() for x in [*pools, engine.pools.bytes_PB]]
    with torch.inference_mode():
        for shape in ((2, 1, 16), (4, 3, 32)):
            assert with_graphs(engine)._graphs is not None
            with_graphs(engine)._graphs._capture(*shape)  # type: ignore[union-attr]
        for rows in (64, 192):
            with_graphs(engine)._prefills._capture(rows, 16)  # type: ignore[union-attr]
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


@pytest.mark.parametrize("seed", range(3))
def test_short_prompts_as_graphs_give_the_answers_of_eager_steps(seed: int) -> None:
    """Turns that go on anywhere, after hits on the grid and off it, beside answers on their way: float64, so that the
    other order of sums decides nothing. Free memory is NaN, exports are found again."""
    model = small_model(dtype=torch.float64)
    placement = Placement(min_turn=1)
    plain = make(model, False, 900, placement=placement, token_budget=512)
    replayed = make(model, False, 900, placement=placement, token_budget=512)
    runner = with_graphs(replayed)
    dice = random.Random(seed)
    turns = [prompt(dice.randrange(1, 220), 10 * seed + i) for i in range(5)]
    params = Params(max_tokens=6, temperature=0, logprobs=0, prompt_logprobs=None)
    for _ in range(3):
        expected, found = serve(plain, turns, params), serve(replayed, turns, params)
        for one, two in zip(expected, found, strict=True):
            assert (one.tokens, one.cached, one.finished) == (two.tokens, two.cached, two.finished)
            assert one.logprobs is not None
            assert two.logprobs is not None
            for a, b in zip(one.logprobs, two.logprobs, strict=True):
                assert abs(a.logprob - b.logprob) < 1e-9
        turns = [
            [*turn, *answer.tokens, *prompt(dice.choice([1, 2, 63, 64, 65, 130]), dice.randrange(1000))]
            for turn, answer in zip(turns, expected, strict=True)
        ]
        turns += [turns[0][: dice.randrange(1, len(turns[0]))], turns[1][:-1]]
    assert runner._prefills is not None
    assert len({key[0] for key in runner._prefills._captured}) > 1


def test_a_piece_finds_its_place_in_the_bucket() -> None:
    """Index tensors against the layout of the two documents that they describe, for every place of a short piece."""
    for rows, tokens, start in [
        (64, 1, 0),
        (64, 64, 64),
        (128, 65, 63),
        (128, 100, 200),
        (64, 40, 130),
        (192, 129, 127),
    ]:
        for export in [None, *range(start // 64 * 64 + 64, start + tokens, 64)]:
            piece = Piece(rows, tokens, start, export)
            static = Static.of(rows, torch.tensor(piece.numbers()))
            padding = rows - tokens
            cut = Sequences.from_lengths([padding, tokens], [0, start])
            wanted = layout(cut, torch.device("cpu"))
            assert static.cu_3.tolist() == wanted.cu.tolist() == [0, padding, rows]
            assert static.first_3.tolist() == wanted.first_chunk.tolist()
            assert static.shift_2.tolist() == wanted.shift.tolist()
            assert static.table_X3[: wanted.chunks].tolist() == wanted.table.tolist()
            # Kernels read rows of every chunk, those without a use included: there is one to read.
            for begin, first, end in static.table_X3.tolist():
                assert max(begin, first) < min(begin + 64, end)
                assert 0 <= first < end <= rows
            assert static.documents.ids_T.tolist() == cut.ids_T.tolist()
            if export is not None:
                slots, count = checkpoint_slots(cut.lengths, cut.starts, ((), (export,)), torch.device("cpu"))
                assert count == 1
                assert static.slots_X[: wanted.chunks].tolist() == slots.tolist()
            assert static.slots_X[wanted.chunks :].unique().tolist() == [-1]
            lengths = piece.lengths()
            assert len(lengths) == rows // ROWS
            assert lengths[-1] == start + tokens
            assert all(b - a == ROWS for a, b in pairwise(lengths) if a > 0)


def test_a_long_prefix_is_expanded_in_large_pieces_of_bounded_bytes() -> None:
    (attn,) = (layer.attn for layer in small_model().layers if isinstance(layer.attn, MlaLayer))
    row_bytes = attn.heads * (attn.nope + attn.rope + attn.v_dim) * 2
    for sequences in (1, 2, 50, 10**6):
        piece = prefix_piece(sequences, attn)
        assert piece % 8192 == 0
        assert piece == 8192 or sequences * piece * row_bytes <= 2**31 < sequences * (piece + 8192) * row_bytes
