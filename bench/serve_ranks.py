"""The serving engine on one GPU and with its model spread over several, on the same checkpoint of random weights.

    python bench/serve_ranks.py --layers 6 --ranks 2 --out ranks.json

Layers of Kimi-Linear-48B-A3B are written to --folder (made if it is not there) and loaded by each rank. Rows: seconds
and GB/s of loading, largest difference between the log probabilities of both engines' first tokens and how many of
their greedy tokens agree, ms of a decode step by batch, ms to the first token of a prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from serve import config_of, first_token, now, prompts, random_model

from perilune.model import save
from perilune.serve import LLM, EngineConfig, Params


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """Of one engine."""
    engine, found = llm.engine, dict[str, Any]()
    answers = llm.generate(prompts(8, 300, 9), Params(max_tokens=12, temperature=0, logprobs=0))
    found["tokens"] = [answer.tokens for answer in answers]
    found["logprobs"] = [answer.logprobs[0].logprob for answer in answers]
    times = []
    for seed in range(4):
        times.append(first_token(engine, prompts(1, options.prompt, 50 + seed)[0])[0])
    found["ttft_ms"] = round(1e3 * statistics.median(times[1:]), 2)
    for batch in options.batches:
        for tokens in prompts(batch, 256, batch):
            engine.add(tokens, Params(max_tokens=120, temperature=0))
        while any(request.state.value != "decode" for request in engine.scheduler.requests()):
            engine.step()
        for _ in range(5):
            engine.step()
        steps = []
        for _ in range(3):
            begin = now()
            for _ in range(10):
                engine.step()
            steps.append((now() - begin) / 10)
        found[f"decode_{batch}_ms"] = round(1e3 * statistics.median(steps), 3)
        for request in engine.scheduler.requests():
            engine.abort(request.id)
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/perilune-ranks"))
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--arena", type=int, default=2 * 10**9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        save(random_model(config_of(options.layers, experts=options.experts), options.device), options.folder)
        torch.cuda.empty_cache()
    size = sum(path.stat().st_size for path in options.folder.glob("*.safetensors"))
    config = EngineConfig(options.arena, slots=max(options.batches), token_budget=options.prompt)
    rows = []
    for ranks in (options.ranks, 1):
        begin = time.perf_counter()
        llm = LLM(options.folder, config, device=options.device, ranks=ranks)
        seconds = time.perf_counter() - begin
        row: dict[str, Any] = {"ranks": ranks, "checkpoint_gb": round(size / 1e9, 2), "start_s": round(seconds, 2)}
        row["read"] = [{"gb": round(one.bytes / 1e9, 2), "gb_s": round(one.gb_s, 2)} for one in llm.loaded]
        row |= measure(llm, options)
        rows.append(row)
        print(
            json.dumps({name: value for name, value in row.items() if name not in ("tokens", "logprobs")}), flush=True
        )
        llm.close()
        del llm
        torch.cuda.empty_cache()
    pairs = list(zip(rows[0].pop("logprobs"), rows[1].pop("logprobs"), strict=True))
    tokens = list(zip(rows[0].pop("tokens"), rows[1].pop("tokens"), strict=True))
    same = [sum(a == b for a, b in zip(one, two, strict=True)) for one, two in tokens]
    agreement = {"largest_logprob_difference": max(abs(a - b) for a, b in pairs), "same_greedy_tokens_of_12": same}
    print(json.dumps(agreement), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, **agreement}, indent=1) + "\n")


if __name__ == "__main__":
    main()
