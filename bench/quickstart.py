"""The figures and the picture of the README: reads a finished quickstart, or does it first.

    python bench/quickstart.py [--out runs/quickstart]

Writes bench/results/quickstart.json, docs/img/quickstart.png, and what stands between the marks in README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch

import perilune
from perilune.config import ModelConfig
from perilune.sizes import count
from perilune.train.log import read_metrics
from perilune.train.quickstart import run

ROOT = Path(__file__).parents[1]


def cpu_name() -> str:
    """The processor as Linux calls it."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found.group(1) if found else platform.processor()


def figures(out: Path) -> dict[str, Any]:
    """What was measured, from the files of a finished run."""
    summary = json.loads((out / "summary.json").read_text())
    steps = [row for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {
            "perilune": perilune.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "shapes": {"steps": len(steps), "tokens_per_step": steps[0]["tokens"]},
        "parameters": count(ModelConfig.from_pretrained(out / "checkpoint")).parameters,
        "training_tokens": sum(row["tokens"] for row in steps),
        "tokens_per_second": statistics.median(row["tokens"] / row["seconds"] for row in steps),
        **summary,
    }


def table(found: dict[str, Any]) -> str:
    """The README's picture and table."""
    bits = found["bits_per_byte"]
    rows = [
        ("bits a byte on held-out files, trained model", f"**{bits['perilune']:.3f}**"),
        ("`xz -9`, file by file", f"{bits['xz -9']:.3f}"),
        ("`gzip -9`, file by file", f"{bits['gzip -9']:.3f}"),
        ("the same model untrained", f"{bits['untrained']:.3f}"),
        ("parameters", f"{found['parameters'] / 1e6:.2f} M"),
        ("training tokens", f"{found['training_tokens'] / 1e6:.2f} M"),
        ("training speed", f"{found['tokens_per_second']:,.0f} tokens/s"),
        ("whole job", f"{found['seconds'] / 60:.1f} minutes"),
    ]
    head = f"| `make demo` on {os.cpu_count()} cores | |\n|---|---|\n"
    picture = "![Training and held-out loss of the quickstart](docs/img/quickstart.png)\n\n"
    return picture + head + "\n".join(f"| {name} | {value} |" for name, value in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    out = parser.parse_args().out
    if not (out / "summary.json").is_file():
        run(out)
    found = figures(out)
    for folder in (ROOT / "bench" / "results", ROOT / "docs" / "img"):
        folder.mkdir(parents=True, exist_ok=True)
    (ROOT / "bench" / "results" / "quickstart.json").write_text(json.dumps(found, indent=1) + "\n")
    shutil.copy(out / "loss.png", ROOT / "docs" / "img" / "quickstart.png")
    readme = ROOT / "README.md"
    begin, end = "<!-- figures -->\n", "\n<!-- end of figures -->"
    before, rest = readme.read_text().split(begin)
    readme.write_text(before + begin + table(found) + end + rest.split(end)[1])
    print(table(found))


if __name__ == "__main__":
    main()
