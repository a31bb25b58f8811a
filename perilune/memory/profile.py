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

from perilune.memory.codec import coded_bytes
from perilune.memory.plan import KEEP, Placement, Plan
from perilune.memory.rows import UNNAMED, Row
from perilune.ops import names as ops_names

# Full names of the regions around something, outermost first.
_Regions = tuple[str, ...]
# Layers in the order of the pass, and what lies between them: the how-manieth of these.
_Part = int


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
    """sizes: bytes of each storage. saves: (storage, regions around, part of the pass). inputs: of each region,
    (storages, regions around, part).

    remade: bytes, and regions around, of what operations make again by default (`ops.names.remade`).
    seconds: what a name takes to be computed again; forward: what the whole pass takes without that.
    """

    sizes: list[int] = field(default_factory=list)
    saves: set[tuple[int, _Regions, _Part]] = field(default_factory=set)
    names: dict[int, list[_Name]] = field(default_factory=dict)
    inputs: dict[str, tuple[tuple[int, ...], _Regions, _Part]] = field(default_factory=dict)
    remade: dict[str, tuple[int, _Regions]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    forward: float = 0.0

    def kinds(self) -> dict[str, tuple[bool, bool]]:
        """All names, with (can be computed again, can be moved)."""
        tensors = {n.name: (n.again, True) for given in self.names.values() for n in given}
        return tensors | dict.fromkeys((*self.inputs, *self.remade), (True, False))

    def scaled(self, factor: float) -> Profile:
        """For so many times the tokens, as if every tensor had rows of tokens."""
        sizes = [round(size * factor) for size in self.sizes]
        remade = {n: (round(size * factor), regions) for n, (size, regions) in self.remade.items()}
        seconds = {n: s * factor for n, s in self.seconds.items()}
        return replace(self, sizes=sizes, remade=remade, seconds=seconds, forward=self.forward * factor)


class _Recorder:
    def __init__(self, weights: Iterable[torch.Tensor], device: torch.device) -> None:
        self.profile, self._device = Profile(), device
        self._weights = {x.untyped_storage()._cdata for x in weights}
        self._ids: dict[int, tuple[StorageWeakRef, int]] = {}
        self._prefix, self._part, self._quiet = "", 0, False
        self._regions: _Regions = ()

    def layer(self, index: int | None) -> None:
        self._prefix = "" if index is None else f"layers.{index}."
        self._part += 1

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
        self.profile.inputs[name] = (self._storages(args), self._regions, self._part)
        before, self._regions = self._regions, (*self._regions, name)
        try:
            with self._timed(name, quiet=False):
                return function(*args)
        finally:
            self._regions = before

    def remade(self, name: str, size: int) -> bool:
        self.profile.remade[self._prefix + name] = (size, self._regions)
        return True

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage()._cdata not in self._weights:
            self.profile.saves.add((self._id(x), self._regions, self._part))
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
        try:
            with self.timed() as seconds:
                yield
        finally:
            self._quiet = before
        self.profile.seconds[name] = self.profile.seconds.get(name, 0.0) + seconds[0]

    @contextlib.contextmanager
    def timed(self) -> Iterator[list[float]]:
        """Afterwards the list holds the seconds the block took on the device."""
        seconds: list[float] = []
        self._wait()
        begin = time.perf_counter()
        yield seconds
        self._wait()
        seconds.append(time.perf_counter() - begin)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def profile(forward: Callable[[], torch.Tensor], weights: Iterable[torch.Tensor], device: torch.device) -> Profile:
    """Run forward() -> loss once, keeping everything, and note what was saved. weights: as for `Memory`."""
    recorder = _Recorder(weights, device)
    with recorder.timed() as seconds, ops_names.deciding(recorder), saved_tensors_hooks(recorder.pack, lambda x: x):
        forward()
    noted = recorder.profile
    recipes = {name for name, (_, movable) in noted.kinds().items() if movable}
    noted.forward = seconds[0] - sum(s for name, s in noted.seconds.items() if name in recipes)
    return noted


@dataclass(frozen=True)
class _Kept:
    """A storage that a plan leaves to be saved: the name that decides, its placement, the parts that save it."""

    storage: int
    name: _Name | None
    placement: Placement
    parts: set[_Part]


def _kept(profile: Profile, plan: Plan) -> tuple[list[_Kept], set[str]]:
    """What such a forward pass saves, and the regions that it computes again."""
    kinds = profile.kinds()
    plan.check(kinds)
    placements = {name: plan.placement(name, *kind) for name, kind in kinds.items()}
    again = {name for name, (_, movable) in kinds.items() if not movable and placements[name] != KEEP}
    saved = [(storage, part) for storage, regions, part in profile.saves if not again.intersection(regions)]
    for name, (inputs, regions, part) in profile.inputs.items():
        if name in again and not again.intersection(regions):
            saved.extend((storage, part) for storage in inputs)
    found: dict[int, _Kept] = {}
    while saved:
        storage, part = saved.pop()
        if storage not in found:
            given = [n for n in profile.names.get(storage, ()) if not again.intersection(n.regions)]
            placement = placements[given[-1].name] if given else KEEP
            found[storage] = _Kept(storage, given[-1] if given else None, placement, set())
        one = found[storage]
        if part not in one.parts and one.name is not None and one.placement.where == "recompute":
            saved.extend((needed, part) for needed in one.name.needs)
        one.parts.add(part)
    return list(found.values()), again


def predict(profile: Profile, plan: Plan) -> dict[str, Row]:
    """Rows as `Memory.rows` would have them after such a forward pass under `plan`. Raises Error as `Plan.check`."""
    return predict_both(profile, plan)[0]


def predict_both(profile: Profile, plan: Plan) -> tuple[dict[str, Row], int]:
    """`predict`, and the bytes that last: most of what is moved that a late part of the pass has fetched while an
    earlier one wants it too."""
    kept, again = _kept(profile, plan)
    rows: dict[str, Row] = {}
    spans: list[tuple[_Part, _Part, int]] = []
    for name, (size, regions) in profile.remade.items():
        if plan.keeps(name) and not again.intersection(regions):
            row = rows.setdefault(UNNAMED, Row(str(KEEP)))
            row.count, row.before, row.device = row.count + 1, row.before + size, row.device + size
    for one in kept:
        row = rows.setdefault(one.name.name if one.name else UNNAMED, Row(str(one.placement)))
        size = after = profile.sizes[one.storage]
        row.count += 1
        row.before += size
        if one.placement != KEEP:
            # What comes back is whole: decoded, or computed again.
            spans.append((min(one.parts), max(one.parts), size))
        if one.placement.where == "recompute":
            continue
        if one.placement.fp8 and one.name is not None:
            after = coded_bytes(size // one.name.itemsize)
        if one.placement.where == "device":
            row.device += after
        else:
            row.stored += after
    ends = {last for first, last, _ in spans if first < last}
    lasting = max((sum(size for first, last, size in spans if first < part <= last) for part in ends), default=0)
    return rows, lasting


def device_bytes(rows: dict[str, Row]) -> int:
    return sum(row.device for row in rows.values())


__all__ = ["Profile", "device_bytes", "predict", "predict_both", "profile"]
