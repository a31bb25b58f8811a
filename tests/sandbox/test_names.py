"""The name server of a guest: what it reads, what it refuses, and what it opens before it tells an address."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import Callable, Sequence

import pytest

from perilune.sandbox.errors import SandboxError
from perilune.sandbox.names import NameServer, allowed, answer, is_name, question
from tests.sandbox.worlds import run

ADDRESSES = {
    "one.example.org": ["203.0.113.7"],
    "two.example.org": ["203.0.113.8", "203.0.113.9"],
    "rebound.example.org": ["10.0.0.1", "192.168.1.1"],
    "half.example.org": ["127.0.0.1", "203.0.113.7"],
    "deep.sub.example.org": ["203.0.113.10"],
    "many.example.org": [f"198.51.100.{i}" for i in range(1, 200)],
}
OK, FAILED, REFUSED = 0, 2, 5


def query(name: str, kind: int = 1, number: int = 7, flags: int = 0x0100) -> bytes:
    """A question by RFC 1035, 4.1."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">6H", number, flags, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def read(packet: bytes, asked: bytes) -> tuple[int, list[str]]:
    """Code and addresses of an answer, whose other fields are checked."""
    number, flags, questions, answers, authority, more = struct.unpack_from(">6H", packet)
    assert (number, questions, authority, more) == (struct.unpack_from(">H", asked)[0], 1, 0, 0)
    assert flags >> 15 == 1
    assert packet[12 : len(asked)] == asked[12:]
    assert len(packet) == len(asked) + 16 * answers <= 512
    addresses = []
    for at in range(len(asked), len(packet), 16):
        name, kind, family, ttl, length = struct.unpack_from(">HHHIH", packet, at)
        assert (name, kind, family, length) == (0xC00C, 1, 1, 4)
        assert 0 < ttl < 600
        addresses.append(socket.inet_ntoa(packet[at + 12 : at + 16]))
    return flags & 15, addresses


class Guest:
    """The other end of a server's socket, and what the server has opened."""

    def __init__(self, entries: Sequence[str], denied: Sequence[str] = (), failing: bool = False) -> None:
        served = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        served.bind(("127.0.0.1", 0))
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.connect(served.getsockname())
        self.socket.setblocking(False)
        self.opened: list[str] = []
        self.failing = failing
        self.server = NameServer(served, entries, denied, self._open)

    def _open(self, addresses: Sequence[str]) -> None:
        if self.failing:
            raise SandboxError("the set is full")
        self.opened += addresses

    async def asks(self, packet: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.socket, packet)
        return await asyncio.wait_for(loop.sock_recv(self.socket, 1024), 5)

    async def resolves(self, name: str, kind: int = 1) -> tuple[int, list[str]]:
        packet = query(name, kind)
        return read(await self.asks(packet), packet)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that the host was asked for."""
    names: list[str] = []

    def lookup(name: str) -> list[str]:
        names.append(name)
        if name == "slow.example.org":
            time.sleep(0.2)
        return ADDRESSES.get(name, [])

    monkeypatch.setattr("perilune.sandbox.names.lookup", lookup)
    return names


def with_guest(
    work: Callable[[Guest], object], *entries: str, denied: Sequence[str] = (), failing: bool = False
) -> None:
    async def test() -> None:
        guest = Guest(entries, denied, failing)
        try:
            await work(guest)  # type: ignore[misc]
        finally:
            guest.server.close()
            guest.socket.close()
            await asyncio.sleep(0)

    run(test())


def test_allowed_names_only(looked_up: list[str]) -> None:
    """Those of the policy, in any case of letters; others are refused, and nobody else hears of them."""

    async def work(guest: Guest) -> None:
        assert await guest.resolves("one.example.org") == (OK, ["203.0.113.7"])
        assert await guest.resolves("ONE.Example.ORG") == (OK, ["203.0.113.7"])
        assert await guest.resolves("deep.sub.example.org") == (OK, ["203.0.113.10"])
        for name in (
            "two.example.org",
            "sub.example.org",
            "example.org",
            "one.example.org.evil.com",
            "localhost",
            "10",
        ):
            assert await guest.resolves(name) == (REFUSED, [])
        assert await guest.resolves("one.example.org", kind=28) == (OK, [])  # no IPv6, and not no such name
        assert set(looked_up) == {"one.example.org", "deep.sub.example.org"}
        assert looked_up.count("one.example.org") == 1  # remembered for a while
        assert guest.opened == ["203.0.113.7", "203.0.113.7", "203.0.113.10"]

    with_guest(work, "one.Example.org", "*.sub.example.org")


def test_a_name_that_leads_home(looked_up: list[str]) -> None:
    """Private and host addresses are taken out of answers, and a name that has only those is refused (rebinding)."""

    async def work(guest: Guest) -> None:
        assert await guest.resolves("rebound.example.org") == (REFUSED, [])
        assert await guest.resolves("half.example.org") == (OK, ["203.0.113.7"])
        assert await guest.resolves("nowhere.example.org") == (OK, [])
        code, addresses = await guest.resolves("many.example.org")
        assert code == OK
        assert len(addresses) == 16
        assert all(one not in guest.opened for one in ("10.0.0.1", "127.0.0.1", "192.168.1.1"))

    with_guest(work, "*.example.org", denied=("10.0.0.0/8", "127.0.0.0/8", "192.168.1.1"))


def test_everything_allowed_is_every_name(looked_up: list[str]) -> None:
    async def work(guest: Guest) -> None:
        assert await guest.resolves("two.example.org") == (OK, ["203.0.113.8", "203.0.113.9"])
        assert await guest.resolves("localhost") == (REFUSED, [])

    with_guest(work, "0.0.0.0/0")


def test_addresses_only(looked_up: list[str]) -> None:
    """Refused at once: a program of the guest does not wait for a server that is not there."""

    async def work(guest: Guest) -> None:
        assert await guest.resolves("one.example.org") == (REFUSED, [])

    with_guest(work, "203.0.113.0/24")
    assert looked_up == []


def test_another_policy_while_a_name_is_looked_up(looked_up: list[str]) -> None:
    """Nothing of the old policy is opened in the rules of the new one."""
    ADDRESSES["slow.example.org"] = ["203.0.113.11"]

    async def work(guest: Guest) -> None:
        asked = asyncio.create_task(guest.resolves("slow.example.org"))
        await asyncio.sleep(0.05)
        guest.server.set(("two.example.org",), (), lambda: None)
        assert await asked == (REFUSED, [])
        assert guest.opened == []
        assert await guest.resolves("slow.example.org") == (REFUSED, [])
        assert await guest.resolves("two.example.org") == (OK, ["203.0.113.8", "203.0.113.9"])

    with_guest(work, "slow.example.org")


def test_too_many_at_once_and_rules_that_fail(looked_up: list[str]) -> None:
    """A guest cannot keep more than a few lookups busy; what could not be opened is not told."""
    ADDRESSES["slow.example.org"] = ["203.0.113.11"]

    async def work(guest: Guest) -> None:
        for number in range(40):
            await asyncio.get_running_loop().sock_sendall(guest.socket, query("slow.example.org", number=number))
        codes = []
        for _ in range(40):
            answered = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(guest.socket, 1024), 5)
            codes.append(answered[3] & 15)
        assert codes.count(FAILED) == 36
        guest.failing = True
        assert await guest.resolves("one.example.org") == (FAILED, [])

    with_guest(work, "*.example.org")


def test_a_lookup_that_never_ends(looked_up: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.sandbox.names.LOOKUP_S", 0.05)
    ADDRESSES["slow.example.org"] = ["203.0.113.11"]

    async def work(guest: Guest) -> None:
        assert await guest.resolves("slow.example.org") == (FAILED, [])
        assert await guest.resolves("one.example.org") == (OK, ["203.0.113.7"])

    with_guest(work, "*.example.org")


def test_packets_of_any_kind(looked_up: list[str]) -> None:
    """Cut, changed and random ones: an answer that fits the question, or none; and it goes on answering."""
    generator = random.Random(5)
    packets = [query("one.example.org")[:length] for length in range(30)]
    packets += [query("one.example.org", flags=0x8180), struct.pack(">6H", 1, 0, 2, 0, 0, 0) + b"\0" * 9]
    packets += [query("one.example.org")[:12] + b"\xc0\x0c\0\1\0\1", query(".".join(["a" * 60] * 5))]
    for _ in range(2000):
        packet = bytearray(query("one.example.org"))
        for _ in range(generator.randrange(1, 5)):
            packet[generator.randrange(len(packet))] = generator.randrange(256)
        packets += [bytes(packet), generator.randbytes(generator.randrange(80))]
    for packet in packets:
        asked = question(packet)
        if asked is not None:
            name, _ = asked
            read(answer(packet, OK, ["203.0.113.7"]), packet[: 12 + len(name) + 2 + 4] if name else packet[:17])

    async def work(guest: Guest) -> None:
        loop = asyncio.get_running_loop()
        for packet in packets[:600]:
            await loop.sock_sendall(guest.socket, packet)
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        while True:
            try:
                guest.socket.recv(1024)
            except BlockingIOError:
                break
        assert await guest.resolves("one.example.org") == (OK, ["203.0.113.7"])

    with_guest(work, "one.example.org")


def test_what_a_name_is() -> None:
    for name in ("a.b", "*.a.b", "xn--bcher-kva.example", "_service._tcp.example.org", "a-b.c-d.org"):
        assert is_name(name), name
    for name in (
        "",
        "a",
        "*",
        "*.",
        "*.*.a",
        "a..b",
        "-a.b",
        "a-.b",
        "1.2.3.4",
        "10.0.0.0/8",
        "a b.c",
        "a.b.",
        "é.org",
    ):
        assert not is_name(name), name
    assert not is_name("a." * 126 + "org")
    assert not is_name("a" * 64 + ".org")
    assert not allowed("example.org", ("*.example.org",))
    assert not allowed("notexample.org", ("*.example.org", "example.org"))
