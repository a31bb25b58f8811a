"""Bytes of the tensors that are really there, counted by storage: knows nothing of names, plans or autograd."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Census(TorchDispatchMode):
    """While it is active (`with Census(device) as census`), notes every storage that an operation makes on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._born: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == self._device.type and self._key(x) not in inputs:
                storage = x.untyped_storage()
                self._born[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self) -> int:
        """Bytes of the noted storages that still exist."""
        gc.collect()
        return sum(size for storage, size in self._born.values() if not storage.expired())

    @staticmethod
    def _key(x: torch.Tensor) -> int:
        key: int = x.untyped_storage()._cdata
        return key


__all__ = ["Census"]
