"""A process that is killed in traffic: all who wait are told at once, and nothing of the engine is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engines import prompt, small_model, soon
from serving import chat_model, tiny_tokenizer

from perilune.model import save
from perilune.serve import LLM, AsyncLLM, EngineConfig, EngineError, Params, Replicas, processes
from perilune.serve.request import State

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds child processes in /proc"),
]
CONFIG = EngineConfig(6_000_000, slots=2, token_budget=1024)
# Seconds from the kill to the last error, and from there to the end of the last process; on a quiet machine under one.
TOLD, GONE = 60.0, 60.0


def children(pid: int) -> set[int]:
    """The processes below one, of any depth, that have not ended."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


def ended(pids: set[int]) -> bool:
    """Whether none of them runs any more."""
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                return False
        except OSError:
            continue
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save(small_model(), path)
    return path


def test_a_rank_killed_in_traffic_is_told_to_all_who_run_and_wait(folder: Path) -> None:
    others = children(os.getpid())
    llm = LLM(folder, CONFIG, ranks=2, device="cpu")
    workers = children(os.getpid()) - others

    async def main() -> None:
        assert len(workers) == 1
        engine = AsyncLLM(llm)
        long = Params(max_tokens=2000, temperature=0)
        streams = [engine.stream(prompt(20 + i, i), long) for i in range(5)]  # two run, three wait

        async def follow(stream: Any) -> EngineError:
            with pytest.raises(EngineError) as error:
                async for _ in stream:
                    pass
            return error.value

        tasks = [asyncio.create_task(follow(stream)) for stream in streams]
        while llm.engine.counters.decode < 20:
            await asyncio.sleep(0.01)
        assert engine.failure is None
        os.kill(next(iter(workers)), signal.SIGKILL)
        errors = await asyncio.wait_for(asyncio.gather(*tasks), TOLD)
        assert all("rank 1 has failed" in str(error) and error.kind == "failed" for error in errors)
        assert "rank 1 has failed" in str(engine.failure)
        with pytest.raises(EngineError, match="rank 1 has failed"):
            await engine.generate(prompt(5, 9), long)
        await asyncio.wait_for(engine.drain(), TOLD)

    try:
        asyncio.run(main())
    finally:
        llm.close()
    assert ended(workers)
    assert not torch.distributed.is_initialized()


def test_a_lead_that_breaks_off_alone_is_out_of_step_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits in a collective that never comes; nothing may go on from there."""
    others = children(os.getpid())
    llm = LLM(folder, CONFIG, ranks=2, device="cpu")
    workers, patience, end = children(os.getpid()) - others, list[float](), processes.end
    monkeypatch.setattr(processes, "end", lambda process, seconds: (patience.append(seconds), end(process, seconds)))
    try:
        llm.generate([prompt(20, 0)], max_tokens=2)

        def broken(*_: object) -> None:
            raise RuntimeError("out of memory")

        forward = llm.engine.runner.inner.forward  # type: ignore[attr-defined]
        llm.engine.runner.inner.forward = broken  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match=r"rank 0 has failed.*out of memory") as error:
            llm.generate([prompt(20, 1)], max_tokens=2)
        assert error.value.kind == "failed"
        llm.engine.runner.inner.forward = forward  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match="rank 0 has failed"):
            llm.generate([prompt(20, 1)], max_tokens=2)
    finally:
        llm.close()
    assert patience == [0.0]  # nobody waits for a rank that waits itself
    assert ended(workers)


def running(llm: LLM) -> int:
    return sum(request.state is State.DECODE for request in llm.engine.scheduler.requests())


def test_a_replica_whose_rank_is_killed_ends_and_the_other_goes_on(folder: Path) -> None:
    others = children(os.getpid())

    async def main() -> None:
        llm = Replicas(folder, CONFIG, 2, ranks=2, device="cpu")
        mine = llm._processes[0].pid
        long = Params(max_tokens=2000, temperature=0)
        tasks = [asyncio.create_task(llm.generate(prompt(20 + i, i), long)) for i in range(2)]
        while await llm.call(running) != [1, 1]:
            await asyncio.sleep(0.01)
        os.kill(next(iter(children(mine))), signal.SIGKILL)
        done, _ = await asyncio.wait(tasks, timeout=TOLD, return_when=asyncio.FIRST_COMPLETED)
        (lost,) = done
        assert isinstance(lost.exception(), EngineError)
        assert soon(lambda: llm._processes[0].poll() is not None, TOLD)
        answer = await llm.generate(prompt(9, 5), Params(max_tokens=4, temperature=0))
        assert len(answer.tokens) == 4
        assert llm.failure is None
        await llm.drain(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 200))
    assert soon(lambda: ended(children(os.getpid()) - others), GONE)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command on two ranks, and its address."""
    save(chat_model(), tmp_path)
    tiny_tokenizer().save(tmp_path)
    flags = f"serve {tmp_path} --tensor-parallel-size 2 --device cpu --port 0 --kv-cache-memory-bytes 20000000"
    flags += " --max-num-seqs 2 --max-model-len 8192 --max-num-batched-tokens 1024"
    command = [sys.executable, "-c", "import sys; from perilune.cli import main; sys.exit(main())", *flags.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            facts = json.loads(line)
            if facts["what"] == "listening":
                port = facts["port"]
            if facts["what"] == "started":
                break
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def ask(url: str, got: list[str]) -> None:
    """One long answer; all lines of its stream."""
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
            got.extend(response.iter_lines())
    except httpx.HTTPError as error:
        got.append(f"lost: {error!r}")


def counted(url: str) -> tuple[float, ...]:
    """How many requests run, and how many wait."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return tuple(sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names)


@pytest.mark.parametrize("victim", ["a rank", "the server"])
def test_the_command_ends_with_the_processes_it_needs(served: tuple[subprocess.Popen[str], str], victim: str) -> None:
    """A rank: every client reads an error, the port closes, the command exits with 2. The server: its rank ends too."""
    process, url = served
    workers = children(process.pid)
    assert len(workers) == 1
    answers: list[list[str]] = [[] for _ in range(4)]  # two run, two wait
    threads = [threading.Thread(target=ask, args=(url, got)) for got in answers]
    for thread in threads:
        thread.start()
    assert soon(lambda: counted(url) == (2, 2), 60)
    os.kill(next(iter(workers)) if victim == "a rank" else process.pid, signal.SIGKILL)
    begin = time.monotonic()
    for thread in threads:
        thread.join(TOLD)
        assert not thread.is_alive()
    assert time.monotonic() - begin < TOLD
    assert process.wait(GONE) == (2 if victim == "a rank" else -signal.SIGKILL)
    assert soon(lambda: ended(workers), GONE)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    if victim == "a rank":
        for got in answers:
            assert "rank 1 has failed" in "".join(got), got[-3:]
            assert not any(line.startswith("lost") for line in got)
