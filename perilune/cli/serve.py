"""`perilune serve`: an OpenAI-compatible server for a checkpoint. Flags have vLLM's names where vLLM has them."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from perilune.cli.checkpoint import Dtype, device
from perilune.cli.parse import parse
from perilune.config import ModelConfig
from perilune.errors import Error

if TYPE_CHECKING:
    from perilune.serve import EngineConfig
    from perilune.serve.server import ServerConfig

DESCRIPTION = """Serve a checkpoint over HTTP: /v1/chat/completions, /v1/completions, /v1/messages and a page at /ui.

examples:
  perilune serve runs/quickstart/checkpoint
  perilune serve moonshotai/Kimi-Linear-48B-A3B-Instruct --tensor-parallel-size 2 --api-key SECRET
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "def main():"}'"""


@dataclass(frozen=True)
class Serve:
    model: Annotated[str, tyro.conf.Positional]
    """folder of a checkpoint, or a name on the Hugging Face hub (HF_HUB_OFFLINE=1 uses its cache only)"""
    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 is all of them: give --api-key then"""
    port: int = 8000
    """port; 0 takes a free one"""
    served_model_name: tuple[str, ...] = ()
    """names clients may ask for; default: the model as given"""
    api_key: tuple[str, ...] = ()
    """keys of clients, a tenant each with a cache of its own; the environment's PERILUNE_API_KEY is one more"""
    revision: str | None = None
    """branch, tag or commit on the hub"""
    download_dir: str | None = None
    """where files of the hub are kept"""
    device: str = "auto"
    """cpu, cuda, ...; auto takes the GPU if there is one"""
    dtype: Dtype | Literal["auto"] = "auto"
    """number format of the weights; auto takes that of the files"""
    tensor_parallel_size: Annotated[int, tyro.conf.arg(aliases=["-tp"])] = 1
    """GPUs that share the model; its experts are spread over them too"""
    data_parallel_size: Annotated[int, tyro.conf.arg(aliases=["-dp"])] = 1
    """engines behind this server, each in a process and on --tensor-parallel-size GPUs of its own"""
    enable_expert_parallel: bool = False
    """accepted: experts are spread over the GPUs in any case"""
    max_model_len: int | None = None
    """most tokens of prompt and answer; default: what model and memory allow"""
    gpu_memory_utilization: float = 0.9
    """share of the memory that the server may use"""
    kv_cache_memory_bytes: int | None = None
    """memory of the prefix cache; default: what is left (on a CPU a quarter of what is free)"""
    kv_offloading_size: float = 0.0
    """GiB of host memory for what the device evicts"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """number format of KV pages"""
    block_size: int = 64
    """tokens of a KV page"""
    max_num_seqs: int = 64
    """requests that run at once"""
    max_num_batched_tokens: int = 8192
    """tokens of a step: smaller keeps tokens steady, larger fills prompts faster"""
    long_prefill_token_threshold: int = 32768
    """tokens (prompt and max_tokens) from which a request is of the long class"""
    long_share: float = 0.75
    """share of slots, memory and step tokens that the long class may take together"""
    reserve: float = 0.25
    """share of max_tokens that is set aside when a request starts; below 1 requests may be parked"""
    num_speculative_tokens: int = 0
    """most tokens that prompt lookup drafts a step (0: none, at most 7)"""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """whether `priority` of a request counts"""
    seed: int = 0
    """of requests that give none"""
    default_max_tokens: int = 16384
    """most tokens of a chat answer where the request says nothing"""
    default_thinking_effort: Literal["none", "low", "high", "max"] = "none"
    """where the request says nothing; none says nothing to the model"""
    request_policy: Literal["none", "kimi"] = "none"
    """kimi refuses what Moonshot's own service refuses (n, temperature, top_p, penalties)"""
    tool_call_parser: Literal["auto", "kimi_k3", "kimi_k2"] = "auto"
    """format of the model's output; auto goes by its family"""
    reasoning_parser: Literal["auto", "kimi_k3", "kimi_k2"] = "auto"
    """as --tool-call-parser; one parser reads both"""
    enable_auto_tool_choice: bool = False
    """accepted: the model may always call the tools of a request"""
    enable_prefix_caching: bool = False
    """accepted: prefixes are always cached"""
    enable_chunked_prefill: bool = False
    """accepted: prompts are always computed in chunks"""
    load_format: Literal["auto", "safetensors", "fastsafetensors"] = "auto"
    """what reads the files; fastsafetensors needs `pip install 'perilune[fastsafetensors]'`, else safetensors reads"""
    trust_remote_code: bool = False
    """accepted and without effect: no code of a model repository is ever run"""
    max_body_bytes: int = 8_000_000
    """largest request body"""
    max_running: int = 1024
    """requests on their way at once; more are refused (429)"""
    max_running_per_key: int = 512
    """of these, of one key"""
    drain_seconds: float = 30.0
    """time that answers have to end after SIGTERM"""
    otlp_traces_endpoint: str | None = None
    """where OpenTelemetry spans go (needs `pip install 'perilune[otel]'`)"""


def run(arguments: list[str]) -> None:
    args = parse(Serve, "serve", arguments, DESCRIPTION)
    for name in ("data_parallel_size", "tensor_parallel_size"):
        if getattr(args, name) < 1:
            raise Error(f"--{name.replace('_', '-')} is {getattr(args, name)}; must be >= 1")
    if not 0 <= args.port <= 65535:
        raise Error(f"--port is {args.port}; allowed: 0 to 65535")
    if not 0 <= args.kv_offloading_size < math.inf:
        raise Error(f"--kv-offloading-size is {args.kv_offloading_size}; must be >= 0")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise Error(f"--gpu-memory-utilization is {args.gpu_memory_utilization}; must be in (0, 1]")
    from perilune.serve.server.hub import folder_of

    # What is small first: a model that does not fit is refused before its weights are fetched.
    config = ModelConfig.from_pretrained(folder_of(args.model, args.revision, args.download_dir, weights=False))
    on = device(args.device)
    engine = engine_config(args, config, on.type)
    import torch

    from perilune.serve import LLM, EngineError
    from perilune.serve.replicas import Replicas
    from perilune.serve.server import build_app, logs
    from perilune.serve.server.run import serve

    logs.to_stderr(logging.INFO)
    for note in notes(args):
        logs.logger.info(note)
    folder = folder_of(args.model, args.revision, args.download_dir)
    dtype = None if args.dtype in ("auto", "stored") else getattr(torch, args.dtype)
    options: dict[str, Any] = {"device": str(on), "dtype": dtype, "packed": True, "ranks": args.tensor_parallel_size}
    options["reader"] = reader(args)
    one = args.data_parallel_size == 1
    llm = LLM(folder, engine, **options) if one else Replicas(folder, engine, args.data_parallel_size, **options)
    try:
        serve(build_app(server_config(args), llm), args.host, args.port)
    except EngineError as error:
        llm.close() if isinstance(llm, LLM) else asyncio.run(llm.drain(0))
        # What waits on a GPU for a rank that has ended could keep this process from ending.
        print(f"perilune: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    finally:
        llm.close() if isinstance(llm, LLM) else asyncio.run(llm.drain(0))


def engine_config(args: Serve, config: ModelConfig, kind: str) -> EngineConfig:
    """Raises Error, with the arithmetic, for a model that does not fit."""
    import torch

    from perilune.serve import EngineConfig
    from perilune.serve.server.fit import fit

    if kind == "cuda":
        devices, wanted = torch.cuda.device_count(), args.tensor_parallel_size * args.data_parallel_size
        if devices < wanted:
            raise Error(
                f"{wanted} GPUs are asked for (--tensor-parallel-size, --data-parallel-size); here are {devices}"
            )
        memory = min(torch.cuda.mem_get_info(i)[1] for i in range(wanted))
    else:
        # Processes on a CPU share its memory.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        memory //= args.tensor_parallel_size * args.data_parallel_size
    element = None if args.dtype in ("auto", "stored") else getattr(torch, args.dtype).itemsize
    share, ranks = args.gpu_memory_utilization, args.tensor_parallel_size
    found = fit(config, memory, ranks, share, args.max_num_seqs, args.max_model_len, element)
    arena = found.arena if kind == "cuda" else min(found.arena, memory // 4)
    return EngineConfig(
        arena_bytes=args.kv_cache_memory_bytes or arena,
        host_bytes=int(args.kv_offloading_size * 2**30),
        slots=args.max_num_seqs,
        token_budget=args.max_num_batched_tokens,
        page_tokens=args.block_size,
        match_unit=args.block_size,
        kv="model" if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        long_tokens=args.long_prefill_token_threshold,
        long_share=args.long_share,
        reserve=args.reserve,
        drafts=args.num_speculative_tokens,
        seed=args.seed,
    )


def server_config(args: Serve) -> ServerConfig:
    """The server's part of the flags."""
    from perilune.serve.server import ServerConfig

    key = os.environ.get("PERILUNE_API_KEY")
    parsers = [None if name == "auto" else name for name in (args.tool_call_parser, args.reasoning_parser)]
    return ServerConfig(
        model_names=args.served_model_name or (args.model,),
        api_keys=(*args.api_key, *([key] if key else [])),
        max_model_len=args.max_model_len,
        default_max_tokens=args.default_max_tokens,
        tool_call_parser=parsers[0],
        reasoning_parser=parsers[1],
        default_thinking_effort=None if args.default_thinking_effort == "none" else args.default_thinking_effort,
        request_policy=None if args.request_policy == "none" else args.request_policy,
        priorities=args.scheduling_policy == "priority",
        max_body_bytes=args.max_body_bytes,
        max_running=args.max_running,
        max_running_per_key=args.max_running_per_key,
        drain_seconds=args.drain_seconds,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )


def reader(args: Serve) -> str:
    """What reads the files: the command of a machine that has fastsafetensors works on one that has not."""
    there = args.load_format == "fastsafetensors" and find_spec("fastsafetensors") is not None
    return "fastsafetensors" if there else "safetensors"


def notes(args: Serve) -> list[str]:
    """What an operator should know of flags that are taken and do nothing, and of an open door."""
    out = []
    if args.trust_remote_code:
        out.append("--trust-remote-code has no effect: no code of a model repository is ever run")
    if reader(args) != args.load_format != "auto":
        out.append("--load-format fastsafetensors needs `pip install 'perilune[fastsafetensors]'`: safetensors reads")
    if args.host not in ("127.0.0.1", "localhost", "::1") and not (args.api_key or os.environ.get("PERILUNE_API_KEY")):
        out.append(f"listening on {args.host} without --api-key: whoever reaches it may use it")
    return out


__all__ = ["run"]
