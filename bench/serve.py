"""The serving engine on a GPU with random weights of the Kimi-Linear shape.

    python bench/serve.py --out bench/results/serve.json --only decode,ttft,drafts,long

decode: tokens a second and ms a step at batch 1 to 256, with and without CUDA graphs, and the share of the byte floor:
the bytes that a step must read (weights but the embedding, the experts that a uniform router would touch, matrices and
tails, MLA rows) over --bandwidth. ttft: time to the first token by how much of the prompt is cached, on the device and
on the host. drafts: prompt lookup on a text that repeats itself. long: one long prompt, cold and warm, and the time to
the first token of short prompts that arrive while it is computed. replay: `serve_replay`. load: a checkpoint of this
model written to --folder and read again, from the page cache. peer: transformers' generate, if it runs.
--layers: fewer than all 27. --shape k3: layers of Kimi-K3 with --experts of its 896 experts (a rank's share). Times are
wall clock around whole steps (decode: three runs of --steps steps), after a warm-up of the same shapes; every prompt is
random tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from serve_replay import replay

from perilune import ModelConfig, Transformer
from perilune.model import load, save
from perilune.serve import Engine, EngineConfig, Params
from perilune.serve.control import sleep

VOCABULARY = 163840


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


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, length), generator=generator).tolist()


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def forget(engine: Engine) -> None:
    """Give an engine's memory back; its requests are dropped."""
    for request in engine.scheduler.requests():
        engine.abort(request.id)
    sleep(engine)


def floor_bytes(model: Transformer, batch: int, cached: int) -> int:
    """Bytes that one decode step of `batch` sequences with `cached` tokens each must read."""
    config, weights, experts = model.config, 0, 0
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_E2FL", "down_ELF")):
            experts += parameter.numel() * parameter.element_size()
        elif not name.startswith("embed"):
            weights += parameter.numel() * parameter.element_size()
    experts += sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith(("_codes", "_scales")))
    touched = 1 - (1 - config.moe.top_k / config.moe.num_experts) ** batch
    kda, mla = len(config.kda.layers), len(config.mla.layers)
    heads, dim = config.kda.num_heads, config.kda.head_dim
    state = kda * heads * (dim * dim * 4 + 32 * 3 * dim * 4)  # a matrix and half a tail
    rows = mla * cached * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * 2
    return int(weights + touched * experts + batch * (state + rows))


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
            least = floor_bytes(model, batch, 560) / options.bandwidth
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


def first_token(engine: Engine, tokens: list[int], beside: Callable[[], None] = lambda: None) -> tuple[float, int]:
    """Seconds from `add` to the first token, and how many prompt tokens were cached."""
    begin = now()
    id = engine.add(tokens, Params(max_tokens=1, temperature=0))
    while True:
        for output in engine.step():
            if output.id == id and output.tokens:
                return now() - begin, output.cached
        beside()


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
            }
        forget(engine)


def evict(engine: Engine) -> None:
    """Write everything that can be back to the host, as pressure would."""
    arena = engine.cache.arenas[0]
    pages = engine.cache._allocate(0, arena.capacity, engine.clock())
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


def long(model: Transformer, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = EngineConfig(options.arena, slots=8, token_budget=options.budget)
    engine = Engine(model, config)
    first_token(engine, prompts(1, 9000, 1)[0])
    text = prompts(1, options.long, 2)[0]
    short: list[float] = []
    waiting: dict[int, float] = {}

    def beside() -> None:
        """Every few steps a short prompt arrives."""
        if engine.counters.steps % 4 == 0 and not waiting:
            tokens = prompts(1, 200, engine.counters.steps)[0]
            waiting[engine.add(tokens, Params(max_tokens=1, temperature=0))] = now()

    begin = now()
    id = engine.add(text, Params(max_tokens=1, temperature=0))
    cold = None
    while cold is None or waiting:
        for output in engine.step():
            if output.id == id and output.tokens:
                cold = now() - begin
            elif output.id in waiting and output.tokens:
                short.append(now() - waiting.pop(output.id))
        if cold is None:
            beside()
    warm, cached = first_token(engine, [*text, 5, 6, 7])
    yield {
        "tokens": options.long,
        "cold_s": round(cold, 3),
        "warm_ms": round(warm * 1e3, 2),
        "warm_hit": cached,
        "short_ttft_ms": [round(1e3 * f(short), 1) for f in (min, statistics.median, max)] if short else None,
        "short_count": len(short),
    }


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
        for count in (4, 4, 20):  # the first is a warm-up
            begin = now()
            theirs.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
            made[count] = now() - begin
        step = (made[20] - made[4]) / 16
        yield {"peer": "transformers", "batch": batch, "ms": round(step * 1e3, 2), "tokens_s": round(batch / step, 1)}


def read(model: Transformer, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """GB/s of `perilune.model.load` on files that the system has in memory."""
    folder = Path(options.folder)
    begin = now()
    save(model, folder)
    written = now() - begin
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    times = []
    for _ in range(3):
        begin = now()
        load(folder, options.device)
        times.append(now() - begin)
    yield {
        "gb": round(size / 1e9, 2),
        "written_gb_s": round(size / written / 1e9, 2),
        "read_gb_s": round(size / statistics.median(times) / 1e9, 2),
        "seconds": [round(t, 2) for t in times],
    }


PARTS = {
    "decode": decode,
    "ttft": ttft,
    "drafts": drafts,
    "long": long,
    "replay": replay,
    "load": read,
    "peer": peer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--only", default="decode,ttft,drafts,long")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--long", type=int, default=262144)
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
        "bandwidth": options.bandwidth,
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
