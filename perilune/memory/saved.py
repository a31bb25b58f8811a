"""What stands in autograd's graph instead of a tensor, and where its numbers come from when it is asked for.

A source belongs to one storage and gives its whole content, flat; the handles of all operations that saved views of
it share it. It lives as long as a handle does, so what a source holds goes when the last operation has run backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from perilune.errors import Error
from perilune.memory.codec import decode, encode
from perilune.memory.stores import Store


def flat_of(x: torch.Tensor) -> torch.Tensor:
    """The whole storage of x as a flat tensor of x's dtype."""
    storage = x.untyped_storage()
    if x.is_contiguous() and x.nbytes == storage.nbytes():
        # A view, which sees when x is changed in place.
        return x.detach().view(-1)
    whole = torch.empty(0, dtype=x.dtype, device=x.device)
    return whole.set_(storage, 0, (storage.nbytes() // x.dtype.itemsize,))  # type: ignore[call-overload, no-any-return]


class Shared:
    """A tensor that operations on several streams ask for: those of other streams wait until it is made."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        if x.is_cuda:
            self._stream = torch.cuda.current_stream(x.device)
            # It may have been allocated on another one.
            x.record_stream(self._stream)
            self._made = self._stream.record_event()

    def use(self) -> torch.Tensor:
        """It, for the current stream."""
        if self._x.is_cuda and (current := torch.cuda.current_stream(self._x.device)) != self._stream:
            current.wait_event(self._made)
            self._x.record_stream(current)
        return self._x


def stream_of(values: Iterable[Any]) -> torch.cuda.Stream | None:
    """The current stream of the first tensor's device; None where there are no streams."""
    device = next((x.device for x in values if isinstance(x, torch.Tensor)), torch.device("cpu"))
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on `stream`, behind what the current one has been given; the current one waits for it. None: here."""
    if stream is None or (current := torch.cuda.current_stream(stream.device)) == stream:
        yield
        return
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class Source(Protocol):
    def base(self) -> torch.Tensor:
        """The storage's content."""

    def holds(self) -> list[torch.Tensor]:
        """Tensors of the device that stand for it now."""


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

    @property
    def changed(self) -> bool:
        """Whether the tensor is not what was saved any more."""
        return self.tensor is not None and self.tensor._version != self.version

    def get(self) -> torch.Tensor:
        if self.source is not None:
            base = self.source.base()
            return torch.as_strided(base, self.size, self.stride, self.offset + base.storage_offset())
        assert self.tensor is not None
        if self.changed:
            raise Error(
                f"a tensor of shape {tuple(self.size)} that the backward pass needs was changed in place after it was "
                "saved"
            )
        return self.tensor


class Slot:
    """A storage's content in a codec, in a store, or both."""

    def __init__(
        self,
        name: str,
        x: torch.Tensor,
        fp8: bool,
        store: Store | None,
        before: Callable[[Slot], None],
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """before: called when the content is asked for the first time, to fetch what will be needed next.
        timed: a context around what may wait for the store."""
        flat = flat_of(x)
        self.name, self.fp8, self.store, self._before, self._timed = name, fp8, store, before, timed
        self.numbers, self.dtype = flat.numel(), flat.dtype
        self._ticket: Any = None
        payload = encode(flat) if fp8 else flat
        self.bytes = payload.nbytes
        self._payload = payload if store is None else None
        if store is not None:
            with timed(name):
                self._ticket = store.put(payload)
        self._base: Shared | None = None
        # Place in the order of the step.
        self.number = 0

    @property
    def there(self) -> bool:
        """Whether the content has been asked for already."""
        return self._base is not None

    def prefetch(self) -> None:
        if self._base is None and self.store is not None and self._ticket is not None:
            with self._timed(self.name):
                self.store.prefetch(self._ticket)

    def base(self) -> torch.Tensor:
        if self._base is None:
            if self._payload is None and self._ticket is None:
                raise Error(f"{self.name}: the backward pass came after its step had ended; its memory is given up")
            payload = self._payload
            if self.store is not None:
                self.prefetch()
                self._before(self)
                with self._timed(self.name):
                    payload = self.store.get(self._ticket)
            assert payload is not None
            if self.fp8:
                payload = decode(Shared(payload).use(), self.numbers, self.dtype)
            self._base = Shared(payload)
        return self._base.use()

    def holds(self) -> list[torch.Tensor]:
        base = [] if self._base is None else [self._base.use()]
        return base if self._payload is None else [self._payload, *base]

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
        self._base: Shared | None = None

    def base(self) -> torch.Tensor:
        if self._base is None:
            with torch.no_grad(), self._quiet():
                args = [arg.get() if isinstance(arg, Saved) else arg for arg in self._args]
                self._base = Shared(flat_of(self._again(*args)))
        return self._base.use()

    def holds(self) -> list[torch.Tensor]:
        return [] if self._base is None else [self._base.use()]


__all__ = ["Recipe", "Saved", "Shared", "Slot", "Source", "flat_of", "on_stream", "stream_of"]
