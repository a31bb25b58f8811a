"""The serving engine on a GPU with random weights of the Kimi-Linear shape.

    python bench/serve.py --out bench/results/serve.json --only decode,ttft,drafts,long

decode: tokens a second and ms a step at batch 1 to 256, with and without CUDA graphs, and the share of the byte floor:
the bytes that a step must read (weights but the embedding, the experts that a uniform router would touch, matrices and
tails, MLA rows) over --bandwidth. ttft: time to the first token by how much of the prompt is cached, on the device and
on the host. drafts: prompt lookup on a text that repeats itself. long: `serve_long`. replay: `serve_replay`. load: a
checkpoint of this model in --folder (written if it is not there) read by each of --readers, from the page cache and
without it. peer: transformers' generate, if it runs. --layers: fewer than all 27. --shape k3: layers of Kimi-K3 with
--experts of its 896 experts (a rank's share). Times are wall clock around whole steps (decode: three runs of --steps
steps), after a warm-up of the same shapes; every prompt is random tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from serve_floor import decode_bytes, prefill_seconds
from serve_long import VOCABULARY, first_token, long, now, prompts
from serve_replay import replay

from perilune import ModelConfig, Transformer
from perilune.model import load, save
from perilune.serve import Engine, EngineConfig, Params
from perilune.serve.cache.room import allocate
from perilune.serve.control import sleep


def config_of(layers: int, shape: str = "kimi-linear", experts: int | None = None, packed: bool = False) -> ModelConfig:
    """The first `layers` layers of Kimi-Linear-48B-A3B or Kimi-K3, perhaps with fewer experts."""
    base = ModelConfig.from_pretrained({"kimi-linear": "kimi-linear-48b-a3b", "k3": "kimi-k3"}[shape])
    return dataclasses.replace(
        base,
        num_layers=layers,
        moe=dataclasses.replace(base.moe, num_experts=experts or base.moe.num_experts),
        quant=base.quant if packed else None,
        vocab_size=VOCABULARY,
        kda=dataclasses.replace(base.kda, layers=tuple(i for i in base.kda.layers if i < layers)),
        mla=dataclasses.replace(base.mla, layers=tuple(i for i in base.mla.layers if i < layers)),
        hf_present=None,
        hf_extra={},
    )


@torch.no_grad()
def random_model(config: ModelConfig, device: str) -> Transformer:
    """bf16 weights (fp32 where the model keeps fp32) made on the device."""
    with torch.device("meta"):
        model = Transformer(config, packed=config.quant is not None)
    model = model.to(torch.bfloat16).to_empty(device=device)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("conv_CW", "A_log_H", "dt_bias_HK", "o_norm_K"):  # as `perilune.model.load` keeps them
            parameter.data = parameter.data.float()
        if leaf.endswith("norm") or leaf in ("norm_D", "attn_norm_D", "ffn_norm_D", "o_norm_K"):
            parameter.fill_(1.0)
        elif leaf in ("A_log_H", "dt_bias_HK"):
            parameter.uniform_(-1.0, 1.0)
        else:
            parameter.normal_(0.0, 0.02)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("_codes"):
                buffer.random_(0, 256)
            elif name.endswith("_scales"):
                buffer.fill_(121)  # 2^-6
        if hasattr(module, "bias_E"):
            module.bias_E = torch.zeros_like(module.bias_E, dtype=torch.float32)
    return model.eval()


def forget(engine: Engine) -> None:
    """Give an engine's memory back; its requests are dropped."""
    for request in engine.scheduler.requests():
        engine.abort(request.id)
    sleep(engine)


def decode(model: Transformer, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for graphs in (256, 0):
        for batch in options.batches:
            if not graphs and batch != 1:
                continue
            config = EngineConfig(options.arena, slots=batch, token_budget=options.budget, graphs=graphs)
            engine = Engine(model, config)
            for tokens in prompts(batch, 512):
                engine.add(tokens, Params(max_tokens=200, temperature=0))
            while any(request.state.value != "decode" for request in engine.scheduler.requests()):
                engine.step()
            for _ in range(5):
                engine.step()
            times = []
            for _ in range(3):
                begin = now()
                for _ in range(options.steps):
                    engine.step()
                times.append((now() - begin) / options.steps)
            seconds = statistics.median(times)
            least = decode_bytes(model, batch, 560) / options.bandwidth
            yield {
                "batch": batch,
                "graphs": bool(graphs),
                "ms": round(seconds * 1e3, 3),
                "ms_range": [round(min(times) * 1e3, 3), round(max(times) * 1e3, 3)],
                "tokens_s": round(batch / seconds, 1),
                "floor_ms": round(least * 1e3, 3),
                "share_of_floor": round(least / seconds, 3),
            }
            forget(engine)


def ttft(model: Transformer, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    length = options.prompt
    for kind in ("device", "host"):
        config = EngineConfig(
            options.arena, min(options.arena, 10**9) if kind == "host" else 0, slots=16, token_budget=options.budget
        )
        engine = Engine(model, config)
        for share in (0.0, 0.5, 0.9, 0.99):
            if kind == "host" and not share:
                continue
            times, cached = [], 0
            for seed in range(4):
                base = prompts(1, length, 1000 + seed)[0]
                kept = int(length * share) // 64 * 64
                if kept:
                    first_token(engine, [*base[:kept], 1])
                    if kind == "host":
                        evict(engine)
                seconds, cached = first_token(engine, [*base[:kept], *prompts(1, length - kept, 5000 + seed)[0]])
                times.append(seconds)
                engine.clear_cache()
            yield {
                "tokens": length,
                "hit": cached,
                "tier": kind,
                "ms": round(statistics.median(times[1:]) * 1e3, 2),
                "ms_range": [round(min(times[1:]) * 1e3, 2), round(max(times[1:]) * 1e3, 2)],
                "floor_ms": round(prefill_seconds(model, length - cached, cached, options.bandwidth) * 1e3, 2),
            }
        forget(engine)


def evict(engine: Engine) -> None:
    """Write everything that can be back to the host, as pressure would."""
    arena = engine.cache.arenas[0]
    pages = allocate(engine.cache, 0, arena.capacity, engine.clock())
    if pages:
        arena.free(pages)


def drafts(model: Transformer, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Answers that repeat 16 tokens, where prompt lookup is right almost always: its best case, and no other.

    The weights of the embedding and the head are set so that each token of the cycle is followed by the next; all
    layers between compute what they always do.
    """
    cycle = prompts(1, 16, 3)[0]
    embed, head = model.embed.weight, model.lm_head.weight
    kept = embed[cycle].clone(), head[cycle].clone()
    head[cycle[1:] + cycle[:1]] = embed[cycle]
    embed[cycle] = 200.0 * embed[cycle]
    for batch in (1, 8, 32):
        for most in (0, 3, 7):
            config = EngineConfig(options.arena, slots=32, token_budget=options.budget, drafts=most)
            engine = Engine(model, config)
            for _ in range(batch):
                engine.add(cycle * 16, Params(max_tokens=400, temperature=0))
            while any(request.state.value != "decode" for request in engine.scheduler.requests()):
                engine.step()
            for _ in range(10):
                engine.step()
            made, steps = sum(r.length for r in engine.scheduler.requests()), 12
            begin = now()
            for _ in range(steps):
                engine.step()
            seconds = now() - begin
            alive = list(engine.scheduler.requests())
            assert len(alive) == batch
            done = sum(r.length for r in alive) - made
            yield {
                "batch": batch,
                "most": most,
                "tokens_s": round(done / seconds, 1),
                "tokens_a_step": round(done / steps / batch, 2),
                "ms_a_step": round(seconds / steps * 1e3, 3),
            }
            forget(engine)
    embed[cycle], head[cycle] = kept


def peer(model: Transformer, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """transformers' generate at the same depth, in process, with weights of its own."""
    import transformers

    theirs_config = transformers.KimiLinearConfig.from_dict(model.config.to_hf())
    with torch.device("meta"):
        theirs = transformers.KimiLinearForCausalLM(theirs_config).to(torch.bfloat16)
    theirs = theirs.to_empty(device=options.device).eval()
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.02)
    for buffer in theirs.buffers():
        buffer.zero_()
    for batch in (1, 16):
        ids = torch.tensor(prompts(batch, 512), device=options.device)
        made = {}
        for count in (2, 2, 10):  # the first is a warm-up
            begin = now()
            theirs.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
            made[count] = now() - begin
        step = (made[10] - made[2]) / 8
        yield {"peer": "transformers", "batch": batch, "ms": round(step * 1e3, 2), "tokens_s": round(batch / step, 1)}


def read(model: Transformer, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """GB/s of `perilune.model.load` by reader, from files that the system has in memory and from such as it has not."""
    folder = Path(options.folder)
    if not (folder / "config.json").exists():
        begin = now()
        save(model, folder)
        yield {"written_s": round(now() - begin, 2)}
    files = list(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)

    def seconds(reader: Any) -> float:
        begin = now()
        load(folder, options.device, reader=reader)
        return now() - begin

    times: dict[str, list[float]] = {reader: [] for reader in options.readers}
    for _ in range(4):  # the first one is a warm-up
        for reader, found in times.items():
            found.append(seconds(reader))
    for reader, found in times.items():
        forget_files(files)
        cold = seconds(reader)
        yield {
            "reader": reader,
            "gb": round(size / 1e9, 2),
            "read_gb_s": round(size / statistics.median(found[1:]) / 1e9, 2),
            "seconds": [round(t, 2) for t in found[1:]],
            "cold_gb_s": round(size / cold / 1e9, 2),
        }


def forget_files(files: list[Path]) -> None:
    """Drop files from the system's memory; does nothing to files that live there."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


PARTS = {
    "decode": decode,
    "ttft": ttft,
    "drafts": drafts,
    "long": long,
    "replay": replay,
    "load": read,
    "peer": peer,
}


REPORTED = ("bandwidth", "budget", "arena", "steps", "prompt", "long", "rate", "sessions", "faster", "replay_arena")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--only", default="decode,ttft,drafts,long")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--long", type=int, default=262144)
    parser.add_argument("--rate", type=float, default=2.0, help="short requests a second beside the long prompt")
    parser.add_argument("--arena", type=int, default=8 * 10**9, help="bytes of the device arena")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second of the floor")
    parser.add_argument("--shape", choices=("kimi-linear", "k3"), default="kimi-linear")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--packed", action="store_true", help="experts of Kimi-K3 as MXFP4 codes, as it is stored")
    parser.add_argument("--trace", type=Path, help="of the replay")
    parser.add_argument("--offsets", type=Path)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--faster", type=float, default=100.0, help="how much faster than the trace")
    parser.add_argument("--replay-arena", type=int, default=1_500_000_000)
    parser.add_argument("--folder", default="/tmp/perilune-bench-checkpoint")
    parser.add_argument("--readers", type=lambda text: text.split(","), default=["safetensors"], help="of load")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = config_of(options.layers, options.shape, options.experts, options.packed)
    model = random_model(config, options.device)
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "versions": {"torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
        "shape": options.shape,
        "layers": options.layers,
        "experts": config.moe.num_experts,
        "mla_layers": len(config.mla.layers),
        "weights_gb": round(sum(p.nbytes for p in [*model.parameters(), *model.buffers()]) / 1e9, 2),
        "options": {name: getattr(options, name) for name in REPORTED},
    }
    print(json.dumps(facts), flush=True)
    for name in options.only.split(","):
        rows = facts[name] = []
        try:
            with torch.inference_mode():
                for row in PARTS[name](model, options):
                    rows.append(row)
                    print(name, json.dumps(row), flush=True)
        except Exception as problem:  # the other parts are worth having
            rows.append({"failed": f"{type(problem).__name__}: {problem}"[:500]})
            print(name, rows[-1], flush=True)
        if options.out:
            options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
