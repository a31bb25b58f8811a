"""What `perilune sandbox ls` and `top` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as what is in them."""
    text = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in text), 0) for i, name in enumerate(names)]
    lines = [list(names), *text]
    return "\n".join(
        "  ".join(f"{value:<{width}}" for value, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={part}" for name, part in value.items())
    return "" if value is None else str(value)


def top_table(rows: Sequence[dict[str, Any]]) -> str:
    """State, age, what was written since the last restore, and memory that is shared and its own; MiB are 2^20."""
    names = (
        "sandbox",
        "template",
        "state",
        "age s",
        "left s",
        "dirty MiB",
        "shared MiB",
        "private MiB",
        "PSS MiB",
        "cpu s",
    )
    lines = []
    for row in sorted(rows, key=lambda row: -row["pss"]):
        sizes = [f"{row[name] / 2**20:.1f}" for name in ("dirty", "shared", "private", "pss")]
        left = "" if row["left"] is None else f"{row['left']:.0f}"
        lines.append(
            [
                row["sandboxID"],
                row["templateID"],
                row["phase"],
                f"{row['age']:.0f}",
                left,
                *sizes,
                f"{row['cpuSeconds']:.1f}",
            ]
        )
    total = [f"{sum(row[name] for row in rows) / 2**20:.1f}" for name in ("dirty", "shared", "private", "pss")]
    lines.append([f"{len(rows)} in all", "", "", "", "", *total, ""])
    return table(names, lines)


__all__ = ["table", "top_table"]
