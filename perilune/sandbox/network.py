"""What a guest may reach: a network namespace of its own, a tap in it, and rules that are replaced in one step.

    guest 192.0.2.2 -- tap (192.0.2.1) [namespace: rules, NAT] 198.18.x.2 -- 198.18.x.1 [host: forwarding, NAT]

Guests of a fork have the same address, each in its own namespace. Nothing is allowed but what a policy names; the
host and private ranges are denied even then. Names are answered at the gateway (names.py), and their addresses opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from perilune.sandbox.driver import Network
from perilune.sandbox.errors import SandboxError, Unavailable
from perilune.sandbox.names import OPEN_S, NameServer, is_name
from perilune.sandbox.packages import find, require

T = TypeVar("T")

GUEST, GATEWAY = "192.0.2.2", "192.0.2.1"
_LINKS = ipaddress.ip_network("198.18.0.0/15")
_PREFIX = "perilune-"
# The same for every tap: a guest that is resumed remembers its neighbours.
_GATEWAY_MAC = "02:00:00:00:00:01"
# RFC 6890: this host, private use, link local, carrier NAT, protocol and test ranges, multicast, reserved.
DENIED = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
)
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP = 0x0002 | 0x1000 | 0x4000  # IFF_TAP | IFF_NO_PI | IFF_VNET_HDR


def why_not() -> str:
    """Why allow-lists cannot be had here; empty if they can."""
    if os.geteuid() != 0:
        return "allow-lists need root (network namespaces and taps)"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if find(program) is None:
            return f"{program} is not installed (package {package})"
    return "" if os.path.exists("/dev/net/tun") else "/dev/net/tun is not there"


def check(network: Network) -> None:
    """Raise `ValueError` naming an entry that is no address or block, and in `allow` no host name either."""
    for name in ("allow", "deny"):
        for entry in getattr(network, name):
            if name == "allow" and is_name(entry):
                continue
            try:
                block = ipaddress.ip_network(entry, strict=False)
            except ValueError as error:
                names = ", host names and *.DOMAIN" if name == "allow" else ""
                raise ValueError(f"network.{name} has {entry!r}; allowed are addresses, CIDR blocks{names}") from error
            if block.version != 4:
                raise ValueError(f"network.{name} has {entry!r}; guests have IPv4 only")


def rules(network: Network, host: list[str]) -> str:
    """The complete rules of one namespace, as one nft transaction. host: the host's own addresses."""
    check(network)
    blocks = [entry for entry in network.allow if not is_name(entry)]
    closed = denied(network, host)
    drop = f"iifname tap0 ip daddr {{ {', '.join(_merged(closed))} }} drop" if closed else ""
    accept = f"iifname tap0 ip daddr {{ {', '.join(_merged(blocks))} }} accept" if blocks else ""
    asked, told, named = "", "", ""
    if network.allow:
        asked = f"iifname tap0 ip daddr {GATEWAY} udp dport 53 accept"
        told = f"oifname tap0 ip daddr {GUEST} udp sport 53 accept"
        named = "iifname tap0 ip daddr @named accept"
    return f"""
add table ip perilune
delete table ip perilune
table ip perilune {{
    set named {{ type ipv4_addr; flags timeout; timeout {OPEN_S}s; size 4096; }}
    chain forward {{
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        {drop}
        {accept}
        {named}
    }}
    chain input {{
        type filter hook input priority 0; policy drop;
        {asked}
    }}
    chain output {{
        type filter hook output priority 0; policy drop;
        {told}
    }}
    chain nat {{ type nat hook postrouting priority 100; oifname wan0 masquerade; }}
}}
"""


def denied(network: Network, host: list[str]) -> list[str]:
    """What is out of reach whatever is allowed, by address or by name."""
    return [*host, *network.deny, *(() if network.private else DENIED)]


def _merged(blocks: list[str] | tuple[str, ...]) -> list[str]:
    networks = [ipaddress.IPv4Network(block, strict=False) for block in blocks]
    return [str(block) for block in ipaddress.collapse_addresses(networks)]


@dataclass
class Link:
    """The network of one machine. slot: which /30 of the links' range is its own."""

    box: str
    slot: int
    names: NameServer | None = None

    @property
    def namespace(self) -> str:
        return _PREFIX + self.box

    def open(self, network: Network) -> int:
        """Make it and return the tap's descriptor. Rules come first: there is no moment without them."""
        reason = why_not()
        if reason:
            raise Unavailable(f"network: {reason}")
        host = host_addresses()
        policy = rules(network, host)
        base = int(_LINKS.network_address) + 4 * self.slot
        outer, inner = (str(ipaddress.IPv4Address(base + offset)) for offset in (1, 2))
        name = f"pl{self.slot}"
        try:
            _ip("netns", "add", self.namespace)
            _nft(policy, self.namespace)
            _ip("link", "add", name, "type", "veth", "peer", "name", "wan0", "netns", self.namespace)
            _ip("addr", "add", f"{outer}/30", "dev", name)
            _ip("link", "set", name, "up")
            tap = _inside(self.namespace, _tap)
            try:
                script = f"addr add {inner}/30 dev wan0\nlink set wan0 up\nroute add default via {outer}\n"
                script += f"link set tap0 address {_GATEWAY_MAC}\naddr add {GATEWAY}/30 dev tap0\nlink set tap0 up\n"
                _run([require("ip"), "-n", self.namespace, "-batch", "-"], script)
                forward = "/proc/sys/net/ipv4/ip_forward"
                _run([require("ip"), "netns", "exec", self.namespace, "sh", "-c", f"echo 1 > {forward}"])
                _host_forwarding()
                server = _inside(self.namespace, _name_socket)
                self.names = NameServer(server, network.allow, denied(network, host), self._opened)
            except BaseException:
                os.close(tap)
                raise
        except BaseException:
            self.close()
            raise
        return tap

    def set(self, network: Network) -> None:
        """Replace what may be reached, in one transaction."""
        host = host_addresses()
        policy = rules(network, host)
        assert self.names is not None
        self.names.set(network.allow, denied(network, host), lambda: _nft(policy, self.namespace))

    def _opened(self, addresses: Sequence[str]) -> None:
        """Let these be reached for a while; one that is open already is so for as long from now on."""
        change = f"element ip perilune named {{ {', '.join(addresses)} }}"
        _nft(f"add {change}\ndelete {change}\nadd {change}\n", self.namespace)

    def close(self) -> None:
        """Remove it; the namespace takes its devices along."""
        if self.names is not None:
            self.names.close()
        with contextlib.suppress(SandboxError):
            _ip("link", "del", f"pl{self.slot}")
        with contextlib.suppress(SandboxError):
            _ip("netns", "del", self.namespace)


def sweep(boxes: list[str]) -> None:
    """Remove the namespaces that an earlier service left of these; their ends on the host go with them."""
    for box in boxes:
        if (Path("/run/netns") / (_PREFIX + box)).exists():
            with contextlib.suppress(SandboxError):
                _ip("netns", "del", _PREFIX + box)


def host_addresses() -> list[str]:
    """Every IPv4 address of this host."""
    text = _run([require("ip"), "-4", "-o", "addr", "show"])
    return sorted({line.split()[3].split("/")[0] for line in text.splitlines()})


def _host_forwarding() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    _nft(
        f"""
add table ip perilune_host
flush table ip perilune_host
table ip perilune_host {{
    chain nat {{ type nat hook postrouting priority 100; ip saddr {_LINKS} oifname != "pl*" masquerade; }}
    chain input {{ type filter hook input priority 0; iifname "pl*" drop; }}
}}
""",
        None,
    )


def _tap() -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"tap0", _TAP))
    return tap


def _name_socket() -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((GATEWAY, 53))
    return server


def _inside(namespace: str, work: Callable[[], T]) -> T:
    """The result of work that is done in a namespace: in a thread that enters it and ends."""
    result: list[T] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with open(f"/run/netns/{namespace}") as place:
                if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if errors:
        raise SandboxError(f"{work.__name__.strip('_')} in {namespace}: {errors[0]}") from errors[0]
    return result[0]


def _ip(*arguments: str) -> None:
    _run([require("ip"), *arguments])


def _nft(script: str, namespace: str | None) -> None:
    command = [require("nft"), "-f", "-"]
    if namespace is not None:
        command = [require("ip"), "netns", "exec", namespace, *command]
    _run(command, script)


def _run(command: list[str], text: str = "") -> str:
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SandboxError(f"{' '.join(command[:6])}: {run.stderr.strip()[-300:]}")
    return run.stdout


__all__ = ["GATEWAY", "GUEST", "Link", "check", "host_addresses", "rules", "sweep", "why_not"]
