"""The serving engine on one GPU and with its model spread over several, on the same checkpoint of random weights.

    python bench/serve_ranks.py --layers 6 --ranks 2 --out ranks.json

Layers of Kimi-Linear-48B-A3B are written to --folder (made if it is not there) and loaded by each rank. Rows: seconds
and GB/s of loading, largest difference between the log probabilities of both engines' first tokens and how many of
their greedy tokens agree; ms (median, least, most) of a decode step by batch with the share of the byte floor of a rank
(`serve_floor.py`), and to the first token of a prompt.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from serve import config_of, random_model
from serve_floor import decode_bytes
from serve_long import first_token, now, prompts

import perilune.serve.ranks as room
from perilune.model import save
from perilune.serve import LLM, EngineConfig, Params
from perilune.serve.ranks.shard import BALANCED

VARIANTS = (f"symmetric:{BALANCED}", f"collective:{BALANCED}", f"symmetric:{1 << 40}")


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """Of one engine."""
    engine, found = llm.engine, dict[str, Any]()
    answers = llm.generate(prompts(8, 300, 9), Params(max_tokens=12, temperature=0, logprobs=0))
    found["tokens"] = [answer.tokens for answer in answers]
    found["logprobs"] = [answer.logprobs[0].logprob for answer in answers]
    times = [first_token(engine, prompts(1, options.prompt, 50 + seed)[0])[0] for seed in range(6)][1:]
    found["ttft_ms"] = [round(1e3 * f(times), 2) for f in (statistics.median, min, max)]
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
        floor = decode_bytes(engine.model, batch, 280) / options.bandwidth
        found[f"decode_{batch}"] = {
            "ms": [round(1e3 * f(steps), 3) for f in (statistics.median, min, max)],
            "share_of_floor": round(floor / statistics.median(steps), 3),
        }
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
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--arena", type=int, default=2 * 10**9)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second of the floor")
    parser.add_argument("--reader", default="safetensors")
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help="transport:tokens of a step from which experts balance"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        save(random_model(config_of(options.layers, experts=options.experts), options.device), options.folder)
        torch.cuda.empty_cache()
    size = sum(path.stat().st_size for path in options.folder.glob("*.safetensors"))
    config = EngineConfig(options.arena, slots=max(options.batches), token_budget=options.prompt)
    rows = []
    inner = room.Ranks
    for variant in [*options.variants.split(","), None]:
        ranks = 1
        if variant is not None:
            transport, balanced = variant.split(":")
            ranks = options.ranks
            room.Ranks = functools.partial(inner, transport=transport, balanced=int(balanced))  # type: ignore[misc]
        begin = time.perf_counter()
        llm = LLM(options.folder, config, device=options.device, ranks=ranks, reader=options.reader)
        seconds = time.perf_counter() - begin
        used = llm._ranks.link.transport if llm._ranks else None
        row: dict[str, Any] = {
            "ranks": ranks,
            "variant": variant,
            "transport": used,
            "checkpoint_gb": round(size / 1e9, 2),
            "start_s": round(seconds, 2),
        }
        row["read"] = [{"gb": round(one.bytes / 1e9, 2), "gb_s": round(one.gb_s, 2)} for one in llm.loaded]
        row |= measure(llm, options)
        rows.append(row)
        print(
            json.dumps({name: value for name, value in row.items() if name not in ("tokens", "logprobs")}), flush=True
        )
        llm.close()
        del llm
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    *several, one = rows
    for row in several:
        gaps = [abs(a - b) for a, b in zip(row["logprobs"], one["logprobs"], strict=True)]
        row["logprob_difference"] = [round(f(gaps), 5) for f in (statistics.median, max)]
        row["same_greedy_tokens_of_12"] = [
            sum(a == b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(row["tokens"], one["tokens"], strict=True)
        ]
        print(json.dumps({name: row[name] for name in ("variant", *list(row)[-2:])}), flush=True)
    facts = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "layers": options.layers,
        "experts": options.experts or 256,
        "prompt": options.prompt,
        "bandwidth": options.bandwidth,
    }
    if options.out:
        for row in rows:
            del row["tokens"], row["logprobs"]
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
