"""What it costs in arithmetic to compute a name again, counted in a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from perilune.ops import names


class _Counter:
    """Tells of names; their operations are what a running count has grown by."""

    def __init__(self, count: FlopCounterMode) -> None:
        self.found: dict[str, int] = {}
        self._count, self._prefix, self._quiet = count, "", False

    def layer(self, index: int | None) -> None:
        self._prefix = "" if index is None else f"layers.{index}."

    def keep(
        self, name: str, x: torch.Tensor, again: Callable[..., torch.Tensor] | None, args: tuple[Any, ...]
    ) -> None:
        if again is None or self._quiet:
            return
        self._quiet = True
        with torch.no_grad():
            self._counted(name, again, args)
        self._quiet = False

    def remade(self, name: str, size: int) -> bool:
        return True

    def region(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self._counted(name, function, args)

    def _counted(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        before = self._count.get_total_flops()
        result = function(*args)
        name = self._prefix + name
        self.found[name] = self.found.get(name, 0) + self._count.get_total_flops() - before
        return result


def recompute_flops(forward: Callable[[], torch.Tensor]) -> dict[str, int]:
    """{name: multiplications and additions of matrix products} of each recipe and region in one forward pass.

    Counted are products that PyTorch does. Kernels of our own are not seen: on a GPU the delta rule, the attention and
    the experts.
    """
    with FlopCounterMode(display=False) as count:
        counter = _Counter(count)
        with names.deciding(counter):
            forward()
    return counter.found


__all__ = ["recompute_flops"]
