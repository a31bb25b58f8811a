"""A step's memory as a picture: bytes on the device over its moments, stacked by name."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from perilune.memory.rows import UNNAMED
from perilune.train.write import write_whole

# Names with a colour of their own; the rest are one.
_MOST = 11


def draw_memory(samples: Sequence[dict[str, int]], backward: int, path: Path) -> None:
    """Write a PNG. samples: bytes alive by name at each moment; backward: the first moment of the backward pass.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peaks: dict[str, int] = {}
    for sample in samples:
        for name, size in sample.items():
            peaks[name] = max(peaks.get(name, 0), size)
    shown = sorted((name for name in peaks if name != UNNAMED), key=lambda name: -peaks[name])[:_MOST]
    rows = {name: [sample.get(name, 0) / 1e6 for sample in samples] for name in shown}
    rows["unnamed and others"] = [
        sum(size for name, size in sample.items() if name not in shown) / 1e6 for sample in samples
    ]
    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    axes.stackplot(range(len(samples)), list(rows.values()), labels=list(rows), colors=colours[: len(rows)])
    axes.axvline(backward, color="#24292f", linewidth=0.8)
    axes.text(backward, axes.get_ylim()[1], " backward", va="top")
    axes.set(xlabel="moment (a tensor is saved or asked for)", ylabel="MB on the device", title="Activations of a step")
    axes.set_xlim(0, max(1, len(samples) - 1))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format="png")
    pyplot.close(figure)
    write_whole(path, drawn.getvalue())


__all__ = ["draw_memory"]
