"""The activation manager: applies a plan to every tensor that autograd saves during a step.

It hears names from `perilune.ops.names` and sees saved tensors through autograd's hooks; the two meet by storage.
Only storages with a name are ever encoded or moved, so row statistics, routing indices, cu_seqlens and whatever else an
operation keeps for itself stay as they are; weights are refused a name.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from perilune.errors import Error
from perilune.memory.plan import KEEP, Placement, Plan
from perilune.memory.saved import Recipe, Saved, Slot, Source
from perilune.memory.stores import Store
from perilune.ops import names as ops_names


@dataclass
class Row:
    """What became of one name in the step: bytes of the storages that were saved, and of what stands for them."""

    placement: str
    count: int = 0
    before: int = 0
    device: int = 0
    stored: int = 0


UNNAMED = "(unnamed)"


class _Named:
    """A storage with a name. The weak reference also keeps its address from being given to another storage."""

    def __init__(self, name: str, x: torch.Tensor, placement: Placement) -> None:
        self.name, self.dtype, self.placement = name, x.dtype, placement
        self.storage = StorageWeakRef(x.untyped_storage())
        self.source: Callable[[], Source | None] = lambda: None
        self.counted = False


class Memory:
    """One plan at work. Use it around each step's forward and backward passes:

        memory = Memory(load_plan("k3"), model.parameters(), host=MemoryStore())
        with memory.step():
            loss(model(x)).backward()

    weights: tensors that are never saved by value (parameters and buffers). host, nvme: stores for what the plan sends
    there. `rows` is what the last step did, by name.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Iterable[torch.Tensor] = (),
        host: Store | None = None,
        nvme: Store | None = None,
    ) -> None:
        """Raises Error when the plan needs a store that is not given."""
        self.plan, self.stores = plan, {"host": host, "nvme": nvme}
        for rule in plan.rules:
            if rule.placement.where in self.stores and self.stores[rule.placement.where] is None:
                raise Error(f"memory plan: {rule.pattern!r} goes to {rule.placement.where}, but no such store is given")
        self._weights, self._protected = list(weights), set[int]()
        self.names: dict[str, tuple[bool, bool]] = {}
        self.rows: dict[str, Row] = {}
        self._placements: dict[str, Placement] = {}
        self._quiet_depth = 0
        self._checked = False
        self._forget()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Forward and backward passes of one step. However it ends, nothing of it stays in a store.

        Raises Error for a pattern of the plan that no name has matched, before the first backward operation.
        """
        self._protected = {x.untyped_storage()._cdata for x in self._weights}
        self.rows = {}
        try:
            with ops_names.deciding(self), saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._check()
        finally:
            for slot in list(self._slots):
                slot.release()
            self._forget()

    def _forget(self) -> None:
        self._prefix = ""
        self._named: dict[int, _Named] = {}
        self._unnamed: dict[int, StorageWeakRef] = {}
        # Handles that were made before their tensor got its name, and recipes nobody has asked for yet.
        self._late: dict[int, list[weakref.ref[Saved]]] = {}
        self._fresh: list[Recipe] = []
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._order: list[weakref.ref[Slot]] = []

    # -- names ---------------------------------------------------------------------------------------------------

    def layer(self, index: int | None) -> None:
        if self._quiet_depth == 0:
            self._prefix = "" if index is None else f"layers.{index}."
            self._late.clear()
            self._fresh.clear()

    def keep(
        self, name: str, x: torch.Tensor, again: Callable[..., torch.Tensor] | None, args: tuple[Any, ...]
    ) -> None:
        if self._quiet_depth or not (torch.is_grad_enabled() and x.requires_grad):
            return
        name = self._prefix + name
        key = x.untyped_storage()._cdata
        if key in self._protected:
            raise Error(f"{name} is a weight, or a view of one; weights have no place in a memory plan")
        placement = self._placement(name, again is not None, True)
        if placement.fp8 and not x.is_floating_point():
            raise Error(f"{name} is {x.dtype}, and the plan wants it as fp8, which is for floating-point numbers")
        entry = self._named[key] = _Named(name, x, placement)
        if placement.where == "recompute":
            assert again is not None
            packed = [self._pack(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            recipe = Recipe(name, again, packed, self._quiet)
            self._fresh.append(recipe)
            entry.source = weakref.ref(recipe)
        handles = [saved for saved in (late() for late in self._late.pop(key, ())) if saved is not None]
        for saved in handles:
            assert saved.tensor is not None
            source = self._source(entry, saved.tensor)
            if source is not None:
                saved.move(source)
        if handles and self._unnamed.pop(key, None) is not None:
            size = x.untyped_storage().nbytes()
            self._count(UNNAMED, KEEP, -size, -size, 0, -1)

    def region(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._quiet_depth or not torch.is_grad_enabled():
            return function(*args)
        if self._placement(self._prefix + name, True, False) == KEEP:
            return function(*args)

        def quietly(*inner: Any) -> Any:
            with self._quiet():
                return function(*inner)

        return checkpoint(quietly, *args, use_reentrant=False, preserve_rng_state=False)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        self._quiet_depth += 1
        try:
            yield
        finally:
            self._quiet_depth -= 1

    def _placement(self, name: str, again: bool, movable: bool) -> Placement:
        self.names[name] = (again, movable)
        if name not in self._placements:
            self._placements[name] = self.plan.placement(name, again, movable)
        return self._placements[name]

    # -- saved tensors -------------------------------------------------------------------------------------------

    def _pack(self, x: torch.Tensor) -> Saved:
        key = x.untyped_storage()._cdata
        if key in self._protected:
            return Saved(x)
        entry = self._named.get(key)
        if entry is not None and not entry.storage.expired():
            return Saved(x, self._source(entry, x))
        saved = Saved(x)
        self._late.setdefault(key, []).append(weakref.ref(saved))
        seen = self._unnamed.get(key)
        if seen is None or seen.expired():
            self._unnamed[key] = StorageWeakRef(x.untyped_storage())
            self._count(UNNAMED, KEEP, x.untyped_storage().nbytes(), x.untyped_storage().nbytes(), 0)
        return saved

    def _unpack(self, saved: Saved) -> torch.Tensor:
        self._check()
        # The forward pass is over.
        self._fresh.clear()
        return saved.get()

    def _source(self, entry: _Named, x: torch.Tensor) -> Source | None:
        """Where a saved view of a named storage will come from; None: from itself."""
        source, size = entry.source(), x.untyped_storage().nbytes()
        moves = entry.placement != KEEP and x.dtype == entry.dtype
        if source is None and moves and entry.placement.where != "recompute":
            source = self._slot(entry, x)
        if not entry.counted:
            entry.counted = True
            slot = source if isinstance(source, Slot) else None
            device, stored = (0, 0) if moves else (size, 0)
            if slot is not None:
                device, stored = (slot.bytes, 0) if slot.store is None else (0, slot.bytes)
            self._count(entry.name, entry.placement, size, device, stored)
        return source if moves else None

    def _slot(self, entry: _Named, x: torch.Tensor) -> Slot:
        store = self.stores.get(entry.placement.where)
        slot = Slot(entry.name, x, entry.placement.fp8, store, self._fetch_ahead)
        slot.number, slot.layer = len(self._order), self._prefix
        self._slots.add(slot)
        self._order.append(weakref.ref(slot))
        entry.source = weakref.ref(slot)
        return slot

    def _fetch_ahead(self, slot: Slot) -> None:
        """What was put before this one, of its layer and of the one below, is wanted next."""
        below: str | None = None
        for reference in reversed(self._order[: slot.number]):
            earlier = reference()
            if earlier is None:
                continue
            if earlier.layer != slot.layer:
                below = earlier.layer if below is None else below
                if earlier.layer != below:
                    break
            earlier.prefetch()

    def _count(self, name: str, placement: Placement, before: int, device: int, stored: int, count: int = 1) -> None:
        row = self.rows.setdefault(name, Row(str(placement)))
        row.count += count
        row.before += before
        row.device += device
        row.stored += stored

    def _check(self) -> None:
        if not self._checked:
            self.plan.check(self.names)
            self._checked = True


__all__ = ["UNNAMED", "Memory", "Row"]
