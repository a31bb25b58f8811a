"""Context parallelism against one process with all tokens, in float64.

Limits: outputs 1e-14 and gradients 1e-13 of the largest value. What differs is that a state is folded from maps instead
of being carried token by token, a few units of rounding a span.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops import kda as kda_ops
from perilune.ops.conv import short_conv
from perilune.ops.kda import recurrence
from perilune.ops.sequences import Sequences
from perilune.parallel import fragments, mesh
from perilune.parallel.context import context_conv, context_latents, kcp
from perilune.parallel.fragments import choose_way, exchange_bytes
from perilune.parallel.slices import Slice, cut_stream, take_slice

sys.path.insert(0, str(Path(__file__).parent))

from test_expert_training import spawn

HEADS, KEY, VALUE = 3, 8, 6
GATE = Gate("safe", -5.0)


@dataclass(frozen=True)
class Case:
    """Documents, where the stream is cut, and how."""

    lengths: tuple[int, ...]
    ranks: int
    cuts: tuple[int, ...] | None = None
    order: str = "contiguous"
    way: str | None = None
    starts: tuple[int, ...] | None = None
    initial: bool = False
    scan: str = "serial"

    def whole(self) -> Sequences:
        return Sequences.from_lengths(self.lengths, self.starts)


CASES = {
    "even": Case((37, 51, 40), 2),
    "even on 4": Case((37, 51, 40), 4),
    "zigzag": Case((37, 51, 40), 2, order="zigzag"),
    "zigzag on 4, gathered": Case((150, 9, 66), 4, order="zigzag", way="gather"),
    "zigzag on 4, by heads": Case((150, 9, 66), 4, order="zigzag", way="heads"),
    "by heads on 2": Case((37, 51, 40), 2, way="heads"),
    "starts on a cut": Case((37, 51, 40), 4, (0, 37, 60, 88, 128)),
    "inside one document": Case((128,), 4, (0, 30, 64, 100, 128)),
    "many documents a rank": Case((3, 1, 5, 60, 2, 2, 30, 1, 1), 4),
    "one token": Case((10,), 4, (0, 5, 6, 7, 10)),
    "two and three tokens": Case((37, 51, 40), 4, (0, 40, 42, 45, 128)),
    "empty ranks": Case((37, 51, 40), 4, (0, 50, 50, 50, 128)),
    "first and last empty": Case((37, 51, 40), 4, (0, 0, 60, 128, 128)),
    "empty documents": Case((37, 0, 51, 0, 40, 0), 4, (0, 37, 37, 100, 128)),
    "states before and after": Case((37, 51, 40), 4, initial=True),
    "off the grid": Case((70, 51, 40), 2, starts=(100, 0, 37), initial=True),
    "tiles": Case((2600, 1500), 2, (0, 2048, 4100), scan="segmented", initial=True),
    "tiles on 4": Case((2600, 1500), 4, (0, 1024, 2048, 3624, 4100), scan="segmented", initial=True),
    "tiles, zigzag": Case((4096,), 2, (0, 1024, 2048, 3072, 4096), order="zigzag", scan="segmented"),
    "off the tiles": Case((37, 51, 40), 4, scan="segmented", initial=True),
    "on the grid": Case((192, 128), 4, (0, 64, 128, 192, 320)),
}


@lru_cache
def tensors(case: Case) -> dict[str, torch.Tensor]:
    """Inputs of all tokens and cotangents."""
    T, N = sum(case.lengths), len(case.lengths)
    generator = torch.Generator().manual_seed(T + N)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(T, HEADS, KEY),
        "k": draw(T, HEADS, KEY),
        "v": draw(T, HEADS, VALUE),
        "g": draw(T, HEADS, KEY) - 1,
        "beta": draw(T, HEADS),
        "A_log": draw(HEADS) / 3,
        "dt_bias": draw(HEADS, KEY),
        "initial": draw(N, HEADS, KEY, VALUE),
        "d_o": draw(T, HEADS, VALUE),
        "d_final": draw(N, HEADS, KEY, VALUE),
        "u": draw(T, 12),
        "w": draw(12, 4),
        "d_y": draw(T, 12),
        "rows": draw(T, 5),
        "d_rows": draw(T, 5),
    }


TOKENS = ("q", "k", "v", "g", "beta")
WEIGHTS = ("A_log", "dt_bias")


def one(case: Case) -> dict[str, torch.Tensor]:
    """Everything in one call."""
    x = {name: value.clone().requires_grad_() for name, value in tensors(case).items()}
    initial = x["initial"] if case.initial else None
    o, final = kda_ops.kda(*(x[n] for n in (*TOKENS, *WEIGHTS)), GATE, initial, case.whole(), scan=case.scan)
    y, _ = short_conv(x["u"], x["w"], case.whole())
    # A token's rows are read by every token of its document that is not before it.
    read = torch.cat([part.cumsum(0) for part in x["rows"].split(case.lengths)])
    loss = (o * x["d_o"]).sum() + (y * x["d_y"]).sum() + (read * x["d_rows"]).sum()
    loss = loss + ((final * x["d_final"]).sum() if case.initial else 0)
    loss.backward()
    out = {"o": o, "final": final, "y": y, "read": read}
    names = (*TOKENS, *WEIGHTS, "u", "w", "rows", *(("initial",) if case.initial else ()))
    return {k: v.detach() for k, v in out.items()} | {f"d_{n}": x[n].grad for n in names}


def spread(case: Case, cut: Slice, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """The same on this rank's slice."""
    whole, rows = tensors(case), cut.rows_T
    x = {n: whole[n][rows].clone().requires_grad_() for n in (*TOKENS, "u", "rows")}
    x |= {n: whole[n].clone().requires_grad_() for n in (*WEIGHTS, "w")}
    documents = [f.document for f in cut.fragments]
    # What is not to be read is poisoned.
    came = torch.tensor([f.continues for f in cut.fragments], dtype=torch.bool)
    poisoned = torch.where(came[:, None, None, None], float("nan"), whole["initial"][documents])
    x["initial"] = poisoned.requires_grad_()
    initial = x["initial"] if case.initial else None
    run = partial(kcp, group=group, way=case.way, scan=case.scan)
    o, final = run(*(x[n] for n in (*TOKENS, *WEIGHTS)), GATE, initial, cut)
    y, _ = context_conv(x["u"], x["w"], cut, group=group)
    seen, keys = context_latents(x["rows"], cut, group=group)
    read = [part.cumsum(0)[part.shape[0] - n :] for part, n in zip(seen.split(keys.lengths), cut.lengths, strict=True)]
    read_TL = torch.cat(read) if read else seen[:0]
    loss = (o * whole["d_o"][rows]).sum() + (y * whole["d_y"][rows]).sum() + (read_TL * whole["d_rows"][rows]).sum()
    if case.initial:
        last = torch.tensor([not f.goes_on for f in cut.fragments], dtype=torch.bool)
        loss = loss + (final * whole["d_final"][documents])[last].sum()
    loss.backward()
    names = (*TOKENS, *WEIGHTS, "u", "w", "rows", *(("initial",) if case.initial else ()))
    out = {"o": o, "final": final, "y": y, "read": read_TL}
    return {k: v.detach() for k, v in out.items()} | {f"d_{n}": x[n].grad for n in names}


def join(case: Case, results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The ranks' parts as `one` has them."""
    spans = cut_stream(case.whole(), case.ranks, case.order, case.cuts)
    T, N = sum(case.lengths), len(case.lengths)
    whole: dict[str, torch.Tensor] = {}
    for rank, result in enumerate(results):
        cut = take_slice(spans, (rank,))
        for name, value in result.items():
            if name in ("final", "d_initial"):
                out = whole.setdefault(name, value.new_full((N, *value.shape[1:]), float("nan")))
                for row, fragment in zip(value, cut.fragments, strict=True):
                    first, last = not fragment.continues, not fragment.goes_on
                    if last if name == "final" else first:
                        out[fragment.document] = row
            elif name in ("d_A_log", "d_dt_bias", "d_w"):
                whole[name] = whole.get(name, 0) + value
            else:
                out = whole.setdefault(name, value.new_full((T, *value.shape[1:]), float("nan")))
                out[cut.rows_T] = value
    return whole


def check(case: Case, got: dict[str, torch.Tensor]) -> None:
    for name, want in one(case).items():
        limit = 1e-13 if name.startswith("d_") else 1e-14
        error = (got[name] - want).abs().max() / want.abs().max()
        assert error <= limit, f"{case}: {name} is off by {error:.1e}"


class Counter:
    """Bytes that this rank gets from others by the collectives of `fragments`, call by call."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.gather, self.exchange = fragments.all_gather, dist.all_to_all_single

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
        self.calls.append(out.nbytes - x.nbytes)
        self.gather(out, x, group=group)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, got: Any, sent: Any, group: Any) -> None:
        row = out.nbytes // max(1, out.shape[0])
        self.calls.append(out.nbytes - got[dist.get_rank(group)] * row)
        self.exchange(out, x, got, sent, group=group)


def work(rank: int) -> dict[str, Any]:
    """Every case on the first two or on all four ranks."""
    made = mesh.start(torch.device("cpu"), 0, 60.0)
    pair = dist.new_group([0, 1])
    out = {}
    for name, case in CASES.items():
        if rank < case.ranks:
            spans = cut_stream(case.whole(), case.ranks, case.order, case.cuts)
            counter = Counter()
            with (
                mock.patch.object(fragments, "all_gather", counter.all_gather),
                mock.patch.object(fragments.dist, "all_to_all_single", counter.all_to_all),
            ):
                result = spread(case, take_slice(spans, (rank,)), pair if case.ranks == 2 else made.everyone)
            out[name] = {n: v.numpy() for n, v in result.items()} | {"calls": counter.calls}
    return out


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    got = spawn(work, 4, limit=100)
    for result in got:
        assert not isinstance(result, str), result
    return got


@pytest.mark.parametrize("name", CASES)
def test_ranks_with_slices_equal_one_process(name: str, ranks: list[Any]) -> None:
    case = CASES[name]
    results = [{n: torch.from_numpy(v) for n, v in ranks[r][name].items() if n != "calls"} for r in range(case.ranks)]
    check(case, join(case, results))


def test_both_ways_are_the_same_bits(ranks: list[Any]) -> None:
    for rank in range(4):
        by_heads, gathered = (ranks[rank][f"zigzag on 4, {way}"] for way in ("by heads", "gathered"))
        assert all((by_heads[n] == gathered[n]).all() for n in gathered if n != "calls")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.scan == "serial"])
def test_a_rank_receives_the_bytes_of_the_formula(name: str, ranks: list[Any]) -> None:
    """Whatever the lengths are, and also with no tokens. Rank 0 has the most heads, so the formula is its own."""
    case = CASES[name]
    spans = cut_stream(case.whole(), case.ranks, case.order, case.cuts)
    want = exchange_bytes(spans, HEADS, KEY, VALUE, 8, case.way)
    calls = ranks[0][name]["calls"]
    half = len(calls) // 2
    assert {"forward": sum(calls[:half]), "backward": sum(calls[half:])} == want


@pytest.mark.parametrize("name", ["tiles", "tiles on 4", "tiles, zigzag"])
def test_with_cuts_on_tiles_the_number_of_ranks_changes_no_bit(name: str, ranks: list[Any]) -> None:
    case = CASES[name]
    got = join(
        case, [{n: torch.from_numpy(v) for n, v in ranks[r][name].items() if n != "calls"} for r in range(case.ranks)]
    )
    want = one(case)
    assert torch.equal(got["o"], want["o"])
    assert torch.equal(got["final"], want["final"])


@pytest.mark.parametrize("name", CASES)
def test_all_spans_in_one_process_equal_one_call(name: str) -> None:
    case = CASES[name]
    spans = cut_stream(case.whole(), case.ranks, case.order, case.cuts)
    cut = take_slice(spans, range(case.ranks))
    result = spread(case, cut, None)
    for key in ("final", "d_initial"):
        if key in result:
            keep = [not (f.goes_on if key == "final" else f.continues) for f in cut.fragments]
            result[key] = result[key][keep]
    check(case, result)


def test_one_call_is_the_recurrence() -> None:
    """The reference of this file against token-by-token KDA."""
    case = CASES["off the grid"]
    x = tensors(case)
    q, k, g, beta = kda_ops.prepare(*(x[n] for n in ("q", "k", "g", "beta")), *(x[n] for n in WEIGHTS), GATE)
    o, final = recurrence(q, k, x["v"], g, beta, x["initial"], case.whole())
    got = one(case)
    assert (got["o"] - o).abs().max() <= 1e-13
    assert (got["final"] - final).abs().max() <= 1e-13


def test_a_nan_stays_in_its_document() -> None:
    case = Case((37, 51, 40), 4)
    x = {n: v.clone() for n, v in tensors(case).items()}
    x["v"][5] = float("nan")
    cut = take_slice(cut_stream(case.whole(), 4), range(4))
    o, _ = kcp(*(x[n] for n in (*TOKENS, *WEIGHTS)), GATE, None, cut)
    assert o[:37].isnan().any()
    assert o[37:].isfinite().all()


def test_bytes_do_not_depend_on_the_length() -> None:
    # By hand: 96 heads of 128 x 256 numbers, 4 bytes, 12.58 MB a span; the way by heads of kda.md 5.2 on 8 ranks:
    # 7 x 12 heads of M and B, and 84 heads of S back.
    H, K = 96, 128
    for total in (1 << 14, 1 << 20):
        for ranks, forward, backward in (
            (2, H * K * 2 * K * 4, H * K * K * 4),
            (8, (7 * 12 * 2 + 84) * K * K * 4, (7 * 12 + 84) * K * K * 4),
        ):
            spans = cut_stream(Sequences.from_lengths([total]), ranks)
            assert exchange_bytes(spans, H, K, K) == {"forward": forward, "backward": backward}
            assert choose_way(ranks, H) == ("gather" if ranks == 2 else "heads")
        zigzag = cut_stream(Sequences.from_lengths([total]), 2, "zigzag")
        assert exchange_bytes(zigzag, H, K, K)["forward"] == 2 * H * K * 2 * K * 4


def test_slices_that_do_not_fit_are_refused() -> None:
    case = Case((37, 51, 40), 4)
    x = tensors(case)
    inputs = [x[n] for n in (*TOKENS, *WEIGHTS)]
    with pytest.raises(Error, match="must be a Slice"):
        kcp(*inputs, GATE, None, case.whole())
    spans = cut_stream(case.whole(), 4)
    with pytest.raises(Error, match=r"a slice of ranks \(1,\) of 4; the group has 1"):
        kcp(*inputs, GATE, None, take_slice(spans, (1,)))
    with pytest.raises(Error, match="must be 5 ascending offsets from 0 to 128"):
        cut_stream(case.whole(), 4, cuts=(0, 60, 50, 100, 128))
    with pytest.raises(Error, match=r"held is \(0, 2\)"):
        take_slice(spans, (0, 2))


def test_zigzag_gives_every_rank_the_same_pairs_of_queries_and_keys() -> None:
    spans = cut_stream(Sequences.from_lengths([1024]), 4, "zigzag")
    pairs = []
    for rank in range(4):
        cut = take_slice(spans, (rank,))
        pairs.append(sum(f.length * (f.begin + f.end) for f in cut.fragments))
    assert len(set(pairs)) == 1
