"""Host names in network policies: a name server for one guest, which knows the names of its policy and no others.

The guest asks its gateway (RFC 1035 over UDP, one question, addresses of IPv4 only). A name of the policy is looked up
by the host's resolver; what it leads to is filtered, opened in the guest's rules for a while, and only then told.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from perilune.sandbox.errors import SandboxError

TTL_S = 60
# An address stays open longer than the guest may remember it.
OPEN_S = 600
LOOKUP_S = 5.0
_CACHE_S = 30.0
_CACHED = 256
# For each guest; the threads are everybody's, and none of the service's own.
_AT_ONCE = 4
_LOOKUPS = ThreadPoolExecutor(8, "sandbox-names")
_ADDRESSES = 16  # as many as fit a datagram of 512 bytes beside the longest name
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(\*\.)?({_LABEL}\.)+[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?")
_A, _IN = 1, 1
_OK, _FAILED, _REFUSED = 0, 2, 5

# Called in a thread with addresses that the guest may reach from now on.
Open = Callable[[Sequence[str]], None]


def is_name(entry: str) -> bool:
    """True for a host name, or `*.` and one: every name below it, and not itself."""
    return len(entry) <= 253 and _NAME.fullmatch(entry.lower()) is not None


def allowed(name: str, entries: Sequence[str]) -> bool:
    """True if one of a policy's entries is this name, or `*.` of a name above it; or if all addresses are allowed."""
    above = name.partition(".")[2]
    while above:
        if f"*.{above}" in entries:
            return True
        above = above.partition(".")[2]
    return name in entries or "0.0.0.0/0" in entries


def lookup(name: str) -> list[str]:
    """The IPv4 addresses of a name by the host's resolver, without its search list; empty if there are none."""
    try:
        found = socket.getaddrinfo(f"{name}.", None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(address[0]) for *_, address in found})


def question(packet: bytes) -> tuple[str, int] | None:
    """Name and type that a query asks for; None for what is no plain query, which gets no answer."""
    if len(packet) < 12:
        return None
    _, flags, questions = struct.unpack_from(">HHH", packet)
    if flags & 0xF800 or questions != 1:  # an answer, or another operation than a query
        return None
    labels, at = [], 12
    while at < len(packet) and packet[at]:
        length = packet[at]
        label = packet[at + 1 : at + 1 + length]
        if length > 63 or len(label) < length:  # a pointer, or an end in the middle
            return None
        labels.append(label)
        at += 1 + length
    if len(packet) < at + 5 or at - 12 > 254:
        return None
    kind, family = struct.unpack_from(">HH", packet, at + 1)
    name = b".".join(labels).decode("ascii", "replace").lower()
    return (name, kind) if family == _IN else None


def answer(packet: bytes, code: int, addresses: Sequence[str] = ()) -> bytes:
    """The answer to a query that `question` could read: its question again, and the addresses."""
    at = 12
    while packet[at]:
        at += 1 + packet[at]
    number, flags = struct.unpack_from(">HH", packet)
    header = struct.pack(">6H", number, 0x8080 | flags & 0x0100 | code, 1, len(addresses), 0, 0)
    records = [struct.pack(">HHHIH", 0xC00C, _A, _IN, TTL_S, 4) + socket.inet_aton(address) for address in addresses]
    return header + packet[12 : at + 5] + b"".join(records)


class NameServer:
    """Answers one guest on a socket. entries: what its policy allows; denied: what none of them may lead to."""

    def __init__(self, sock: socket.socket, entries: Sequence[str], denied: Sequence[str], opened: Open) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._opened = opened
        self._tasks: set[asyncio.Task[None]] = set()
        self._cache: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        # Held where rules are changed: no address of an old policy is opened in the rules of a new one.
        self._lock = threading.Lock()
        self.set(entries, denied, lambda: None)
        self._loop.add_reader(sock, self._readable)

    def set(self, entries: Sequence[str], denied: Sequence[str], apply: Callable[[], None]) -> None:
        """Another policy; `apply` replaces its rules. Names of the one before are not opened after that."""
        blocks = [ipaddress.IPv4Network(block, strict=False) for block in denied]
        with self._lock:
            apply()
            self._policy = (tuple(entry.lower() for entry in entries), blocks)

    def close(self) -> None:
        """Answer no more; may be called in any thread."""
        self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._loop.remove_reader(self._socket)
        for task in self._tasks:
            task.cancel()
        self._socket.close()

    def _readable(self) -> None:
        for _ in range(32):
            try:
                packet, guest = self._socket.recvfrom(1024)
            except OSError:
                return
            asked = question(packet)
            if asked is None:
                continue
            name, kind = asked
            if not (is_name(name) and allowed(name, self._policy[0])):
                self._send(answer(packet, _REFUSED), guest)
            elif kind != _A:
                self._send(answer(packet, _OK), guest)
            elif len(self._tasks) >= _AT_ONCE:
                self._send(answer(packet, _FAILED), guest)
            else:
                task = self._loop.create_task(self._look_up(packet, name, guest))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _look_up(self, packet: bytes, name: str, guest: tuple[str, int]) -> None:
        policy = self._policy
        try:
            found = await asyncio.wait_for(self._addresses(name), LOOKUP_S)
            public = [one for one in found if not any(ipaddress.IPv4Address(one) in block for block in policy[1])]
            del public[_ADDRESSES:]
            told = bool(public) and await self._loop.run_in_executor(_LOOKUPS, self._open, public, policy)
        except (TimeoutError, SandboxError):
            return self._send(answer(packet, _FAILED), guest)
        if found and not told:
            return self._send(answer(packet, _REFUSED), guest)
        self._send(answer(packet, _OK, public), guest)

    def _open(self, addresses: Sequence[str], policy: object) -> bool:
        with self._lock:
            if policy is not self._policy:
                return False
            self._opened(addresses)
            return True

    async def _addresses(self, name: str) -> list[str]:
        until, found = self._cache.get(name, (0.0, []))
        if time.monotonic() > until:
            found = await self._loop.run_in_executor(_LOOKUPS, lookup, name)
            self._cache[name] = (time.monotonic() + _CACHE_S, found)
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return found

    def _send(self, packet: bytes, guest: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # the guest asks again
            self._socket.sendto(packet, guest)


__all__ = ["OPEN_S", "TTL_S", "NameServer", "allowed", "answer", "is_name", "lookup", "question"]
