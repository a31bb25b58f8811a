"""`perilune quickstart`: the main job."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.cli.parse import parse

DESCRIPTION = """Train a small Kimi-K3-shaped model on real text on this machine's CPU, and measure what it learned.

The text is the Python standard library's own sources. The work is fixed: minutes on two free cores. Stopped and started
again, it goes on from its newest checkpoint, one after each quarter of the steps.

examples:
  perilune quickstart
  perilune quickstart --out runs/second"""


@dataclass(frozen=True)
class Quickstart:
    out: str = "runs/quickstart"
    """folder for everything it makes: text, tokenizer, checkpoint, curves, report.html"""


def run(arguments: list[str]) -> None:
    args = parse(Quickstart, "quickstart", arguments, DESCRIPTION)
    from perilune.train import quickstart

    quickstart.run(args.out)


__all__ = ["run"]
