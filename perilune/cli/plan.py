"""`perilune plan`: memory and communication of a training run on many GPUs, before it is started."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from perilune.cli.info import in_bytes
from perilune.cli.parse import parse
from perilune.config import ModelConfig
from perilune.errors import Error

if TYPE_CHECKING:
    from perilune.train.plan import Plan

DESCRIPTION = """Predict what a training run would need on so many GPUs: parameters, optimizer states, gradients and
activations of a rank, bytes of each collective a step, and the idle time of the pipeline. Nothing is run.

examples:
  perilune plan run.toml --gpus 8
  perilune plan k3.toml --gpus 512 --memory 141GB"""


@dataclass(frozen=True)
class Arguments:
    config: Annotated[str, tyro.conf.Positional]
    """the TOML file of the run"""
    gpus: int = 8
    """processes of the run, one a GPU"""
    memory: str = "141GB"
    """of one GPU: a number and GB (1e9) or GiB"""
    json: bool = False
    """print one JSON object instead of a table"""


def run(arguments: list[str]) -> None:
    args = parse(Arguments, "plan", arguments, DESCRIPTION)
    room = memory_bytes(args.memory)
    from perilune.train.config import load_config
    from perilune.train.plan import plan

    config = load_config(args.config)
    found = plan(config, ModelConfig.from_pretrained(config.init_from or config.model), args.gpus)
    print(json.dumps(asdict(found)) if args.json else table(found, room))


def memory_bytes(text: str) -> int:
    """'141GB' -> 141e9. Raises Error for anything else than a number and GB or GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text)
    if match is None:
        raise Error(f"memory is {text!r}; must be a number and GB or GiB, as 141GB")
    return int(float(match[1]) * (10**9 if match[2] == "GB" else 2**30))


def table(plan: Plan, room: int) -> str:
    """The plan as lines of text."""
    names = ("pp", "replicate", "shard", "cp", "tp")
    axes = " x ".join(f"{name} {size}" for name, size in zip(names, plan.sizes, strict=True))
    lines = [
        f"{plan.gpus} GPUs: {axes}, ep {plan.ep}",
        f"{plan.parameters:,} parameters; {plan.tokens:,} tokens a step, "
        f"{plan.micro_batches} micro-batches a rank; {plan.flops:.3e} operations a rank and step",
        "",
        "rank of    layers      parameters    weights   gathered  gradients  optimizer     states"
        "  activations  or stream",
    ]
    shown = {0, len(plan.ranks) // 2, len(plan.ranks) - 1, plan.ranks.index(plan.fullest)}
    for rank in (plan.ranks[i] for i in sorted(shown)):
        sizes = (rank.weights, rank.gathered, rank.gradients, rank.optimizer, rank.states)
        cells = "".join(f"{in_bytes(size):>11}" for size in sizes)
        kept = f"{in_bytes(rank.activations):>13}{in_bytes(rank.stream):>11}"
        lines.append(f"stage {rank.stage:<5}{rank.layers:>6}{rank.parameters:>16,}{cells}{kept}")
    full = plan.fullest
    most = max(plan.ranks, key=lambda rank: rank.least)
    lines += [
        "",
        f"fullest with all activations: stage {full.stage}, {in_bytes(full.total)} of {in_bytes(room)}: "
        + verdict(full.total, room),
        f"fullest with the stream alone: stage {most.stage}, {in_bytes(most.least)} of {in_bytes(room)}: "
        + verdict(most.least, room),
        "",
    ]
    lines += ["received by a rank in a step"]
    lines += [f"  {name:<28}{in_bytes(size):>12}" for name, size in plan.collectives.items()] or ["  nothing"]
    if plan.hops:
        least, most_bytes = min(plan.hops), max(plan.hops)
        lines.append(f"a hop of one micro-batch: {in_bytes(least)} to {in_bytes(most_bytes)}")
        lines.append(f"a pipeline rank waits {plan.bubble:.1%} of a step")
        lines += loans(plan)
    return "\n".join(lines)


def loans(plan: Plan) -> list[str]:
    """What a memory plan with `peer` would move between stages."""
    if not plan.loans:
        return ["", "all stages are equally full: nothing for a memory plan to keep on a peer"]
    before, held = [rank.total for rank in plan.ranks], plan.levelled
    lines = ["", "a memory plan with 'peer' keeps activations of one stage on another's rank"]
    for loan in plan.loans:
        lines.append(f"  of stage {loan.borrower} on stage {loan.lender:<17}{in_bytes(loan.bytes):>12}")
    spread = [f"{in_bytes(min(of))} to {in_bytes(max(of))}" for of in (before, held)]
    return [*lines, f"  a rank's total: {spread[0]} without, {spread[1]} with them"]


def verdict(size: int, room: int) -> str:
    return "fits" if size <= room else f"does not fit, {in_bytes(size - room)} too much"


__all__ = ["run"]
