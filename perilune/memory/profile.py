"""What one forward pass would keep under no plan, and from that what any plan will keep: predicted without running it.

The recorder listens to the same names and hooks as the manager but shares no code with it: it writes down which storage
is saved inside which regions, and `predict` works out by rules alone what is left of that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from perilune.errors import Error
from perilune.memory.codec import coded_bytes
from perilune.memory.manager import UNNAMED, Row
from perilune.memory.plan import KEEP, Plan, short
from perilune.ops import names as ops_names

# Full names of the regions around something, outermost first.
_Regions = tuple[str, ...]


@dataclass(frozen=True)
class _Name:
    """A name that a storage was given: again: can be recomputed; needs: storages that this takes."""

    name: str
    again: bool
    itemsize: int
    needs: tuple[int, ...]
    regions: _Regions


@dataclass
class Profile:
    """sizes: bytes of each storage. saves: (storage, regions around). inputs: region -> (storages, regions around).

    seconds: what a name takes to be computed again.
    """

    sizes: list[int] = field(default_factory=list)
    saves: set[tuple[int, _Regions]] = field(default_factory=set)
    names: dict[int, list[_Name]] = field(default_factory=dict)
    inputs: dict[str, tuple[tuple[int, ...], _Regions]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def kinds(self) -> dict[str, tuple[bool, bool]]:
        """All names, with (can be computed again, can be moved)."""
        tensors = {n.name: (n.again, True) for given in self.names.values() for n in given}
        return tensors | dict.fromkeys(self.inputs, (True, False))

    def scaled(self, factor: float) -> Profile:
        """For so many times the tokens, as if every tensor had rows of tokens."""
        sizes = [round(size * factor) for size in self.sizes]
        return replace(self, sizes=sizes, seconds={n: s * factor for n, s in self.seconds.items()})


class _Recorder:
    def __init__(self, weights: Iterable[torch.Tensor], device: torch.device) -> None:
        self.profile, self._device = Profile(), device
        self._weights = {x.untyped_storage()._cdata for x in weights}
        self._ids: dict[int, tuple[StorageWeakRef, int]] = {}
        self._prefix, self._quiet = "", False
        self._regions: _Regions = ()

    def layer(self, index: int | None) -> None:
        self._prefix = "" if index is None else f"layers.{index}."

    def keep(
        self, name: str, x: torch.Tensor, again: Callable[..., torch.Tensor] | None, args: tuple[Any, ...]
    ) -> None:
        if self._quiet or not (torch.is_grad_enabled() and x.requires_grad):
            return
        name = self._prefix + name
        needs = self._storages(args)
        given = _Name(name, again is not None, x.dtype.itemsize, needs, self._regions)
        self.profile.names.setdefault(self._id(x), []).append(given)
        if again is not None:
            with torch.no_grad(), self._timed(name):
                again(*args)

    def region(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        name = self._prefix + name
        self.profile.inputs[name] = (self._storages(args), self._regions)
        before, self._regions = self._regions, (*self._regions, name)
        try:
            with self._timed(name, quiet=False):
                return function(*args)
        finally:
            self._regions = before

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage()._cdata not in self._weights:
            self.profile.saves.add((self._id(x), self._regions))
        return x.detach()

    def _storages(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        return tuple(self._id(x) for x in tensors if x.untyped_storage()._cdata not in self._weights)

    def _id(self, x: torch.Tensor) -> int:
        storage = x.untyped_storage()
        known = self._ids.get(storage._cdata)
        if known is None or known[0].expired():
            known = self._ids[storage._cdata] = (StorageWeakRef(storage), len(self.profile.sizes))
            self.profile.sizes.append(storage.nbytes())
        return known[1]

    @contextlib.contextmanager
    def _timed(self, name: str, quiet: bool = True) -> Iterator[None]:
        before, self._quiet = self._quiet, self._quiet or quiet
        self._wait()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self._quiet = before
            self.profile.seconds[name] = self.profile.seconds.get(name, 0.0) + time.perf_counter() - begin

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def profile(forward: Callable[[], torch.Tensor], weights: Iterable[torch.Tensor], device: torch.device) -> Profile:
    """Run forward() -> loss once, keeping everything, and note what was saved. weights: as for `Memory`."""
    recorder = _Recorder(weights, device)
    with ops_names.deciding(recorder), saved_tensors_hooks(recorder.pack, lambda x: x):
        forward()
    return recorder.profile


def predict(profile: Profile, plan: Plan) -> dict[str, Row]:
    """Rows as `Memory.rows` would have them after such a forward pass under `plan`. Raises Error as `Plan.check`."""
    kinds = profile.kinds()
    plan.check(kinds)
    placements = {name: plan.placement(name, *kind) for name, kind in kinds.items()}
    again = {name for name, (_, movable) in kinds.items() if not movable and placements[name] != KEEP}
    kept = [storage for storage, regions in profile.saves if not again.intersection(regions)]
    for name, (inputs, regions) in profile.inputs.items():
        if name in again and not again.intersection(regions):
            kept.extend(inputs)
    rows: dict[str, Row] = {}
    done: set[int] = set()
    while kept:
        storage = kept.pop()
        if storage in done:
            continue
        done.add(storage)
        given = [n for n in profile.names.get(storage, ()) if not again.intersection(n.regions)]
        placement = placements[given[-1].name] if given else KEEP
        row = rows.setdefault(given[-1].name if given else UNNAMED, Row(str(placement)))
        size = profile.sizes[storage]
        row.count += 1
        row.before += size
        if placement.where == "recompute":
            kept.extend(given[-1].needs)
            continue
        after = coded_bytes(size // given[-1].itemsize) if placement.fp8 else size
        row.device += after if placement.where == "device" else 0
        row.stored += after if placement.where != "device" else 0
    return rows


def fit(profile: Profile, budget: int, link: float, host: bool = True) -> Plan:
    """The plan with the least predicted cost, by greedy choice, that leaves at most `budget` bytes on the device.

    Candidates: each name, in all layers alike, recomputed or (host) moved to the host; nothing that changes gradients.
    Cost: the measured seconds of computing it again, or its bytes there and back over `link` bytes a second.
    Raises Error with the least that can be reached when the budget is below it.
    """
    kinds: dict[str, tuple[bool, bool]] = {}
    for name, kind in profile.kinds().items():
        kinds[short(name)] = kind
    seconds: dict[str, float] = {}
    for name, value in profile.seconds.items():
        seconds[short(name)] = seconds.get(short(name), 0.0) + value
    table: dict[str, str] = {}
    left = device_bytes(predict(profile, Plan()))
    while left > budget:
        best: tuple[float, str, str, int] | None = None
        for name, (again, movable) in kinds.items():
            for placement in ["recompute"] * again + ["host"] * (movable and host):
                if table.get(name) is not None:
                    continue
                rows = predict(profile, Plan.of(table | {name: placement}, required=False))
                freed = left - device_bytes(rows)
                moved = sum(row.before for full, row in rows.items() if short(full) == name)
                cost = seconds.get(name, 0.0) if placement == "recompute" else 2 * moved / link
                if freed > 0 and (best is None or cost / freed < best[0]):
                    best = (cost / freed, name, placement, freed)
        if best is None:
            raise Error(f"memory plan fit: budget is {budget} bytes; the least that can be reached is {left}")
        table[best[1]] = best[2]
        left -= best[3]
    # What later choices have made needless goes again, the dearest of the rest first.
    for name in reversed(list(table)):
        less = {other: placement for other, placement in table.items() if other != name}
        if device_bytes(predict(profile, Plan.of(less, required=False))) <= budget:
            table = less
    return Plan.of(table, required=False)


def device_bytes(rows: dict[str, Row]) -> int:
    return sum(row.device for row in rows.values())


__all__ = ["Profile", "device_bytes", "fit", "predict", "profile"]
