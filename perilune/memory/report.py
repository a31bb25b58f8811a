"""A plan's figures as a table: what was predicted for each name, and what the step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from perilune.memory.plan import short
from perilune.memory.profile import Profile
from perilune.memory.rows import Row

_HEAD = ("count", "MB before", "MB device", "MB stored", "MB moved", "again ms", "GFLOP", "wait ms")


@dataclass(frozen=True)
class Seen:
    """What a step under a plan did.

    rows: `Memory.rows`; alive: bytes that a census found on the device between the passes; flops: what computing a name
    again takes (`memory.flops`); waits: seconds the computation stood still for a name; peak: bytes (predicted, of
    the allocator), None where there is no allocator to ask.
    """

    rows: dict[str, Row]
    alive: int
    flops: Mapping[str, int] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    peak: tuple[int, int] | None = None


def by_short_name(rows: dict[str, Row]) -> dict[str, Row]:
    """Rows of all layers added up; the placements of a name joined where layers differ."""
    found: dict[str, Row] = {}
    for name, row in rows.items():
        mine = found.setdefault(short(name), Row(row.placement))
        if row.placement not in mine.placement.split(" | "):
            mine.placement += f" | {row.placement}"
        mine.count, mine.before = mine.count + row.count, mine.before + row.before
        mine.device, mine.stored = mine.device + row.device, mine.stored + row.stored
    return found


def render(predicted: dict[str, Row], seen: Seen, profile: Profile) -> str:
    """The report as text. predicted: of `predict`. A name's line ends with `!` where prediction and step differ."""
    lines = [f"{'name':<16}{'placement':<14}{_HEAD[0]:>7}" + "".join(f"{title:>11}" for title in _HEAD[1:])]
    seconds, flops, waits = _summed(profile.seconds), _summed(seen.flops), _summed(seen.waits)
    step, plan = by_short_name(seen.rows), by_short_name(predicted)
    for name in sorted(step.keys() | plan.keys(), key=lambda name: -(step.get(name) or plan[name]).before):
        row = step.get(name) or Row("")
        again = "recompute" in row.placement
        # There and back.
        numbers = [f"{size / 1e6:.3f}" for size in (row.before, row.device, row.stored, 2 * row.stored)]
        numbers += [f"{1e3 * seconds.get(name, 0.0):.2f}" if again else ""]
        numbers += [f"{flops.get(name, 0) / 1e9:.3f}" if again else ""]
        numbers += [f"{1e3 * waits[name]:.2f}" if name in waits else ""]
        mark = "" if row == plan.get(name) else " !"
        lines.append(f"{name:<16}{row.placement:<14}{row.count:>7}" + "".join(f"{n:>11}" for n in numbers) + mark)
    for name in sorted({short(name) for name in profile.inputs}):
        cost = f"{1e3 * seconds.get(name, 0.0):>11.2f}{flops.get(name, 0) / 1e9:>11.3f}"
        lines.append(f"{name:<16}{'(region)':<14}{'':>51}{cost}")
    for title, rows in (("predicted", predicted), ("step", seen.rows)):
        device, stored = sum(row.device for row in rows.values()), sum(row.stored for row in rows.values())
        lines.append(f"{title:<37}{'':>11}{device / 1e6:>11.3f}{stored / 1e6:>11.3f}{2 * stored / 1e6:>11.3f}")
    lines.append(f"{'census of the device':<37}{'':>11}{seen.alive / 1e6:>11.3f}")
    if seen.peak is not None:
        lines.append(f"peak: {seen.peak[0] / 1e6:.3f} MB predicted, {seen.peak[1] / 1e6:.3f} MB measured")
    lines.append(f"waited for what was moved: {1e3 * sum(waits.values()):.2f} ms")
    return "\n".join(lines)


def _summed(values: Mapping[str, float]) -> dict[str, float]:
    """Over layers."""
    found: dict[str, float] = {}
    for name, value in values.items():
        found[short(name)] = found.get(short(name), 0) + value
    return found


__all__ = ["Seen", "by_short_name", "render"]
