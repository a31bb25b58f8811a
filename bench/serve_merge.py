"""Several files of bench/serve.py as one: python bench/serve_merge.py bench/results/serve.json FILE...

A file may be a merged one, the target itself among them. Of each part (decode, ttft, ...) of each shape and depth the
last file that measured it counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FACTS = ("device", "versions", "date", "shape", "layers", "experts", "mla_layers", "weights_gb", "options", "bandwidth")
FACTS += ("command", "note")


def merge(files: list[Path]) -> list[dict[str, Any]]:
    """Runs that still have a part of their own, in the order of the files."""
    runs: list[dict[str, Any]] = []
    for run in [run for path in files for run in _runs(json.loads(path.read_text()))]:
        for older in runs:
            if all(older[name] == run[name] for name in ("shape", "layers", "experts")):
                for part in [part for part in run if part not in FACTS]:
                    older.pop(part, None)
        runs.append(run)
    return [run for run in runs if any(name not in FACTS for name in run)]


def _runs(file: dict[str, Any]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = file.get("runs", [file])
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    args.target.write_text(json.dumps({"runs": merge(args.files)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
