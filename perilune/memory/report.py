"""A plan's figures as a table: what was predicted for each name, and what the step did."""

from __future__ import annotations

from perilune.memory.manager import Row
from perilune.memory.plan import short
from perilune.memory.profile import Profile


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


def render(predicted: dict[str, Row], measured: dict[str, Row], alive: int, profile: Profile, waited: float) -> str:
    """The report as text.

    predicted: of `predict`; measured: `Memory.rows` of the step; alive: bytes that a census found on the device between
    the passes; waited: seconds that the backward pass waited for stores. A name's line ends with `!` where prediction
    and step differ.
    """
    lines = [
        f"{'name':<16}{'placement':<14}{'count':>7}{'MB before':>12}{'MB device':>12}{'MB stored':>12}{'again ms':>10}"
    ]
    seconds: dict[str, float] = {}
    for name, value in profile.seconds.items():
        seconds[short(name)] = seconds.get(short(name), 0.0) + value
    step, plan = by_short_name(measured), by_short_name(predicted)
    regions = {short(name) for name in profile.inputs}
    for name in sorted(step.keys() | plan.keys(), key=lambda name: -(step.get(name) or plan[name]).before):
        row = step.get(name) or Row("")
        again = f"{1e3 * seconds.get(name, 0.0):.2f}" if "recompute" in row.placement else ""
        numbers = "".join(f"{size / 1e6:>12.3f}" for size in (row.before, row.device, row.stored))
        lines.append(
            f"{name:<16}{row.placement:<14}{row.count:>7}{numbers}{again:>10}{'' if row == plan.get(name) else ' !'}"
        )
    for name in sorted(regions):
        lines.append(f"{name:<16}{'(region)':<14}{'':>43}{1e3 * seconds.get(name, 0.0):>10.2f}")
    for title, rows in (("predicted", predicted), ("step", measured)):
        device, stored = sum(row.device for row in rows.values()), sum(row.stored for row in rows.values())
        lines.append(f"{title:<30}{'':>19}{device / 1e6:>12.3f}{stored / 1e6:>12.3f}")
    lines.append(f"{'census of the device':<30}{'':>19}{alive / 1e6:>12.3f}")
    lines.append(f"waited for stores: {1e3 * waited:.2f} ms")
    return "\n".join(lines)


__all__ = ["by_short_name", "render"]
