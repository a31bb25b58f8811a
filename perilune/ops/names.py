"""Names for tensors and pieces of computation that are worth a memory decision.

A model calls these functions where it makes such a tensor; who decides about it is installed from outside
(`perilune.memory`). Without anybody installed they give back what they were given: no copy, no graph node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from perilune.errors import Error


class Decider(Protocol):
    """Who is told of names while it is installed."""

    def keep(
        self, name: str, x: torch.Tensor, again: Callable[..., torch.Tensor] | None, args: tuple[Any, ...]
    ) -> None:
        """`x`, of this name, has been made; if `again` is given, again(*args) is x, bit by bit."""

    def region(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """function(*args)."""

    def remade(self, name: str, size: int) -> bool:
        """Whether what `remade` below names is to be made again."""

    def layer(self, index: int | None) -> None:
        """What is named from now on belongs to this layer; None: to no layer."""


_decider: Decider | None = None
_again = False


def keep(name: str, x: torch.Tensor, again: Callable[..., torch.Tensor] | None = None, *args: Any) -> torch.Tensor:
    """`x` itself, named. Call it right after x was made, before other operations use it.

    again, args: how x can be made from other tensors, to the same bits, where it is not to be kept for the backward
    pass. Tensors that `again` needs should stand in `args`, not in its closure: those are kept as their names say.
    """
    if _decider is not None:
        _decider.keep(name, x, again, args)
    return x


def region(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), as a piece of computation that can be done again in the backward pass instead of being kept.

    `function` must give the same bits when it is called again and have no side effects that matter twice. Tensors it
    gets gradients for may stand in `args` or in its closure; only those of `args` need not be kept alive.
    """
    return function(*args) if _decider is None else _decider.region(name, function, args)


def remade(name: str, size: int) -> bool:
    """Whether an operation that makes numbers of its own again in its backward pass, unless told to keep them, is to
    do so: a region whose default is to be computed again. size: bytes it would keep."""
    return True if _decider is None else _decider.remade(name, size)


def layer(index: int | None) -> None:
    """The layer that the names from now on belong to; None behind the last one."""
    if _decider is not None:
        _decider.layer(index)


@contextlib.contextmanager
def deciding(decider: Decider) -> Iterator[None]:
    """Tell `decider` of all names until the block ends. Raises Error when another one is installed."""
    global _decider
    if _decider is not None:
        raise Error("a memory plan is active already; one ends before the next begins")
    _decider = decider
    try:
        yield
    finally:
        _decider = None


@contextlib.contextmanager
def replaying(again: bool) -> Iterator[None]:
    """Whoever computes a region says whether it is done `again`, in the backward pass."""
    global _again
    before, _again = _again, again
    try:
        yield
    finally:
        _again = before


def is_replay() -> bool:
    """Whether a region is being computed again: what a call counts or collects it has counted already."""
    return _again


__all__ = ["Decider", "deciding", "is_replay", "keep", "layer", "region", "remade", "replaying"]
