"""Leases of clients: prefixes that stay on the device between two requests, by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from secrets import token_hex

from perilune.errors import Error
from perilune.serve.cache.cache import Lease, PrefixCache
from perilune.serve.cache.chain import Chain
from perilune.serve.work import Device


@dataclass(frozen=True)
class Hold:
    """A client's lease on the prefix `tokens`, which stays on the device until its end, its time, or new weights.

    engine: name of the engine whose memory it is in.
    """

    number: int
    tokens: tuple[int, ...]
    salt: str
    version: int
    engine: str


class Holds(dict[int, Lease]):
    """The leases in force. A number is never used twice. name: of their engine, unlike any other's."""

    def __init__(self, cache: PrefixCache, device: Device) -> None:
        super().__init__()
        self._cache, self._device, self._numbers = cache, device, count()
        self.name = token_hex(8)

    def take(self, chain: Chain, now: float, seconds: float, limit: int) -> int:
        """Lease the longest prefix of at most `limit` tokens, brought to the device if need be; the hold's number."""
        lease = self._cache.acquire(chain, now, limit, now + seconds)
        try:
            if not lease.ready:
                arrived = self._device.fetch(lease.copies)
                while not arrived():
                    pass
                self._cache.arrived(lease)
        except BaseException:
            self._cache.release(lease)
            self._device.settle()
            raise
        return self.keep(lease)

    def keep(self, lease: Lease) -> int:
        """Enter a lease; its number."""
        number = next(self._numbers)
        self[number] = lease
        return number

    def of(self, number: int, tokens: Sequence[int], salt: str, version: int, now: float) -> Hold:
        """The hold of a number; tokens: of its request, prompt and answer. Raises Error for one that has ended."""
        lease = self.lease(number, now)
        return Hold(number, tuple(tokens[: lease.depth]), salt, version, self.name)

    def fork(self, hold: Hold, copies: int, now: float) -> list[Hold]:
        """So many more holds of the same prefix, each to be released by itself. Raises Error as `lease` does."""
        leases = self._cache.fork(self.lease(self.mine(hold), now), copies)
        return [replace(hold, number=self.keep(lease)) for lease in leases]

    def renew(self, hold: Hold, seconds: float, now: float) -> None:
        """Move the end of a hold to so long from now. Raises Error as `lease` does."""
        checked(seconds)
        self.lease(self.mine(hold), now).deadline = now + seconds

    def mine(self, hold: Hold) -> int:
        """Its number. Raises Error for another engine's."""
        if hold.engine != self.name:
            raise Error(f"hold {hold.number} is of engine {hold.engine}; this is engine {self.name}")
        return hold.number

    def lease(self, number: int, now: float) -> Lease:
        """What a number stands for. Raises Error for one that has ended."""
        lease = self.get(number)
        if lease is None or (lease.deadline is not None and lease.deadline <= now):
            raise Error(f"hold {number} has ended; allowed: one that is neither released nor past its time")
        return lease

    def give_back(self, number: int) -> None:
        """End one. One that has ended is ignored."""
        lease = self.pop(number, None)
        if lease is not None:
            self._cache.release(lease)

    def expire(self, now: float) -> bool:
        """End those whose time is over; whether there were any."""
        over = self._cache.expire(now)
        for number in [number for number, lease in self.items() if lease in over]:
            del self[number]
        return bool(over)

    def end(self) -> None:
        """End all."""
        for lease in self.values():
            self._cache.release(lease)
        self.clear()


def checked(seconds: float) -> float:
    """Raises Error for no length of time."""
    if not seconds >= 0:
        raise Error(f"seconds is {seconds}; must be >= 0")
    return seconds


__all__ = ["Hold", "Holds", "checked"]
