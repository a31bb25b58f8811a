"""Rank 0 and the start of a rank, without a model: who ends is told of at once, and nobody waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import small_model

from perilune import Error
from perilune.model import save
from perilune.serve import LLM, EngineConfig, EngineError, processes
from perilune.serve.ranks import Ranks, worker
from perilune.serve.ranks.lead import Setup
from perilune.serve.ranks.shard import Place

pytestmark = pytest.mark.timeout(60)
CONFIG = EngineConfig(6_000_000, slots=2, token_budget=1024)


@pytest.mark.parametrize("last", [None, ("here", None), ("failed", "no such GPU")])
def test_a_rank_that_ends_before_the_others_meet_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: tuple[str, str | None] | None
) -> None:
    """The meeting would wait five minutes for it. `here` of the first of two is not that of the second."""
    started = list[processes.Process]()

    def start(module: str) -> tuple[processes.Process, Connection]:
        mine, theirs = Pipe()
        if last is not None and not started:
            theirs.send(last)
        theirs.close()
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1], mine

    monkeypatch.setattr(processes, "start", start)
    with pytest.raises(Error, match="no such GPU" if last and last[1] else "ended before it was ready"):
        Ranks(tmp_path, CONFIG, 3, "cpu")
    assert [process.returncode is not None for process in started] == [True, True]
    assert not torch.distributed.is_initialized()


def test_a_rank_that_never_comes_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose GPU does not answer: it lives, and says nothing."""
    started, theirs = list[processes.Process](), list[Connection]()

    def start(module: str) -> tuple[processes.Process, Connection]:
        mine, other = Pipe()
        theirs.append(other)
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1], mine

    monkeypatch.setattr(processes, "start", start)
    with pytest.raises(Error, match=r"has not come within 0\.1 s"):
        Ranks(tmp_path, CONFIG, 2, "cpu", seconds=0.1)
    assert started[0].returncode is not None


class Pipes:
    """An end that keeps what it is sent, and breaks off at the `at`th time."""

    def __init__(self, at: int) -> None:
        self.at, self.got = at, list[Any]()

    def send(self, what: Any) -> None:
        if len(self.got) == self.at:
            raise KeyboardInterrupt
        self.got.append(what)


@pytest.mark.parametrize("second", [0, 1])
def test_a_command_that_only_some_ranks_have_is_the_end(second: int) -> None:
    """Ctrl-C between two pipes: the ranks are out of step, and what they would compute together is wrong."""
    ranks = Ranks.__new__(Ranks)
    pipes = [Pipes(9), Pipes(second)]
    ranks.failure, ranks._queued, ranks._pipes = None, [], pipes  # type: ignore[assignment]
    for step in range(3):
        ranks.later("free", step)
        expected = KeyboardInterrupt if step == second else EngineError if step > second else None
        if expected is None:
            ranks.now("forward", step)
        else:
            with pytest.raises(expected), ranks.together("forward", step):
                raise AssertionError("nothing is done together")
    assert "KeyboardInterrupt" in str(ranks.failure)
    assert [len(pipe.got) for pipe in pipes] == [second + 1, second]


def test_what_breaks_off_on_one_rank_is_the_end_whatever_it_raises() -> None:
    ranks = Ranks.__new__(Ranks)
    ranks.failure, ranks._queued, ranks._pipes = None, [], []
    with pytest.raises(EngineError, match=r"rank 0 has failed.*a shape"), ranks.together("forward"):
        raise Error("a shape")


def test_an_engine_that_is_refused_leaves_no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save(small_model(), tmp_path)
    closed = list[bool]()

    class Two:
        model, loaded, link = small_model(), list[Any](), None

        def __init__(self, folder: Path, config: EngineConfig, *_: Any) -> None:
            self.config = config

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr("perilune.serve.ranks.Ranks", Two)
    with pytest.raises(Error, match="one page needs"):
        LLM(tmp_path, EngineConfig(10, slots=4), ranks=2, device="cpu")
    assert closed == [True]


def test_a_rank_ends_with_its_pipe_while_it_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    over, (mine, theirs) = threading.Event(), Pipe()

    def leave(status: int) -> None:
        over.set()
        if threading.current_thread() is threading.main_thread():
            sys.exit(status)

    def waits(*_: Any) -> Any:
        assert mine.recv() == ("here", None)
        mine.close()
        assert over.wait(30)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(worker, "end_with_pipe", lambda: None)
    monkeypatch.setattr(worker, "build", waits)
    monkeypatch.setattr(sys, "argv", ["worker", str(os.dup(theirs.fileno()))])
    theirs.close()
    place = Place(1, 2)
    mine.send(Setup(place, Path(), CONFIG, "cpu", None, False, "safetensors", "none", "collective", 300.0, 1))
    with pytest.raises(SystemExit):
        worker.main()
