"""The plan with the least predicted cost whose bytes on the device stay within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from perilune.errors import Error
from perilune.memory.manager import AHEAD, Memory
from perilune.memory.plan import Plan, load_plan, short
from perilune.memory.profile import Profile, device_bytes, predict, predict_both
from perilune.memory.rows import Row

# Share of a hidden copy's time by which computation beside it is slower: both use the device's memory.
_TAX = 0.03


def resident(profile: Profile, plan: Plan) -> int:
    """Most bytes of a plan on the device in the backward pass: what is kept, what is on its way back, and what has come
    back and is wanted by several layers.

    On its way are `Memory.ahead` of the largest layer and up to one tensor more.
    """
    return _resident(*predict_both(profile, plan))


def _resident(rows: dict[str, Row], lasting: int) -> int:
    moved: dict[str, int] = {}
    largest = max((row.stored // max(1, row.count) for row in rows.values()), default=0)
    for name, row in rows.items():
        layer = name.removesuffix(short(name))
        moved[layer] = moved.get(layer, 0) + row.stored
    most = max(moved.values(), default=0)
    return device_bytes(rows) + lasting + min(most, round(AHEAD * most) + largest)


def fit(profile: Profile, budget: int, link: float, host: bool = True, around: int = 0) -> Plan:
    """By greedy choice; `budget` bytes hold what a plan leaves on the device and what is there `around` it.

    Candidates: each name, in all layers alike, recomputed or (host) moved to the host; nothing that changes gradients.
    around: bytes of the peak under any plan (weights, gradients, optimizer state, `working_set`).
    link: bytes a second to the host, and as many back at the same time.
    Raises Error with the least that can be reached when the budget is below it.
    """
    kinds: dict[str, tuple[bool, bool]] = {}
    for name, kind in profile.kinds().items():
        kinds[short(name)] = kind
    table: dict[str, str] = {}
    left, spent = _cost(profile, table, link)
    while around + left > budget:
        best: tuple[float, int, float, str, str] | None = None
        for name, (again, movable) in kinds.items():
            for placement in ["recompute"] * again + ["host"] * (movable and host):
                if name in table:
                    continue
                bytes_, seconds = _cost(profile, table | {name: placement}, link)
                # Of equal prices the larger gain.
                offer = ((seconds - spent) / max(1, left - bytes_), bytes_, seconds, name, placement)
                if bytes_ < left and (best is None or offer < best):
                    best = offer
        if best is None:
            raise Error(f"memory plan fit: budget is {budget} bytes; the least that can be reached is {around + left}")
        _, left, spent, name, placement = best
        table[name] = placement
    # What later choices have made needless goes again, the dearest of the rest first.
    for name in reversed(list(table)):
        less = {other: placement for other, placement in table.items() if other != name}
        if around + _cost(profile, less, link)[0] <= budget:
            table = less
    return Plan.of(table, required=False)


def _cost(profile: Profile, table: dict[str, str], link: float) -> tuple[int, float]:
    """(bytes on the device, seconds a step is longer): computing again, and copies.

    Copies out are hidden behind the forward pass and those back behind a backward pass twice as long, up to a tax.
    """
    rows, lasting = predict_both(profile, Plan.of(table, required=False))
    again = sum(s for name, s in profile.seconds.items() if table.get(short(name)) == "recompute")
    copy = sum(row.stored for row in rows.values()) / link
    exposed = max(0.0, copy - profile.forward) + max(0.0, copy - 2 * profile.forward)
    return _resident(rows, lasting), again + exposed + 2 * _TAX * copy


def working_set(
    forward: Callable[[], torch.Tensor], weights: Iterable[torch.Tensor], profile: Profile, device: torch.device
) -> int:
    """Bytes of a GPU that a step needs beside what its plan keeps: the gradients in flight, and one sublayer's numbers.

    Measured in one step forward and backward, in which every sublayer is computed again, so it holds up to one
    sublayer's saved tensors. Gradients must be there (they are added to).
    """
    plan, weights = load_plan("full-recompute"), list(weights)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with Memory(plan, weights).step():
        forward().backward()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - device_bytes(predict(profile, plan))


__all__ = ["fit", "resident", "working_set"]
