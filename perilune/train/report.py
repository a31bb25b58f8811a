"""What a person looks at after a run: loss.png, expert-load.png, and one self-contained report.html.

Everything is read from the run's metrics.jsonl and config.json, so a report can be made again at any time.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perilune.errors import Error
from perilune.train.log import read_metrics
from perilune.train.write import write_whole

# What a row of a step must hold to be drawn.
_DRAWN = ("loss", "lr", "grad_norm", "seconds", "tokens", "flops", "imbalance")

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid #d8dee4 }
td:first-child, th:first-child { text-align: left }
img { max-width: 100% } pre { background: #f6f8fa; padding: 1rem; overflow-x: auto; white-space: pre-wrap }
p.note { color: #57606a }
"""


class Section(NamedTuple):
    """A part of a report added by the caller: a table (first row is its head) and / or preformatted text."""

    title: str
    note: str = ""
    table: Sequence[Sequence[object]] = ()
    text: str = ""


def require_plots() -> None:
    """Raise Error unless matplotlib is installed; asked before a run, so that its report does not fail at the end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Error("report: matplotlib is not installed; install perilune[train]")


def write_report(out: str | Path, sections: Sequence[Section] = ()) -> Path:
    """Draw the plots and write report.html into the run's folder; returns the page's path.

    Raises Error if the folder has no metrics.jsonl with a step in it, a step lacks what is drawn, matplotlib is
    missing, or a file cannot be written (what was there before stays).
    """
    out = Path(out)
    rows = read_metrics(out / "metrics.jsonl")
    steps = [row for row in rows if "eval" not in row]
    if not steps:
        raise Error(f"report: {out / 'metrics.jsonl'} holds no step")
    for row in steps:
        if missing := [name for name in _DRAWN if name not in row]:
            raise Error(f"report: {out / 'metrics.jsonl'} has no {missing[0]} at step {row['step']}")
    evaluations = [row for row in rows if "eval" in row]
    require_plots()
    import matplotlib

    matplotlib.use("Agg")
    _draw_loss(steps, evaluations, out / "loss.png")
    loads = [row for row in steps if row.get("load")]
    if loads:
        _draw_load(steps, loads, out / "expert-load.png")
    page = _page(out, steps, evaluations, bool(loads), sections)
    path = out / "report.html"
    write_whole(path, page)
    return path


def _save_figure(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format="png")
    pyplot.close(figure)
    write_whole(path, drawn.getvalue())


def _draw_loss(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    x, y = [row["step"] for row in steps], [row["loss"] for row in steps]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1), layout="constrained")
    left.plot(x, y, color="#9ec5e8", linewidth=0.8, label="training, each step")
    left.plot(x, _smooth(y, max(1, len(y) // 50)), color="#0b5cad", linewidth=1.8, label="training, running mean")
    if evaluations:
        marks = [row["step"] for row in evaluations]
        left.plot(marks, [row["eval"]["loss"] for row in evaluations], "o-", color="#c2410c", label="held out")
    left.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    left.legend(frameon=False)
    left.grid(alpha=0.3)
    right.plot(x, [row["lr"] for row in steps], color="#0b5cad")
    right.set(xlabel="step", ylabel="learning rate")
    right.set_ylim(bottom=0)
    right.grid(alpha=0.3)
    norm = right.twinx()
    norm.plot(x, [row["grad_norm"] for row in steps], color="#8b949e", linewidth=0.6)
    norm.set_ylabel("gradient norm", color="#6e7781")
    norm.set_ylim(bottom=0)
    _save_figure(figure, path)


def _draw_load(steps: list[dict[str, Any]], loads: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    layers = sorted(loads[-1]["load"], key=int)
    recent = loads[-max(1, len(loads) // 10) :]
    shares = []
    for layer in layers:
        sums = [sum(values) for values in zip(*(row["load"][layer] for row in recent), strict=True)]
        shares.append([value * len(sums) / max(1, sum(sums)) for value in sums])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    image = left.imshow(shares, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    left.set(xlabel="expert", ylabel="layer", title="Load of each expert, last tenth of the run (1 = even)")
    left.set_yticks(range(len(layers)), layers)
    figure.colorbar(image, ax=left)
    x = [row["step"] for row in steps]
    for i, layer in enumerate(layers):
        y = _smooth([row["imbalance"].get(layer, math.nan) for row in steps], max(1, len(steps) // 50))
        right.plot(x, y, linewidth=1, color=pyplot.get_cmap("viridis")(i / max(1, len(layers) - 1)), label=layer)
    right.axhline(1, color="#1b1f24", linewidth=0.8, linestyle=":")
    right.set(xlabel="step", ylabel="fullest expert / mean", title="Imbalance of each layer")
    right.grid(alpha=0.3)
    if len(layers) <= 12:
        right.legend(title="layer", frameon=False, ncols=2)
    _save_figure(figure, path)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values at each point."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out


def _page(
    out: Path,
    steps: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
    has_load: bool,
    sections: Sequence[Section],
) -> str:
    seconds, tokens = sum(row["seconds"] for row in steps), sum(row["tokens"] for row in steps)
    facts: list[Sequence[object]] = [
        ("quantity", "value"),
        ("steps", f"{len(steps):,}"),
        ("training tokens", f"{tokens:,}"),
        ("time in steps", f"{seconds:,.0f} s"),
        ("tokens a second", f"{tokens / max(seconds, 1e-9):,.0f}"),
        ("operations a second", f"{sum(row['flops'] for row in steps) / max(seconds, 1e-9) / 1e9:,.1f} GFLOP/s"),
        ("training loss, first and last step", f"{steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f}"),
    ]
    if evaluations:
        last = evaluations[-1]["eval"]
        facts.append(("held-out loss, nats a token", f"{last['loss']:.4f}"))
        if last["bytes"]:
            facts.append(("held-out bits a byte", f"{last['nats'] / math.log(2) / last['bytes']:.4f}"))
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>Training report: {html.escape(out.name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Training report: {html.escape(out.name)}</h1>",
        _table(facts),
    ]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.note:
            parts.append(f"<p class='note'>{html.escape(section.note)}</p>")
        if section.table:
            parts.append(_table(section.table))
        if section.text:
            parts.append(f"<pre>{html.escape(section.text)}</pre>")
    parts += ["<h2>Loss</h2>", _image(out / "loss.png", "training and held-out loss over the steps")]
    if has_load:
        parts += ["<h2>Experts</h2>", _image(out / "expert-load.png", "load of every expert, and imbalance over time")]
    settings = (out / "config.json").read_text("utf-8") if (out / "config.json").is_file() else "{}"
    parts += ["<h2>Settings</h2>", f"<pre>{html.escape(json.dumps(json.loads(settings), indent=1))}</pre>"]
    return "\n".join([*parts, "</body></html>\n"])


def _table(rows: Sequence[Sequence[object]]) -> str:
    lines = []
    for i, row in enumerate(rows):
        cell = "th" if i == 0 else "td"
        lines.append("<tr>" + "".join(f"<{cell}>{html.escape(str(value))}</{cell}>" for value in row) + "</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def _image(path: Path, alt: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<img alt='{html.escape(alt)}' src='data:image/png;base64,{data}'>"


__all__ = ["Section", "require_plots", "write_report"]
