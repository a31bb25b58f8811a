"""What a guest can reach: nothing, or what its policy names, in a network made of namespaces on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from perilune.sandbox import Assets, Manager, Network, Sandbox
from perilune.sandbox.network import check, host_addresses, rules, why_not
from perilune.sandbox.packages import require
from perilune.sandbox.qemu import QemuDriver
from tests.sandbox.worlds import run

OUTSIDE = "outside-perilune"
HOST, ALLOWED, OTHER = "203.0.113.1", "203.0.113.5", "203.0.113.6"
PORT = 7011


def ip(*arguments: str) -> None:
    subprocess.run([require("ip"), *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def outside() -> Iterator[None]:
    """A namespace with two addresses behind the host, and a server on both and on the host."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    server = f"exec busybox nc -ll -p {PORT} -e echo hello"
    with contextlib.suppress(subprocess.CalledProcessError):
        ip("netns", "del", OUTSIDE)
    ip("netns", "add", OUTSIDE)
    servers = []
    try:
        ip("link", "add", "outside0", "type", "veth", "peer", "name", "in0", "netns", OUTSIDE)
        ip("addr", "add", f"{HOST}/24", "dev", "outside0")
        ip("link", "set", "outside0", "up")
        for address in (ALLOWED, OTHER):
            ip("-n", OUTSIDE, "addr", "add", f"{address}/24", "dev", "in0")
        ip("-n", OUTSIDE, "link", "set", "in0", "up")
        for prefix in ([require("ip"), "netns", "exec", OUTSIDE], []):
            servers.append(
                subprocess.Popen([*prefix, "sh", "-c", server], start_new_session=True, stderr=subprocess.DEVNULL)
            )
        yield
    finally:
        for process in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", "outside0")  # a namespace takes its devices along, but later
        ip("netns", "del", OUTSIDE)


async def reaches(box: Sandbox, address: str) -> bool:
    result = await box.exec(f"echo | nc -w 1 {address} {PORT}", timeout_s=10)
    return result.text == "hello\n"


def test_policies(qemu_root: Assets, outside: None) -> None:
    """Closed by default; an allowed address, not its neighbour, never the host; replaced at once; in forks too."""

    async def test() -> None:
        manager = await Manager.open(qemu_root, QemuDriver(qemu_root.confine))
        try:
            async with Sandbox.create(manager=manager) as closed:
                assert (await closed.exec("cat /sys/class/net/eth0/operstate")).text != "up\n"
                assert not await reaches(closed, ALLOWED)
            policy = Network(allow=(ALLOWED, HOST, "198.18.0.1"))
            async with Sandbox.create(manager=manager, network=policy) as box:
                assert await reaches(box, ALLOWED)
                for address in (OTHER, HOST, "198.18.0.1", "192.0.2.1", "127.0.0.1"):
                    assert not await reaches(box, address), address
                kids = await box.fork(2)
                for kid in kids:
                    assert await reaches(kid, ALLOWED)
                    assert not await reaches(kid, OTHER)
                await manager.set_network(box.id, Network(allow=(OTHER,)))
                assert await reaches(box, OTHER)
                assert not await reaches(box, ALLOWED)
                await box.pause()
                await box.resume()
                assert await reaches(box, OTHER)
                assert not await reaches(box, ALLOWED)
                await asyncio.gather(*(kid.kill() for kid in kids))
            left = subprocess.run([require("ip"), "netns", "list"], capture_output=True, text=True, check=True).stdout
            assert [line for line in left.splitlines() if line.startswith("perilune-")] == []
        finally:
            await manager.close()

    run(test())


def test_names(qemu_root: Assets, outside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the policy is reached, others are not, nor its address before it was asked for; also after a fork."""
    known = {"allowed.example.org": [ALLOWED], "other.example.org": [OTHER], "home.example.org": [HOST, "10.0.0.1"]}
    monkeypatch.setattr("perilune.sandbox.names.lookup", lambda name: known.get(name, []))

    async def test() -> None:
        manager = await Manager.open(qemu_root, QemuDriver(qemu_root.confine))
        try:
            policy = Network(allow=("allowed.example.org", "home.example.org"))
            async with Sandbox.create(manager=manager, network=policy) as box:
                assert not await reaches(box, ALLOWED)
                assert await reaches(box, "allowed.example.org")
                assert await reaches(box, ALLOWED)
                for name in ("other.example.org", "home.example.org", OTHER, HOST):
                    assert not await reaches(box, name), name
                await manager.set_network(box.id, Network(allow=("*.example.org",)))
                assert not await reaches(box, ALLOWED)
                assert await reaches(box, "other.example.org")
                await box.pause()
                await box.resume()
                assert not await reaches(box, OTHER)
                assert await reaches(box, "other.example.org")
                (kid,) = await box.fork(1)
                assert await reaches(kid, "allowed.example.org")
                # The name moves to an address of this host: it is not told, and would not be reached.
                known["other.example.org"] = [HOST]
                assert not await reaches(kid, "other.example.org")
                await kid.kill()
            async with Sandbox.create(manager=manager) as closed:
                assert not await reaches(closed, "allowed.example.org")
        finally:
            await manager.close()

    run(test())


def test_rules_name_what_is_wrong() -> None:
    check(Network(allow=("example.org", "*.example.org", "8.8.8.8", "1.0.0.0/8")))
    for entry in ("example", "*", "*.", "exa mple.org", "1.2.3", "http://example.org", "-a.org", "a..org", "a.b.1"):
        with pytest.raises(ValueError, match=r"network\.allow has '"):
            check(Network(allow=(entry,)))
    with pytest.raises(ValueError, match=r"network\.deny has 'example\.org'"):
        check(Network(deny=("example.org",)))
    with pytest.raises(ValueError, match="IPv4"):
        check(Network(deny=("::1",)))


def test_rules_deny_before_they_allow() -> None:
    """Host and private ranges come first; with `private` only the host does; without a policy nothing passes."""
    text = rules(Network(allow=("0.0.0.0/0",), deny=("8.8.8.8",)), ["203.0.113.1"])
    assert text.index("drop\n") < text.index("0.0.0.0/0 } accept")
    for block in ("10.0.0.0/8", "203.0.113.1/32", "8.8.8.8/32", "169.254.0.0/16"):
        assert block in text
    text = rules(Network(allow=("10.1.0.0/16",), private=True), ["203.0.113.1"])
    assert "10.0.0.0/8" not in text
    assert "203.0.113.1/32" in text
    assert "accept" not in rules(Network(), []).replace("established,related accept", "")


def test_host_addresses() -> None:
    if why_not():
        pytest.skip(why_not())
    assert "127.0.0.1" in host_addresses()
