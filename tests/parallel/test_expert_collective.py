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


Work = tuple[Callable[..., list[Any]], tuple[Any, ...]]


def spawn(works: list[Work], ranks: int, folder: Path, limit: float = 90) -> list[list[Any]]:
    """Every work(rank, ranks, *args) in turn in `ranks` gloo processes -> results[rank][work].

    A work that raises gives its traceback as a string, and that process stops.
    """
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_enter, args=(works, rank, ranks, str(folder / "meet"), results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    got: dict[int, list[Any]] = {}
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


def _enter(works: list[Work], rank: int, ranks: int, meet: str, results: Any) -> None:
    torch.set_num_threads(1)
    done: list[Any] = []
    try:
        dist.init_process_group(
            "gloo", f"file://{meet}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=30)
        )
        for work, args in works:
            # Arrays: a tensor in the queue would live in memory shared with a process that ends.
            done.append([t.numpy().copy() if isinstance(t, torch.Tensor) else t for t in work(rank, ranks, *args)])
    except Exception:
        done.append(traceback.format_exc())
    finally:
        results.put((rank, done))
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


def refused_work(rank: int, ranks: int) -> list[Any]:
    parallel = ExpertParallel(Collective(), EXPERTS, TOP_K, 4)
    ids = torch.full((4, TOP_K), EXPERTS if rank == 1 else 0)
    try:
        parallel.plan([ids])
    except Error as error:
        return [str(error)]
    return ["nothing was refused"]


def traffic_work(rank: int, ranks: int) -> list[Any]:
    """bf16 rows cross as words, rows of odd size as bytes."""
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3) + 10 * rank
    (got,) = Collective().exchange([x], [[1, 1]], [[1, 1]])
    return [got.float()]


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


# Starting processes takes most of the time, so each group is started once; the last work of `two` ends it.
TWO: list[Work] = [(layer_work, (4.0, False, "exact")), (refused_work, ()), (traffic_work, ()), (failing_work, ())]
FOUR: list[Work] = [(layer_work, (4.0, False, "tolerant")), (layer_work, (4.0, True, "exact"))]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return spawn(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return spawn(FOUR, 4, tmp_path_factory.mktemp("four"))


def check_layer(results: list[Any]) -> None:
    for result in results:
        assert not isinstance(result, str), result
    want = gradients(Case(TOKENS, 4.0, torch.float64), dense)
    got = [torch.cat([torch.from_numpy(result[k]) for result in results]) for k in range(5)]
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    for result in results:
        copies, before = result[5:]
        assert before > 1.1
        assert copies > 0


def test_two_processes_equal_the_dense_layer_in_fp64(two: list[list[Any]]) -> None:
    check_layer([results[0] for results in two])


def test_four_processes_equal_the_dense_layer_in_fp64(four: list[list[Any]]) -> None:
    check_layer([results[0] for results in four])


def test_random_delays_change_nothing(four: list[list[Any]]) -> None:
    check_layer([results[1] for results in four])


@pytest.mark.slow
def test_eight_processes_equal_the_dense_layer_in_fp64(tmp_path: Path) -> None:
    check_layer([results[0] for results in spawn([(layer_work, (4.0, True, "exact"))], 8, tmp_path)])


def test_bad_ids_on_one_rank_stop_all_with_a_message(two: list[list[Any]]) -> None:
    assert two[0][1] == ["plan: rank 1 refused its ids; its own message says why"]
    assert two[1][1] == [f"plan: ids lie in {EXPERTS}..{EXPERTS}; must be in -1..{EXPERTS - 1}"]


def test_narrow_rows_arrive_whole(two: list[list[Any]]) -> None:
    assert two[0][2][0].tolist() == [[0, 1, 2], [10, 11, 12]]
    assert two[1][2][0].tolist() == [[3, 4, 5], [13, 14, 15]]


def test_a_rank_that_falls_over_ends_the_others(two: list[list[Any]]) -> None:
    message, seconds = two[0][3]
    assert "rank 1 fell over" in two[1][3]
    assert "Error" in message
    assert seconds < 31
