"""`perilune quantize`: a checkpoint whose routed experts are packed to MXFP4."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from perilune.cli.parse import parse
from perilune.errors import Error

DESCRIPTION = """Round the routed experts of a checkpoint to MXFP4 and write them packed (compressed-tensors' format).

Prints, layer by layer, how far the weights moved. Training with qat.enabled loses less: see docs/mx.md.

examples:
  perilune quantize runs/quickstart/checkpoint runs/quickstart/mxfp4
  perilune quantize CHECKPOINT OUT --rule rceil --activations inputs"""


@dataclass(frozen=True)
class Quantize:
    checkpoint: Annotated[str, tyro.conf.Positional]
    """the checkpoint folder to read"""
    out: Annotated[str, tyro.conf.Positional]
    """the folder to write"""
    rule: Literal["even", "floor", "rceil", "ceil"] = "even"
    """how the scale of 32 values is chosen; even is compressed-tensors' and the released checkpoints'"""
    activations: Literal["none", "inputs", "all"] = "none"
    """what the model rounds to MXFP8 while it runs: nothing, the experts' inputs, or between their products as well"""
    device: str = "auto"
    """where to round: cpu, cuda, ..."""


def run(arguments: list[str]) -> None:
    args = parse(Quantize, "quantize", arguments, DESCRIPTION)
    from perilune.cli.checkpoint import device
    from perilune.config import QuantConfig
    from perilune.model import load, quantize, save

    source, out = Path(args.checkpoint), Path(args.out)
    if out.resolve() == source.resolve():
        raise Error(f"out is {args.out!r}, the checkpoint itself; name another folder: rounding cannot be undone")
    model = load(source, device(args.device))
    found = quantize(model, QuantConfig(scale_rule=args.rule, activations=args.activations))
    save(model, out)
    for path in source.iterdir():
        weights = path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json")
        if path.is_file() and not weights:
            shutil.copy2(path, out / path.name)
    width = max((len(each.name) for each in found), default=4)
    print(f"{'weights':<{width}}  error  worst expert     clipped  to zero")
    for each in found:
        print(
            f"{each.name:<{width}}  {each.relative:.2%}  {each.worst:.2%} (no. {each.worst_expert:>3})"
            f"  {each.clipped:>6.2%}  {each.zeros:>6.2%}"
        )
    before, after = (sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (source, out))
    print(f"{before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB in {out}")


__all__ = ["run"]
