"""One model over two processes (gloo): the tokens of one process, whatever the engine does in between."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import prompt, small_model
from models import tiny_config

from perilune import Error, Transformer
from perilune.config import QuantConfig
from perilune.model import initialize, load, save
from perilune.serve import LLM, EngineConfig, Params
from perilune.serve.ranks import Ranks, lead
from perilune.serve.ranks.link import Link
from perilune.serve.ranks.shard import Cuts, Place, load_part

pytestmark = pytest.mark.timeout(300)
GREEDY = Params(max_tokens=8, temperature=0, logprobs=2)


def k3_model() -> Transformer:
    """Latent experts, attention residuals and a gate in MLA; large weights, so that rounding decides nothing."""
    base = tiny_config("kimi_k3")
    config = dataclasses.replace(base, vocab_size=64)
    model = initialize(Transformer(config), 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.endswith(("conv_CW", "dt_bias_HK")):
                parameter.mul_(2.0)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, model in (("linear", small_model()), ("k3", k3_model())):
        found[name] = tmp_path_factory.mktemp(name)
        save(model, found[name])
    return found


def config(**options: Any) -> EngineConfig:
    return EngineConfig(6_000_000, **{"slots": 4, "token_budget": 4096} | options)


def close(one: list[Any], two: list[Any]) -> None:
    for mine, theirs in zip(one, two, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.cached == theirs.cached
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-9  # float64, another order of sums
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


@pytest.mark.parametrize("name", ["linear", "k3"])
def test_two_ranks_give_the_tokens_of_one(folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Few tokens and many: experts are balanced from 200 on.
    monkeypatch.setattr("perilune.serve.ranks.Ranks", partial(Ranks, balanced=200))
    options = {"drafts": 3, "host_bytes": 2_000_000}
    one = LLM(folders[name], config(**options), dtype=torch.float64)
    two = LLM(folders[name], config(**options), dtype=torch.float64, ranks=2, device="cpu")
    try:
        assert two._ranks is not None
        assert two._ranks.link.transport == "collective"
        # Prefixes found again, drafts right and wrong.
        turns = [prompt(30, 0), [3, 4, 5, 6] * 30, prompt(500, 1), prompt(200, 2)]
        for _ in range(2):
            mine, theirs = one.generate(turns, GREEDY), two.generate(turns, GREEDY)
            close(mine, theirs)
            turns = [answer.prompt + answer.tokens for answer in mine]
            two.engine.check_integrity()
        assert any(answer.cached for answer in mine)
        assert two.engine.counters.drafted > 0
        sampled = Params(max_tokens=8, temperature=0.8, seed=5)
        assert [a.tokens for a in one.generate(turns, sampled)] == [a.tokens for a in two.generate(turns, sampled)]
    finally:
        two.close()
    with pytest.raises(Error, match="rank"):
        two.generate([prompt(10, 0)], GREEDY)


def test_packed_experts_are_spread_as_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.serve.ranks.Ranks", partial(Ranks, balanced=200))
    config_ = dataclasses.replace(tiny_config("kimi_k3"), vocab_size=64, quant=QuantConfig())
    save(initialize(Transformer(config_), 1), tmp_path)
    one = LLM(tmp_path, config(), dtype=torch.float64, packed=True)
    two = LLM(tmp_path, config(), dtype=torch.float64, packed=True, ranks=2, device="cpu")
    try:
        assert any(name.endswith("_codes") for name in two.engine.model.state_dict())
        turns = [prompt(30, 0), prompt(300, 1)]
        close(one.generate(turns, GREEDY), two.generate(turns, GREEDY))
    finally:
        two.close()


def test_new_weights_sleep_and_wake_reach_every_rank(folders: dict[str, Path]) -> None:
    one = LLM(folders["linear"], config(), dtype=torch.float64)
    two = LLM(folders["linear"], config(), dtype=torch.float64, ranks=2, device="cpu")
    try:
        turns = [prompt(150, i) for i in range(3)]
        new = {name: value.double() for name, value in small_model(7).state_dict().items()}
        for llm in (one, two):
            llm.generate(turns, GREEDY)
            llm.update_weights(new.items(), 1)
        close(one.generate(turns, GREEDY), two.generate(turns, GREEDY))
        with pytest.raises(Error, match="has shape"):
            two.update_weights([("lm_head.weight", torch.zeros(32, 8, dtype=torch.float64))], 2)
        two.sleep(1)
        two.wake()
        close(LLM(one.engine.model, config()).generate(turns, GREEDY), two.generate(turns, GREEDY))
        two.sleep(2)
        two.wake()
        two.update_weights(new.items(), 2)
        answers = two.generate(turns, GREEDY)
        assert [answer.versions for answer in answers] == [[2] * 8] * 3
        close(LLM(one.engine.model, config()).generate(turns, GREEDY), answers)
    finally:
        two.close()


def test_segments_go_between_any_numbers_of_ranks(folders: dict[str, Path]) -> None:
    """A prefix that two ranks computed is found by one process and the reverse, with the answers of the first."""
    for name in ("linear", "k3"):
        one = LLM(folders[name], config(), dtype=torch.float64)
        two = LLM(folders[name], config(), dtype=torch.float64, ranks=2, device="cpu")
        try:
            for source, target, seed in ((two, one, 0), (one, two, 1)):
                (first,) = source.generate([prompt(200, seed)], GREEDY, hold=60.0)
                segment = source.export(first.hold)
                assert target.put(segment) == len(segment.tokens) == 207
                follow = [*first.prompt, *first.tokens, 5]
                mine, theirs = source.generate([follow], GREEDY), target.generate([follow], GREEDY)
                assert theirs[0].cached == 207
                close(mine, theirs)
                target.engine.check_integrity()
                again = target.export(target.hold(list(segment.tokens)))
                assert torch.equal(again.rows_TML, segment.rows_TML)
                assert torch.equal(again.state_B, segment.state_B)
            with pytest.raises(Error, match="checksum"):
                two.put(dataclasses.replace(segment, checksum="0"))
        finally:
            two.close()


def test_parking_eviction_and_aborts_leave_all_ranks_in_step(folders: dict[str, Path]) -> None:
    """Little memory and a host tier: states are saved, moved, fetched and copied on both ranks alike."""
    probe = LLM(folders["linear"], config(), dtype=torch.float64).engine.cache.geometry
    two = None
    try:
        small = {"slots": 3, "token_budget": 128, "watermark": 0.0, "reserve": 0.0}
        # A rank's page holds half of the state's heads: the sizes are of a rank.
        memory = EngineConfig(30 * probe.page_bytes, 200 * probe.page_bytes, **small)
        two = LLM(folders["linear"], memory, dtype=torch.float64, ranks=2, device="cpu")
        one = LLM(folders["linear"], config(), dtype=torch.float64)
        turns = [prompt(100 + 30 * i, i) for i in range(8)]
        expected = [answer.tokens for answer in one.generate(turns, GREEDY)]
        for _ in range(3):
            ids = [two.add(turn, GREEDY) for turn in turns]
            gone = two.add(prompt(300, 99), Params(max_tokens=50, temperature=0))
            answers = {}
            while len(answers) < len(ids) + 1:
                answers |= {answer.id: answer for answer in two.step()[1]}
                two.engine.check_integrity()
                if two.engine.counters.steps % 5 == 4:
                    two.abort(gone)
            assert [answers[id].tokens for id in ids] == expected
        assert two.engine.cache.moved[1] > 0, two.engine.cache.geometry
        assert two.engine.counters.cached > 0
    finally:
        if two is not None:
            two.close()


@pytest.fixture
def pair(folders: dict[str, Path]) -> Iterator[LLM]:
    two = LLM(folders["linear"], config(), ranks=2, device="cpu")
    yield two
    two.close()


def test_a_rank_that_dies_ends_what_runs_with_its_error(pair: LLM) -> None:
    pair.generate([prompt(30, 0)], GREEDY)
    assert pair._ranks is not None
    pair._ranks._processes[0].kill()
    pair._ranks._processes[0].wait()
    for _ in range(2):
        with pytest.raises(Error, match="rank 1 has failed"):
            pair.generate([prompt(30, 1)], GREEDY)


def test_ranks_leave_together_without_graphs_and_in_bounded_time(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends no communicator that a graph holds, nor one whose other ranks have gone: it waits for ever."""
    assert pair._ranks is not None
    (worker,), seen = pair._ranks._processes, []

    def leave() -> None:
        seen.append(("leaves", worker.poll() is None))
        time.sleep(60)

    monkeypatch.setattr(lead, "_leave", leave)
    monkeypatch.setattr(lead, "BLAME", 0.5)
    monkeypatch.setattr(lead.dist.distributed_c10d, "_abort_process_group", lambda: seen.append("aborts"))
    monkeypatch.setattr(pair.engine.runner.ranks, "forget_graphs", lambda: seen.append("graphs"))
    begin = time.monotonic()
    pair.close()
    assert time.monotonic() - begin < lead.LEAVE + 5
    assert seen == ["graphs", ("leaves", True), "aborts"]
    monkeypatch.undo()
    lead._leave()


def test_parts_of_all_ranks_are_the_checkpoint_and_nothing_more_is_read(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        whole = dict(load(folder).state_dict())
        size = sum(value.nbytes for value in whole.values())
        parts = [load_part(folder, Place(rank, 2), torch.device("cpu"), None) for rank in range(2)]
        for name, value in whole.items():
            for model, cuts, _ in parts:
                assert torch.equal(dict(model.state_dict())[name], cuts.part(name, value)), name
        for _, _, loaded in parts:
            assert loaded.bytes < size


def test_what_cannot_be_cut_is_refused(folders: dict[str, Path]) -> None:
    model = small_model()
    with pytest.raises(Error, match="must divide"):
        Cuts(model.config, Place(0, 3), Link())
    with pytest.raises(Error, match="must divide"):  # said by every rank, and all have ended
        LLM(folders["linear"], config(), ranks=3, device="cpu")
    assert not torch.distributed.is_initialized()
    with pytest.raises(Error, match="exact"):
        LLM(folders["linear"], config(exact=True), ranks=2, device="cpu")
    with pytest.raises(Error, match="folder"):
        LLM(model, config(), ranks=2)
    with pytest.raises(Error, match="ranks is 0"):
        LLM(folders["linear"], config(), ranks=0, device="cpu")
