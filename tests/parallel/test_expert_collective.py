"""The balanced layer over gloo processes against the mixture in one place; and what happens when a rank fails."""

from __future__ import annotations

import datetime
import queue
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from balanced import ACT, EXPERTS, INNER, TOP_K, WIDTH, Case, d_y, dense, gradients

from perilune import Error
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import Collective, ExpertParallel

TOKENS = 40


def spawn(work: Callable[..., Any], ranks: int, folder: Path, *args: Any, limit: float = 60) -> list[Any]:
    """work(rank, ranks, *args) in `ranks` gloo processes -> results by rank, or the traceback as a string."""
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_enter, args=(work, rank, ranks, str(folder / "meet"), results, args), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    got: dict[int, Any] = {}
    end = time.monotonic() + limit
    try:
        while len(got) < ranks:
            rank, result = results.get(timeout=max(end - time.monotonic(), 0.01))
            got[rank] = result
    except queue.Empty:
        pytest.fail(f"only ranks {sorted(got)} of {ranks} answered in {limit} s: {got}")
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return [got[rank] for rank in range(ranks)]


def _enter(work: Callable[..., Any], rank: int, ranks: int, meet: str, results: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{meet}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=30)
        )
        result = work(rank, ranks, *args)
        # Plain bytes: a tensor in the queue would live in memory shared with a process that ends.
        results.put((rank, [t.numpy().copy() if isinstance(t, torch.Tensor) else t for t in result]))
    except Exception:
        results.put((rank, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def sizes_of(ranks: int) -> list[int]:
    """Ragged; with 4 ranks the last has no tokens."""
    return {2: [33, 7], 4: [25, 12, 3, 0], 8: [20, 0, 5, 5, 1, 4, 5, 0]}[ranks]


def layer_work(rank: int, ranks: int, skew: float, delays: bool, kind: str) -> list[Any]:
    """[y, dx, d logits, d gate_up, d down of this rank's part, copies, before]."""
    if delays:
        _delay_collectives(rank)
    case = Case(TOKENS, skew, torch.float64)
    x, logits, gate_up, down = (t.detach() for t in case.leaves())
    mine = _part(rank, ranks)
    policy = expert.exact() if kind == "exact" else expert.tolerant(0.02, 2)
    parallel = ExpertParallel(Collective(), EXPERTS, TOP_K, TOKENS, policy, align=4)
    layer = expert.BalancedExperts(parallel, WIDTH, INNER, ACT, exact=True, dtype=torch.float64)
    layer.load(Dense(gate_up, down))
    x, logits = x[mine].requires_grad_(), logits[mine].requires_grad_()
    for _ in range(2):
        routing = moe.route(logits, case.bias, TOP_K, 2.5)
        y = layer(x, routing.ids_TJ, routing.weights_TJ)
        grads = torch.autograd.grad(y, (x, logits, *layer.parameters()), d_y(case)[mine])
    stats = layer.stats()
    return [y.detach(), *grads, stats.copies, stats.before]


def _part(rank: int, ranks: int) -> slice:
    sizes = sizes_of(ranks)
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def _delay_collectives(rank: int) -> None:
    generator = random.Random(rank)
    gather, exchange = Collective.gather, Collective.exchange

    def slow_gather(self: Collective, *args: Any) -> Any:
        time.sleep(generator.random() * 0.05)
        return gather(self, *args)

    def slow_exchange(self: Collective, *args: Any) -> Any:
        time.sleep(generator.random() * 0.05)
        return exchange(self, *args)

    Collective.gather, Collective.exchange = slow_gather, slow_exchange  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ranks", "skew", "delays", "kind"),
    [
        (2, 4.0, False, "exact"),
        (4, 4.0, True, "exact"),
        (4, 4.0, False, "tolerant"),
        pytest.param(8, 4.0, True, "exact", marks=pytest.mark.slow),
    ],
)
def test_processes_equal_the_dense_layer_in_fp64(
    ranks: int, skew: float, delays: bool, kind: str, tmp_path: Path
) -> None:
    results = spawn(layer_work, ranks, tmp_path, skew, delays, kind)
    for result in results:
        assert not isinstance(result, str), result
    want = gradients(Case(TOKENS, skew, torch.float64), dense)
    got = [torch.cat([torch.from_numpy(result[k]) for result in results]) for k in range(5)]
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    for result in results:
        copies, before = result[5:]
        assert before > 1.1
        assert copies > 0


def refused_work(rank: int, ranks: int) -> list[Any]:
    parallel = ExpertParallel(Collective(), EXPERTS, TOP_K, 4)
    ids = torch.full((4, TOP_K), EXPERTS if rank == 1 else 0)
    try:
        parallel.plan([ids])
    except Error as error:
        return [str(error)]
    return ["nothing was refused"]


def test_bad_ids_on_one_rank_stop_all_with_a_message(tmp_path: Path) -> None:
    first, second = spawn(refused_work, 2, tmp_path)
    assert first == ["plan: rank 1 refused its ids; its own message says why"]
    assert second == [f"plan: ids lie in {EXPERTS}..{EXPERTS}; must be in -1..{EXPERTS - 1}"]


def failing_work(rank: int, ranks: int) -> list[Any]:
    parallel = ExpertParallel(Collective(), EXPERTS, TOP_K, 4)
    planned = parallel.plan([torch.zeros(4, TOP_K, dtype=torch.int64)])
    if rank == 1:
        raise RuntimeError("rank 1 fell over")
    start = time.monotonic()
    try:
        parallel.dispatch([torch.zeros(4, WIDTH)], planned)
    except RuntimeError as error:
        return [f"{type(error).__name__}: {error}", time.monotonic() - start]
    return ["went on alone", 0.0]


def test_a_rank_that_falls_over_ends_the_others(tmp_path: Path) -> None:
    first, second = spawn(failing_work, 2, tmp_path)
    assert "rank 1 fell over" in second
    message, seconds = first
    assert "Error" in message
    assert seconds < 31


def traffic_work(rank: int, ranks: int) -> list[Any]:
    """bf16 rows and weights cross as words."""
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3) + 10 * rank
    (got,) = Collective().exchange([x], [[1, 1]], [[1, 1]])
    return [got.float()]


def test_narrow_rows_arrive_whole(tmp_path: Path) -> None:
    first, second = spawn(traffic_work, 2, tmp_path)
    assert first[0].tolist() == [[0, 1, 2], [10, 11, 12]]
    assert second[0].tolist() == [[3, 4, 5], [13, 14, 15]]
