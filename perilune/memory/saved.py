"""What stands in autograd's graph instead of a tensor, and where its numbers come from when it is asked for.

A source belongs to one storage and gives its whole content, flat; the handles of all operations that saved views of
it share it. It lives as long as a handle does, so what a source holds goes when the last operation has run backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from perilune.errors import Error
from perilune.memory.codec import decode, encode
from perilune.memory.stores import Store


def flat_of(x: torch.Tensor) -> torch.Tensor:
    """The whole storage of x as a flat tensor of x's dtype."""
    storage = x.untyped_storage()
    whole = torch.empty(0, dtype=x.dtype, device=x.device)
    return whole.set_(storage, 0, (storage.nbytes() // x.dtype.itemsize,))  # type: ignore[call-overload, no-any-return]


class Source(Protocol):
    def base(self) -> torch.Tensor:
        """The storage's content."""


class Saved:
    """A tensor itself (source None), or a view of what a source gives."""

    __slots__ = ("__weakref__", "offset", "size", "source", "stride", "tensor", "version")

    def __init__(self, x: torch.Tensor, source: Source | None = None) -> None:
        self.size, self.stride, self.offset, self.version = x.size(), x.stride(), x.storage_offset(), x._version
        self.tensor: torch.Tensor | None = x.detach() if source is None else None
        self.source: Source | None = source

    def move(self, source: Source) -> None:
        """From now on the numbers come from `source`."""
        self.tensor, self.source = None, source

    def get(self) -> torch.Tensor:
        if self.source is not None:
            return torch.as_strided(self.source.base(), self.size, self.stride, self.offset)
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise Error(
                f"a tensor of shape {tuple(self.size)} that the backward pass needs was changed in place after it was "
                "saved"
            )
        return self.tensor


class Slot:
    """A storage's content in a codec, in a store, or both."""

    def __init__(
        self, name: str, x: torch.Tensor, fp8: bool, store: Store | None, before: Callable[[Slot], None]
    ) -> None:
        """before: called when the content is asked for the first time, to fetch what will be needed next."""
        flat = flat_of(x)
        self.name, self.fp8, self.store, self._before = name, fp8, store, before
        self.numbers, self.dtype = flat.numel(), flat.dtype
        self._ticket: Any = None
        payload = encode(flat) if fp8 else flat
        self.bytes = payload.nbytes
        self._payload = payload if store is None else None
        if store is not None:
            self._ticket = store.put(payload)
        self._base: torch.Tensor | None = None
        self.number, self.layer = 0, ""

    def prefetch(self) -> None:
        if self._base is None and self.store is not None and self._ticket is not None:
            self.store.prefetch(self._ticket)

    def base(self) -> torch.Tensor:
        if self._base is None:
            if self._payload is None and self._ticket is None:
                raise Error(f"{self.name}: the backward pass came after its step had ended; its memory is given up")
            self.prefetch()
            self._before(self)
            payload = self._payload if self.store is None else self.store.get(self._ticket)
            assert payload is not None
            self._base = decode(payload, self.numbers, self.dtype) if self.fp8 else payload
        return self._base

    def release(self) -> None:
        """Give up what is held; the content is lost unless `base` has been called."""
        ticket, self._ticket, self._payload = self._ticket, None, None
        if ticket is not None and self.store is not None:
            self.store.drop(ticket)

    def __del__(self) -> None:
        self.release()


class Recipe:
    """A tensor as the computation that gives it, to the same bits."""

    def __init__(self, name: str, again: Callable[..., torch.Tensor], args: list[Any], quiet: Any) -> None:
        """args: Saved for tensors. quiet: a context in which names mean nothing."""
        self.name, self._again, self._args, self._quiet = name, again, args, quiet
        self._base: torch.Tensor | None = None

    def base(self) -> torch.Tensor:
        if self._base is None:
            with torch.no_grad(), self._quiet():
                args = [arg.get() if isinstance(arg, Saved) else arg for arg in self._args]
                self._base = flat_of(self._again(*args))
        return self._base


__all__ = ["Recipe", "Saved", "Slot", "Source", "flat_of"]
