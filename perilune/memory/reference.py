"""A frozen model run in the memory that another model's gradients have between its steps.

A reference policy is needed for a forward pass now and then, and its weights would take as much of the device as those
of the model that is trained. `borrow` keeps them on the host and streams them, one unit (an attention, a mixture) after
the other, through the gradient buffers, which are idle at that time: the next unit comes while one is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perilune.errors import Error
from perilune.memory.arena import Arena, rounded


@dataclass
class _Place:
    """A range of a buffer."""

    buffer: int
    offset: int
    size: int


class _Buffers:
    """The gradients' memory as ranges; spare: bytes of one more buffer, made when the others have no range."""

    def __init__(self, flats: Sequence[Tensor], spare: int, device: torch.device) -> None:
        self._flats, self._spare, self._device = list(flats), spare, device
        self._arenas = [Arena(flat.numel()) for flat in flats]

    def take(self, sizes: Sequence[int]) -> list[_Place] | None:
        """A range of each size; None, and nothing is taken, where not all of them can be had."""
        found: dict[int, _Place] = {}
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            place = self._take(sizes[i])
            if place is None:
                self.give(found.values())
                return None
            found[i] = place
        return [found[i] for i in range(len(sizes))]

    def give(self, places: Iterable[_Place]) -> None:
        for place in places:
            self._arenas[place.buffer].give(place.offset, place.size)

    def view(self, place: _Place, like: Tensor) -> Tensor:
        flat = self._flats[place.buffer][place.offset : place.offset + place.size]
        return flat.view(like.dtype).view(like.shape)

    def _take(self, size: int) -> _Place | None:
        fitting = [i for i, arena in enumerate(self._arenas) if arena.fits(size)]
        if not fitting and self._spare:
            arena, self._spare = Arena(self._spare), 0
            self._arenas.append(arena)
            self._flats.append(torch.empty(arena.size, dtype=torch.uint8, device=self._device))
            return self._take(size)
        if not fitting:
            return None
        # The smallest buffer that has room, so that large ones are left for large tensors.
        i = min(fitting, key=lambda i: self._arenas[i].size)
        return _Place(i, self._arenas[i].take(size), size)


class _Unit:
    """Tensors that come and go together. here: their ranges, and the copies' end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.homes = [x.data for x in self.tensors]
        self.here: tuple[list[_Place], torch.cuda.Event | None] | None = None

    @property
    def sizes(self) -> list[int]:
        return [x.nbytes for x in self.homes]

    @property
    def room(self) -> int:
        return sum(rounded(size) for size in self.sizes)


@contextlib.contextmanager
def borrow(
    params: Iterable[Tensor], reference: nn.Module, units: Sequence[nn.Module], names: Sequence[str] = ()
) -> Iterator[nn.Module]:
    """`reference`, to be run without gradient inside the block, on the device of `params`.

    params: what is trained; the memory of their gradients is used, those that have none yet get theirs for as long.
    reference: its weights are in host memory (pinned, so that copies run beside the computation). units: modules of it
    in the order in which they are called, whose weights come one unit after the other; all others come at once, as a
    unit of their own. Device memory beyond the gradients' is at most that of the largest unit, and used only where the
    gradients' has no range.
    Afterwards gradients are as before, None or zero, and the reference is on the host again.
    Raises Error when a gradient is not zero (names: the parameters', for the message), and when memory is too small.
    """
    params = list(params)
    device = params[0].device
    for i, param in enumerate(params):
        if param.grad is not None and bool(param.grad.count_nonzero()):
            name = names[i] if names else f"parameter {i}"
            raise Error(f"borrow: the gradient of {name} is not zero; step, or clear the gradients, before it")
    grads = [torch.empty_like(p) if p.grad is None else p.grad for p in params]
    flats = [grad.detach().view(-1).view(torch.uint8) for grad in grads]
    in_units = {id(x) for unit in units for x in _tensors(unit)}
    rest = _Unit([x for x in _tensors(reference) if id(x) not in in_units])
    parts = [_Unit(list(_tensors(unit))) for unit in units]
    away = [x for unit in (rest, *parts) for x in unit.homes if x.device.type != "cpu"]
    if away:
        raise Error(f"borrow: a weight of the reference is on {away[0].device}; they must be in host memory")
    stream = _Stream(_Buffers(flats, max((u.room for u in (rest, *parts)), default=0), device), parts, device)
    hooks = []
    try:
        stream.bring(rest)
        stream.arrive(rest)
        for i, unit in enumerate(units):
            hooks.append(unit.register_forward_pre_hook(lambda *_, i=i: stream.enter(i)))
            hooks.append(unit.register_forward_hook(lambda *_, i=i: stream.leave(i), always_call=True))
        with torch.no_grad():
            yield reference
    finally:
        for hook in hooks:
            hook.remove()
        for part in (rest, *parts):
            stream.send_home(part)
        for param in params:
            if param.grad is not None:
                param.grad.zero_()


class _Stream:
    """Brings units in turn."""

    def __init__(self, buffers: _Buffers, parts: Sequence[_Unit], device: torch.device) -> None:
        self._buffers, self._parts, self._device = buffers, parts, device
        self._in = torch.cuda.Stream(device) if device.type == "cuda" else None

    def enter(self, i: int) -> None:
        """Unit i is about to be computed: have it here, and begin to bring the next one where there is room."""
        self.bring(self._parts[i])
        self.arrive(self._parts[i])
        following = self._parts[(i + 1) % len(self._parts)]
        if following.here is None:
            self._begin(following)

    def leave(self, i: int) -> None:
        self.send_home(self._parts[i])

    def bring(self, unit: _Unit) -> None:
        """Begin to, if it has not begun. Raises Error without room."""
        if unit.here is None and not self._begin(unit):
            for other in self._parts:
                # Whatever has come ahead makes way.
                if other.here is not None:
                    self.send_home(other)
            if not self._begin(unit):
                raise Error(
                    f"borrow: {unit.room} bytes of weights that are needed together, the largest tensor "
                    f"{max(unit.sizes)}, find no room in the gradient buffers and one unit's bytes beside them; "
                    "use smaller units"
                )

    def arrive(self, unit: _Unit) -> None:
        """What the current stream does next comes after the copies."""
        assert unit.here is not None
        places, event = unit.here
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        for x, home, place in zip(unit.tensors, unit.homes, places, strict=True):
            x.data = self._buffers.view(place, home)

    def send_home(self, unit: _Unit) -> None:
        """Give the ranges up; they are written again only behind what the current stream has been given so far."""
        for x, home in zip(unit.tensors, unit.homes, strict=True):
            x.data = home
        if unit.here is not None:
            if unit.here[1] is not None:
                torch.cuda.current_stream(self._device).wait_event(unit.here[1])
            self._buffers.give(unit.here[0])
            unit.here = None

    def _begin(self, unit: _Unit) -> bool:
        places = self._buffers.take(unit.sizes)
        if places is None:
            return False
        targets = [self._buffers.view(place, home) for place, home in zip(places, unit.homes, strict=True)]
        event = None
        if self._in is None:
            for target, home in zip(targets, unit.homes, strict=True):
                _copy(target, home)
        else:
            before = torch.cuda.current_stream(self._device).record_event()
            with torch.cuda.stream(self._in):
                self._in.wait_event(before)
                for target, home in zip(targets, unit.homes, strict=True):
                    _copy(target, home)
                event = self._in.record_event()
        unit.here = (places, event)
        return True


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


__all__ = ["borrow"]
