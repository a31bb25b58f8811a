"""What is asked of a Firecracker process: to boot, to load a snapshot, to lead to its guest's agent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from perilune.sandbox.driver import Machine

AGENT_PORT = 5000
_TRY_S = 2.0  # a request that a reset has met is never answered
KERNEL_LINE = "console=ttyS0 reboot=k panic=-1 quiet 8250.nr_uarts=1 tsc=reliable random.trust_cpu=on"


def boot_requests(machine: Machine) -> list[tuple[str, dict[str, object]]]:
    """What configures and starts a machine, in order. Paths of drives and of the vsock are relative."""
    drive = {"is_root_device": False, "cache_type": "Unsafe"}
    return [
        (
            "/machine-config",
            {"vcpu_count": 1, "mem_size_mib": machine.memory_mib, "track_dirty_pages": True},
        ),
        (
            "/boot-source",
            {"kernel_image_path": str(machine.kernel), "initrd_path": str(machine.initrd), "boot_args": KERNEL_LINE},
        ),
        ("/drives/root", {**drive, "drive_id": "root", "path_on_host": "root.squashfs", "is_read_only": True}),
        ("/drives/disk", {**drive, "drive_id": "disk", "path_on_host": "disk.raw", "is_read_only": False}),
        ("/vsock", {"guest_cid": 3, "uds_path": "v.sock"}),
        ("/entropy", {}),
        ("/actions", {"action_type": "InstanceStart"}),
    ]


def load_request(version: str, state: Path, memory: Path) -> dict[str, object]:
    """The body of /snapshot/load; tracking is not part of a snapshot, and its name changed with 1.13."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    track = "track_dirty_pages" if numbers >= (1, 13) else "enable_diff_snapshots"
    return {
        "snapshot_path": str(state),
        "mem_backend": {"backend_type": "File", "backend_path": str(memory)},
        track: True,
        "resume_vm": False,
    }


async def vsock(path: Path) -> socket.socket | None:
    """A connection to the agent's port, or None if there is none yet."""
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError, TimeoutError):
        undo.callback(connection.close)
        async with asyncio.timeout(_TRY_S):
            await loop.sock_connect(connection, str(path))
            await loop.sock_sendall(connection, f"CONNECT {AGENT_PORT}\n".encode())
            answer = b""
            while not answer.endswith(b"\n"):
                piece = await loop.sock_recv(connection, 1)
                if not piece:
                    raise OSError("reset")
                answer += piece
            if answer.startswith(b"OK "):
                undo.pop_all()
                return connection
    return None


__all__ = ["boot_requests", "load_request", "vsock"]
