"""`perilune export`: a run's checkpoint in the released layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from perilune.cli.parse import parse

DESCRIPTION = """Write a checkpoint of a training run as a Hugging Face folder with its tokenizer.

Reads the files that the run's processes wrote, a piece at a time: one process, no GPU, and never the whole model.

examples:
  perilune export runs/first
  perilune export runs/first --step 200 --out exported"""


@dataclass(frozen=True)
class Export:
    run: Annotated[str, tyro.conf.Positional]
    """the folder of the run"""
    step: int | None = None
    """which of its checkpoints; the newest by default"""
    out: str | None = None
    """the folder to write; RUN/exported by default"""


def run(arguments: list[str]) -> None:
    args = parse(Export, "export", arguments, DESCRIPTION)
    from perilune.train.export import export

    print(export(args.run, args.out or Path(args.run) / "exported", args.step))


__all__ = ["run"]
