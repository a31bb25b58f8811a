"""The activation manager: applies a plan to every tensor that autograd saves during a step.

It hears names from `perilune.ops.names` and sees saved tensors through autograd's hooks; the two meet by storage.
Only storages with a name are ever encoded or moved, so row statistics, routing indices, cu_seqlens and whatever else an
operation keeps for itself stay as they are; weights are refused a name.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from perilune.errors import Error
from perilune.memory.codec import coded_bytes
from perilune.memory.order import Order
from perilune.memory.peer import PeerStore
from perilune.memory.pinned import PinnedStore
from perilune.memory.plan import KEEP, Placement, Plan, short
from perilune.memory.rows import UNNAMED, Row
from perilune.memory.saved import Recipe, Saved, Slot, Source, on_stream, stream_of
from perilune.memory.stores import Store
from perilune.memory.waits import Waits
from perilune.ops import names as ops_names

AHEAD = 0.5


class _Named:
    """A storage with a name. The weak reference also keeps its address from being given to another storage."""

    def __init__(self, name: str, x: torch.Tensor, placement: Placement) -> None:
        self.name, self.dtype, self.placement, self.version = name, x.dtype, placement, x._version
        self.storage, self.size = StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()
        self.source: Callable[[], Source | None] = lambda: None
        self.counted = False


class Memory:
    """One plan at work. Use it around each step's forward and backward passes:

        memory = Memory(load_plan("k3"), model.parameters(), host=MemoryStore())
        with memory.step():
            loss(model(x)).backward()

    weights: tensors that are never saved by value (parameters and buffers). host, nvme, peer: stores for what the plan
    sends there; what finds no room in `peer` stays on the device. collectives: regions may hold some, so they are
    computed again to their end: ranks that stopped in different places would miss each other. `rows` is what the last
    step did, by name.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Iterable[torch.Tensor] = (),
        host: Store | None = None,
        nvme: Store | None = None,
        peer: PeerStore | None = None,
        collectives: bool = False,
    ) -> None:
        """Raises Error when the plan needs a store that is not given."""
        self.plan, self.peer, self._collectives = plan, peer, collectives
        self.stores: dict[str, Store | None] = {"host": host, "nvme": nvme, "peer": peer}
        for rule in plan.rules:
            if rule.placement.where in self.stores and self.stores[rule.placement.where] is None:
                raise Error(f"memory plan: {rule.pattern!r} goes to {rule.placement.where}, but no such store is given")
        self._weights, self._protected = list(weights), set[int]()
        self.names: dict[str, tuple[bool, bool]] = {}
        self.rows: dict[str, Row] = {}
        self._placements: dict[str, Placement] = {}
        # How much is fetched before it is asked for, in parts of the largest layer's bytes, up to a whole tensor.
        self.ahead = AHEAD
        # Called whenever a tensor is saved (False) or asked for (True).
        self.watch: Callable[[bool], None] | None = None
        # Notes what the computation waits for stores, if given.
        self.waits: Waits | None = None
        self._quiet_depth = 0
        self._checked = False
        self._forget()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Forward and backward passes of one step. However it ends, nothing of it stays in a store.

        Raises Error for a pattern of the plan that no name has matched, before the first backward operation, and inside
        of another step.
        """
        with ops_names.deciding(self):
            self._protected = {x.untyped_storage()._cdata for x in self._weights}
            self.rows = {}
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    yield
                self._check()
            finally:
                host = self.stores["host"]
                if isinstance(host, PinnedStore):
                    host.layer = max(host.layer, self._order.largest)
                self._order.release()
                self._forget()

    def _forget(self) -> None:
        self._prefix = ""
        self._named: dict[int, _Named] = {}
        self._unnamed: dict[int, tuple[StorageWeakRef, int]] = {}
        # Handles that were made before their tensor got its name, and recipes of tensors that may still be saved.
        self._late: dict[int, list[weakref.ref[Saved]]] = {}
        self._fresh: list[tuple[Recipe, StorageWeakRef]] = []
        self._order = Order()

    # -- names ---------------------------------------------------------------------------------------------------

    def layer(self, index: int | None) -> None:
        if self._quiet_depth == 0:
            self._prefix = "" if index is None else f"layers.{index}."
            self._order.begin_layer(index is not None)
            self._late.clear()
            self._fresh = [(recipe, storage) for recipe, storage in self._fresh if not storage.expired()]

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
            if again is None:
                raise Error(f"{name} is given without a way to compute it again, and was given with one before")
            packed = [self._pack(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            recipe = Recipe(name, again, packed, self._quiet)
            self._fresh.append((recipe, entry.storage))
            entry.source = weakref.ref(recipe)
        handles = [saved for saved in (late() for late in self._late.pop(key, ())) if saved is not None]
        for saved in handles:
            assert saved.tensor is not None
            if saved.changed:
                # Stays what it is, to be an error when it is asked for.
                continue
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

        stream, calls = stream_of(args), iter((False,))

        def quietly(*inner: Any) -> Any:
            again = next(calls, True)
            with self._quiet(), on_stream(stream), ops_names.replaying(again):
                return function(*inner)

        with set_checkpoint_early_stop(not self._collectives):
            return checkpoint(quietly, *args, use_reentrant=False, preserve_rng_state=False)

    def remade(self, name: str, size: int) -> bool:
        if self._quiet_depth or not torch.is_grad_enabled():
            return True
        name = self._prefix + name
        self.names[name] = (True, False)
        return not self.plan.keeps(name)

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
        if self.watch is not None:
            self.watch(False)
        key = x.untyped_storage()._cdata
        if key in self._protected:
            return Saved(x)
        entry = self._named.get(key)
        if entry is not None and not entry.storage.expired():
            return Saved(x, self._source(entry, x))
        saved = Saved(x)
        self._late.setdefault(key, []).append(weakref.ref(saved))
        seen = self._unnamed.get(key)
        if seen is None or seen[0].expired():
            self._unnamed[key] = (StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes())
            self._count(UNNAMED, KEEP, x.untyped_storage().nbytes(), x.untyped_storage().nbytes(), 0)
        return saved

    def alive(self) -> dict[str, int]:
        """Bytes on the device by name, without layers: tensors that were saved, and what was made or fetched again.

        What is on its way back and not asked for yet is not counted.
        """
        sizes: dict[int, tuple[str, int]] = {}
        for key, (storage, size) in self._unnamed.items():
            if not storage.expired():
                sizes[key] = (UNNAMED, size)
        for key, entry in self._named.items():
            source = entry.source()
            if not entry.storage.expired():
                sizes[key] = (short(entry.name), entry.size)
            for x in () if source is None else source.holds():
                sizes[x.untyped_storage()._cdata] = (short(entry.name), x.untyped_storage().nbytes())
        found: dict[str, int] = {}
        for name, size in sizes.values():
            found[name] = found.get(name, 0) + size
        return found

    def _unpack(self, saved: Saved) -> torch.Tensor:
        self._check()
        # The forward pass is over.
        self._fresh.clear()
        x = saved.get()
        if self.watch is not None:
            self.watch(True)
        return x

    def _source(self, entry: _Named, x: torch.Tensor) -> Source | None:
        """Where a saved view of a named storage will come from; None: from itself."""
        source, size = entry.source(), x.untyped_storage().nbytes()
        wanted, moves = entry.placement, entry.placement != KEEP and x.dtype == entry.dtype
        if moves and x._version != entry.version:
            raise Error(f"{entry.name} was changed in place after it got its name; name it behind the change")
        if isinstance(source, Slot):
            self._order.saved(source)
        if source is None and moves and entry.placement.where != "recompute":
            source = self._slot(entry, x)
            moves = source is not None
        if not entry.counted:
            entry.counted = True
            slot = source if isinstance(source, Slot) else None
            device, stored = (0, 0) if moves else (size, 0)
            if slot is not None:
                device, stored = (slot.bytes, 0) if slot.store is None else (0, slot.bytes)
            self._count(entry.name, wanted, size, device, stored)
        return source if moves else None

    def _slot(self, entry: _Named, x: torch.Tensor) -> Slot | None:
        """None where a tensor is to stay as it is because its peer has no room."""
        store, size = self.stores.get(entry.placement.where), x.untyped_storage().nbytes()
        if store is not None and store is self.peer:
            fp8 = entry.placement.fp8
            if not self.peer.takes(coded_bytes(size // x.dtype.itemsize) if fp8 else size):
                if not fp8:
                    entry.placement = KEEP
                    return None
                store = None
        slot = Slot(entry.name, x, entry.placement.fp8, store, self._fetch_ahead, self._timed)
        self._order.add(slot)
        entry.source = weakref.ref(slot)
        return slot

    def _timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.waits is None else self.waits.timed(name)

    def _fetch_ahead(self, slot: Slot) -> None:
        self._order.fetch_before(slot, self.ahead)

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


__all__ = ["AHEAD", "Memory"]
