"""What a run reports while it goes: metrics.jsonl (exact, also the source of the plots), tensorboard, a progress bar.

A row of metrics.jsonl is one step: {"step", "tokens", "loss", ...} or one evaluation: {"step", "eval", ...}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from perilune.errors import Error
from perilune.train.write import naming, write_whole

# On a terminal there is a bar; elsewhere a line at least this many seconds after the last.
_LINE_SECONDS = 10.0


class MetricsFile:
    """Rows of numbers, one JSON object a line; floats are written so that reading gives the same bits."""

    def __init__(self, path: Path, after_step: int) -> None:
        """Open for appending, without the rows after step `after_step` (of a run that went on past its checkpoint)."""
        kept = [row for row in read_metrics(path) if row["step"] <= after_step]
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        with naming(path):
            self.path, self.file = path, path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. Raises Error naming the file when it cannot be written."""
        with naming(self.path):
            self.file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """No more rows."""
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; none if there is no such file. A last line cut by a crash is left out.

    Raises Error naming file and line for any other row that is not an object with a step.
    """
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    lines = path.read_text("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise Error(f"{path} line {number} is not JSON; repair or remove that line") from None
        if not (isinstance(row, dict) and type(row.get("step")) is int):
            raise Error(f"{path} line {number} is {line[:40]!r}; must be an object with a whole number as step")
        rows.append(row)
    return rows


class Board:
    """Tensorboard scalars, or nothing where tensorboard is not installed."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.writer: Any = None
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            return
        # Events from first_step on are of a run that went past its checkpoint: they are not shown.
        self.writer = SummaryWriter(folder, purge_step=first_step)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """One point on the curve of each name."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush."""
        if self.writer is not None:
            self.writer.close()


class Bar:
    """Progress over the steps of a run."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self.total, self.last = total, 0.0
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=total, completed=done, note="")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def step(self, step: int, notes: Iterable[str]) -> None:
        """Step `step` is done; the notes stand beside the bar."""
        note = " · ".join(notes)
        self.progress.update(self.task, completed=step, note=note)
        if not self.console.is_terminal and (time.monotonic() - self.last > _LINE_SECONDS or step == self.total):
            self.last = time.monotonic()
            self.say(f"step {step}/{self.total} · {note}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


__all__ = ["Bar", "Board", "MetricsFile", "read_metrics"]
