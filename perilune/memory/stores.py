"""Places outside the device for flat tensors between the forward and the backward pass.

A store copies beside the computation. What it promises, whatever its speed: `put` has read what the tensor held when
it was called, `get` gives exactly these bytes back, and no memory is given to anybody while a copy still touches it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from perilune.errors import Error


class Store(Protocol):
    """put, get and what is between them; tickets are the store's own.

    held: bytes that lie here now. moved: bytes copied so far, both ways.
    """

    held: int
    moved: int

    def put(self, flat: torch.Tensor) -> Any:
        """Begin to take a flat tensor in; its ticket. Raises Error where there is no room."""

    def prefetch(self, ticket: Any) -> None:
        """Begin to bring it back."""

    def get(self, ticket: Any) -> torch.Tensor:
        """The tensor, for use from now on; the store's copy stays until `drop`."""

    def drop(self, ticket: Any) -> None:
        """Its room may be used again."""


class MemoryStore:
    """Ordinary host memory, copied at once: for tensors that live on the CPU."""

    def __init__(self, limit: int = 0) -> None:
        """limit: bytes; 0: no limit."""
        self.limit, self.held, self.moved = limit, 0, 0

    def put(self, flat: torch.Tensor) -> torch.Tensor:
        if flat.device.type != "cpu":
            raise Error(
                f"MemoryStore was given a tensor of {flat.device}; it holds those of the CPU, PinnedStore a GPU's"
            )
        check_room("memory.host_bytes", self.limit, self.held, flat.nbytes)
        self.held += flat.nbytes
        self.moved += flat.nbytes
        return flat.clone()

    def prefetch(self, ticket: torch.Tensor) -> None:
        pass

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        self.moved += ticket.nbytes
        return ticket.clone()

    def drop(self, ticket: torch.Tensor) -> None:
        self.held -= ticket.nbytes


def check_room(field: str, limit: int, held: int, more: int) -> None:
    """Raises Error when `more` bytes do not fit."""
    if limit and held + more > limit:
        raise Error(f"{field} is {limit}; {held} bytes of activations lie there and {more} more do not fit")


__all__ = ["MemoryStore", "Store", "check_room"]
