"""QEMU's command line: one small machine without PCI, ACPI or firmware devices, its memory a private map of a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.counter import counter_khz
from perilune.sandbox.driver import Machine

DISK_DEVICE = "disk"
NIC = "nic"
KERNEL_LINE = "console=ttyS0 reboot=t panic=-1 quiet random.trust_cpu=on tsc=reliable"
# What a NIC promises must not depend on what is behind it, or a snapshot would fit only one kind of network.
_NIC = "csum=off,guest_csum=off,gso=off,guest_tso4=off,guest_tso6=off,guest_ufo=off,guest_ecn=off,mrg_rxbuf=off"
_NIC += ",host_tso4=off,host_tso6=off,host_ufo=off,host_ecn=off,guest_uso4=off,guest_uso6=off,host_uso=off"


@dataclass(frozen=True)
class Sockets:
    """Numbers of inherited descriptors: the ends that QEMU holds of three connections, and of its tap and of KVM."""

    qmp: int
    agent: int
    console: int
    tap: int | None = None
    kvm: int | None = None


def machine_type(machine: Machine) -> str:
    """QEMU's machine and its options."""
    return f"microvm,acpi={'on' if machine.acpi else 'off'},memory-backend=ram"


_KVM_SET = 9


def accelerator(name: str) -> str:
    """QEMU's argument for "tcg" or "kvm"; the device is opened by us, QEMU's own user may not."""
    return "tcg,thread=single,tb-size=256" if name == "tcg" else f"kvm,device=/dev/fdset/{_KVM_SET}"


def kernel_line(accel: str) -> str:
    """The kernel's command line. An emulated guest reads this host's counter: it cannot measure it on a busy host."""
    return KERNEL_LINE + (f" tsc_early_khz={counter_khz()}" if accel == "tcg" else "")


def cpu(name: str) -> str:
    """The processor that a guest sees."""
    return "max" if name == "tcg" else "host,migratable=on"


def command(
    binary: str, accel: str, machine: Machine, memory: Path, disks: Sequence[Path], top: Path, fds: Sockets, load: bool
) -> list[str]:
    """The arguments. disks: frozen qcow2 layers, oldest first; top: the layer that is written."""
    size = f"{machine.memory_mib}M"
    network = "hubport,id=net,hubid=0" if fds.tap is None else f"tap,id=net,fd={fds.tap}"
    arguments = [
        *(binary, "-M", machine_type(machine), "-accel", accelerator(accel), "-cpu", cpu(accel), "-m", size),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "sandbox"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        "-object",
        f"memory-backend-file,id=ram,size={size},mem-path={memory},share=off,readonly=on,rom=off,prealloc=off",
        *("-kernel", str(machine.kernel), "-initrd", str(machine.initrd), "-append", kernel_line(accel)),
        *("-chardev", f"socket,id=qmp,fd={fds.qmp}", "-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"socket,id=console,fd={fds.console}", "-serial", "chardev:console"),
        *("-device", "virtio-serial-device"),
        *("-chardev", f"socket,id=agent,fd={fds.agent}", "-device", "virtserialport,chardev=agent,name=agent"),
        *("-device", "virtio-rng-device"),
        *("-netdev", network, "-device", f"virtio-net-device,id={NIC},netdev=net,{_NIC}"),
    ]
    if fds.kvm is not None:
        arguments += ["-add-fd", f"fd={fds.kvm},set={_KVM_SET}"]
    for node in (raw(machine.root, "root"), layers(machine.disk, [*disks, top])):
        arguments += ["-blockdev", json.dumps(node)]
    arguments += ["-device", "virtio-blk-device,drive=root"]
    # Where the host's disk is full the guest is told so, and not stopped until there is room.
    disk = f"virtio-blk-device,id={DISK_DEVICE},drive={node_name(len(disks))},werror=report,rerror=report"
    arguments += ["-device", disk]
    if load:
        arguments += ["-global", "migration.send-configuration=off", "-incoming", "defer"]
    return arguments


def node_name(number: int) -> str:
    """The block node of the writable layer with this number in its chain."""
    return f"layer{number}"


def raw(path: Path, name: str) -> dict[str, object]:
    """A read-only image."""
    return {
        "driver": "raw",
        "node-name": name,
        "read-only": True,
        "file": {"driver": "file", "filename": str(path), "read-only": True, "locking": "off"},
    }


def layers(base: Path, chain: Sequence[Path], writable: bool = True) -> dict[str, object]:
    """A chain of qcow2 layers over `base`; only the last may be written."""
    node = raw(base, "base")
    for number, path in enumerate(chain):
        node = layer(path, node_name(number), node, read_only=not writable or number < len(chain) - 1)
    return node


def layer(path: Path, name: str, backing: object, read_only: bool = False) -> dict[str, object]:
    """One qcow2 layer. The host's page cache is never flushed for the guest: what lasts is what a capture commits."""
    file = {"driver": "file", "filename": str(path), "read-only": read_only, "locking": "off"}
    cache = {"direct": False, "no-flush": True}
    return {
        "driver": "qcow2",
        "node-name": name,
        "read-only": read_only,
        "discard": "unmap",
        "cache": cache,
        "file": file,
        "backing": backing,
    }


__all__ = ["DISK_DEVICE", "NIC", "Sockets", "command", "cpu", "layer", "layers", "machine_type", "node_name", "raw"]
