"""`perilune info`: parameters, bytes and state of a model, from its config alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from perilune.cli.parse import parse
from perilune.config import ModelConfig
from perilune.sizes import Sizes, count

DESCRIPTION = """Count a model's parameters, checkpoint bytes, state and cache, without building it.

examples:
  perilune info kimi-k3
  perilune info nano --json
  perilune info path/to/checkpoint"""


@dataclass(frozen=True)
class Info:
    model: Annotated[str, tyro.conf.Positional]
    """a preset (kimi-k3, kimi-linear-48b-a3b, mini, nano), a checkpoint folder or a config.json"""
    json: bool = False
    """print one JSON object instead of a table"""


def run(arguments: list[str]) -> None:
    args = parse(Info, "info", arguments, DESCRIPTION)
    sizes = count(ModelConfig.from_pretrained(args.model))
    print(json.dumps({"model": args.model, **asdict(sizes)}, indent=2) if args.json else table(args.model, sizes))


def table(name: str, sizes: Sizes) -> str:
    """The counts as lines of text; GB are 1e9 bytes."""
    head = ("component", "parameters", "active a token", "checkpoint bytes")
    rows = [(part.name, *(f"{n:,}" for n in (part.parameters, part.active, part.bytes))) for part in sizes.components]
    rows.append(("total", f"{sizes.parameters:,}", f"{sizes.active:,}", f"{sizes.checkpoint_bytes:,}"))
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in [head, *rows]]
    rule = "-" * len(lines[0])
    lines = [lines[0], rule, *lines[1:-1], rule, lines[-1], ""]
    facts = {
        "parameters": f"{scaled(sizes.parameters)}, of which text {sizes.text_parameters:,}",
        "active": f"{scaled(sizes.active)} a token, without the input embedding",
        "checkpoint": f"{sizes.tensors:,} tensors, {in_bytes(sizes.checkpoint_bytes)}",
        "KDA state": f"{in_bytes(sizes.kda_state_bytes)} a sequence (fp32), "
        f"{in_bytes(sizes.kda_state_with_conv_bytes)} with the convolution windows (bf16)",
        "MLA cache": f"{in_bytes(sizes.kv_bytes_per_token)} a token (bf16)",
    }
    return "\n".join([name, "", *lines, *(f"{key:<11} {text}" for key, text in facts.items())])


def scaled(parameters: int) -> str:
    """104189614848 -> '104.19 B'."""
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:,.2f} {name}"


def in_bytes(size: int) -> str:
    """434110464 -> '434.1 MB'; decimal units, GB at most."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"


__all__ = ["run"]
