"""`perilune bench-serve`: load on a server with an OpenAI-compatible address, and what it measures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from perilune.cli.parse import parse
from perilune.errors import Error

DESCRIPTION = """Send requests to a running server, ours or any other with an OpenAI-compatible address, and measure it.

Prompts are common English words; their number is fitted to the server's own token counts first. An open loop
(--rate, or the times of a trace) sends whatever the server does; a closed loop (--concurrency) waits for answers.

examples:
  perilune bench-serve http://127.0.0.1:8000 --rate 2 --requests 50
  perilune bench-serve http://127.0.0.1:8000 --workload shared-prefix --concurrency 16 --plot load.png
  perilune bench-serve http://127.0.0.1:8000 --workload trace --trace agentic.jsonl.gz --speed 20 --out load.json
  perilune bench-serve http://127.0.0.1:8000 --rate 4 --slo-ttft-ms 500 --slo-tpot-ms 50"""


@dataclass(frozen=True)
class BenchServe:
    url: Annotated[str, tyro.conf.Positional]
    """the server's base, with or without /v1"""
    workload: Literal["random", "shared-prefix", "trace"] = "random"
    """prompts that share nothing, prompts that begin with one of --prefixes, or a trace's"""
    rate: float | None = None
    """open loop: requests a second, at the times of a Poisson process"""
    concurrency: int | None = None
    """closed loop: requests on their way at any time; 8 where neither this nor --rate is given, but for a trace"""
    requests: int = 100
    """how many; of a trace its first so many, 0 for all"""
    input_tokens: int = 512
    """of a prompt; for shared-prefix those behind the prefix"""
    output_tokens: int = 64
    """of an answer"""
    prefixes: int = 8
    """shared-prefix: how many there are"""
    prefix_tokens: int = 2048
    """shared-prefix: tokens of each"""
    trace: str | None = None
    """JSON lines, plain or gzip, as for simulate-cache"""
    offsets: str | None = None
    """JSON file with `offset_s`, the start of every session of an agentic trace"""
    speed: float = 1.0
    """trace: times as fast as it was recorded"""
    shrink: int = 1
    """trace: divide all lengths by this, for a small model"""
    slo_ttft_ms: float | None = None
    """goodput: bound of the time to first token"""
    slo_tpot_ms: float | None = None
    """goodput: bound of a request's mean time a token after the first"""
    model: str | None = None
    """its name at the server; None takes the first of /v1/models"""
    endpoint: Literal["completions", "chat"] = "completions"
    """/v1/completions or /v1/chat/completions"""
    api_key: str | None = None
    """sent as a bearer token"""
    stop_at_eos: bool = False
    """let answers end early; else `ignore_eos` is sent, which OpenAI's own service refuses"""
    timeout: float = 600.0
    """seconds without a byte after which a request has failed"""
    seed: int = 0
    """of prompts and arrival times"""
    out: str | None = None
    """write everything, each request too, into this JSON file"""
    plot: str | None = None
    """draw the load into this image"""
    json: bool = False
    """print the figures as one JSON object"""


def run(arguments: list[str]) -> None:
    args = parse(BenchServe, "bench-serve", arguments, DESCRIPTION)
    check(args)
    from perilune.serve.bench import Slo, draw, summarize

    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    records, facts = asyncio.run(load(args))
    figures = {**facts, **summarize(records, slo)}
    if args.out is not None:
        whole = {**figures, "records": [asdict(record) for record in records]}
        Path(args.out).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(records, slo, args.plot, f"{facts['model']}: {args.workload}, {facts['load']}")
    print(json.dumps(figures, indent=2) if args.json else table(figures))
    if figures["failed"] == figures["requests"]:
        raise Error(f"every request failed: {next(iter(figures['errors']))}")


def check(args: BenchServe) -> None:
    """Raise Error for arguments that contradict each other."""
    if not args.url.startswith(("http://", "https://")):
        raise Error(f"url is {args.url!r}; must begin with http:// or https://")
    if args.rate is not None and args.concurrency is not None:
        raise Error("rate and concurrency are both given; allowed: one of the two")
    if (args.workload == "trace") != (args.trace is not None):
        raise Error(f"workload is {args.workload!r} and trace is {args.trace!r}; a trace is what workload trace needs")
    if args.requests < 1 and args.workload != "trace":
        raise Error(f"requests is {args.requests}; must be >= 1")
    for name in ("output_tokens", "timeout"):
        if not getattr(args, name) > 0:
            raise Error(f"{name} is {getattr(args, name)}; must be > 0")


async def load(args: BenchServe) -> tuple[list[Any], dict[str, Any]]:
    """Fit the words, send everything, and say what was sent."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from perilune.serve.bench import Target, closed_loop, measure, open_loop, poisson
    from perilune.serve.bench.client import find_model, open_client, words_per_token
    from perilune.serve.bench.load import Progress as Going

    target = Target(args.url, args.model or "", args.endpoint, args.api_key, args.stop_at_eos)
    async with open_client(target, args.timeout) as client:
        target = replace(target, model=args.model or await find_model(client, target))
        words = await words_per_token(client, target)
        items, count = workload(args, words)
        if args.rate is not None:
            items = poisson(items, args.rate, args.seed)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
            task = bar.add_task("starting", total=count)

            def show(going: Going) -> None:
                text = f"{going.sent - going.done} on their way, {going.failed} failed, {going.output_tokens} tokens"
                bar.update(task, completed=going.done, description=text)

            going = Going(show)
            timed = args.concurrency is None and (args.rate is not None or args.workload == "trace")
            clients = args.concurrency or 8

            async def send(item: Any, begin: float, planned: float) -> Any:
                return await measure(client, target, item, begin, planned)

            if timed:
                records = await open_loop(items, send, going)
            else:
                records = await closed_loop(items, send, clients, going)
    times = f"{args.rate:g} requests/s" if args.rate else f"the trace's times, {args.speed:g}x as fast"
    sent = {name: value for name, value in asdict(args).items() if name not in ("api_key", "out", "plot", "json")}
    return records, {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": target.model,
        "load": times if timed else f"{clients} at once",
        "words_per_token": round(words, 4),
        "arguments": sent,
    }


def workload(args: BenchServe, words: float) -> tuple[Iterator[Any], int]:
    """The requests to send, and how many there are."""
    from perilune.serve.bench import random_items, shared_items, trace_items
    from perilune.serve.simulate import read

    if args.workload == "random":
        return random_items(args.requests, args.input_tokens, args.output_tokens, words, args.seed), args.requests
    if args.workload == "shared-prefix":
        sizes = (args.prefixes, args.prefix_tokens, args.input_tokens, args.output_tokens)
        return shared_items(args.requests, *sizes, words, args.seed), args.requests
    assert args.trace is not None
    trace = read(args.trace, offsets=args.offsets)
    if args.requests:
        trace = replace(trace, requests=trace.requests[: args.requests])
    return trace_items(trace, words, args.speed, args.shrink, args.seed), len(trace.requests)


def table(figures: dict[str, Any]) -> str:
    """The figures for a person."""
    tokens, rates, good = figures["tokens"], figures["throughput"], figures["goodput"]
    hit = "not said by the server" if figures["hit_rate"] is None else f"{figures['hit_rate']:.1%}"
    lines = [
        f"{figures['requests']} requests to {figures['model']}, {figures['load']}, {figures['seconds']} s, "
        f"{figures['failed']} failed",
        "",
        f"{'ms':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
        *(
            row(label, figures[name])
            for label, name in (
                ("time to first token", "ttft_ms"),
                ("between two pieces", "itl_ms"),
                ("a token after first", "tpot_ms"),
                ("whole answer", "latency_ms"),
                ("sent late", "sent_late_ms"),
            )
        ),
        "",
        f"prompt tokens   {tokens['prompt']:>10,}   from the cache {tokens['cached']:,} ({hit})",
        f"output tokens   {tokens['output']:>10,}   {rates['output_tokens_per_s']:.1f} a second",
        f"requests        {rates['requests_per_s']:>10.3f}   a second",
    ]
    if good["slo_ttft_ms"] is not None or good["slo_tpot_ms"] is not None:
        lines.append(f"within the SLO  {good['share']:>10.1%}   {good['requests_per_s']:.3f} requests a second")
    return "\n".join([*lines, *(f"failed {count} times: {error}" for error, count in figures["errors"].items())])


def row(label: str, values: dict[str, float] | None) -> str:
    if values is None:
        return f"{label:<22}{'-':>10}"
    return f"{label:<22}" + "".join(f"{values[name]:>10.1f}" for name in ("mean", "p50", "p90", "p99"))


__all__ = ["run"]
