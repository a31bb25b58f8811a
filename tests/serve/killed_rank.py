"""A process whose engine is spread over two GPUs and loses one of its ranks: python killed_rank.py FOLDER TRANSPORT.

Prints seconds from the kill until all who wait were told, until the engine was drained, and until it was closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from functools import partial

import perilune.serve.ranks as room
from perilune.serve import LLM, AsyncLLM, EngineConfig, EngineError, Params


def main() -> None:
    folder, transport = sys.argv[1:]
    room.Ranks = partial(room.Ranks, transport=transport)  # type: ignore[misc, assignment]
    llm = LLM(folder, EngineConfig(500_000_000, slots=4, token_budget=4096), ranks=2, device="cuda")
    assert llm._ranks is not None
    assert llm._ranks.link.transport == transport
    (worker,) = llm._ranks._processes
    seconds = dict[str, float]()

    async def serve() -> float:
        engine = AsyncLLM(llm)
        long = Params(max_tokens=4000, temperature=0)
        tasks = [asyncio.create_task(engine.generate([7 + i] * 50, long)) for i in range(6)]
        while llm.engine.counters.decode < 400:
            await asyncio.sleep(0.01)
        os.kill(worker.pid, signal.SIGKILL)
        begin = time.monotonic()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        seconds["told"] = time.monotonic() - begin
        assert all(isinstance(one, EngineError) and "rank 1 has failed" in str(one) for one in errors), errors
        await engine.drain()
        seconds["drained"] = time.monotonic() - begin
        return begin

    begin = asyncio.run(serve())
    llm.close()
    seconds["closed"] = time.monotonic() - begin
    assert worker.poll() is not None
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
