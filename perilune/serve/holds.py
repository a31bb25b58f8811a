"""Leases of clients: prefixes that stay on the device between two requests, by number."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

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
    """The leases in force. A number is never used twice."""

    def __init__(self, cache: PrefixCache, device: Device) -> None:
        super().__init__()
        self._cache, self._device, self._numbers = cache, device, count()

    def take(self, chain: Chain, now: float, seconds: float, limit: int) -> int:
        """Lease the longest prefix of at most `limit` tokens, brought to the device if need be; the hold's number."""
        lease = self._cache.acquire(chain, now, limit, now + seconds)
        if not lease.ready:
            arrived = self._device.fetch(lease.copies)
            while not arrived():
                pass
            self._cache.arrived(lease)
        return self.keep(lease)

    def keep(self, lease: Lease) -> int:
        """Enter a lease; its number."""
        number = next(self._numbers)
        self[number] = lease
        return number

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


__all__ = ["Hold", "Holds"]
