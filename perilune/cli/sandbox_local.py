"""`perilune sandbox doctor`, `setup` and `serve`: what works on this host, not through a service."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from perilune.errors import Error

if TYPE_CHECKING:
    from perilune.sandbox import Limits, Manager


@dataclass(frozen=True)
class Doctor:
    """say which drivers work on this host, and why the others do not; installs nothing"""

    json: bool = False
    """print JSON"""

    def run(self) -> None:
        from perilune.sandbox import Assets, state_root
        from perilune.sandbox.doctor import examine

        checks = asyncio.run(examine(Assets(state_root())))
        if self.json:
            print(json.dumps([check.__dict__ for check in checks], indent=2))
        else:
            for check in checks:
                print(f"{'yes' if check.works else 'no ':<4}{check.name:<16}{check.detail}")


@dataclass(frozen=True)
class Setup:
    """install what is missing (Debian, root), build kernel, agent and templates"""

    template: tuple[str, ...] = ("busybox", "python")
    """templates to build"""
    kernel: Literal["tiny", "stock"] = "tiny"
    """tiny is built from source once (minutes) and starts faster; stock is Debian's"""

    def run(self) -> None:
        from perilune.sandbox import Assets, state_root
        from perilune.sandbox.setup import setup

        setup(Assets(state_root()), lambda line: print(line, flush=True), self.template, self.kernel)


@dataclass(frozen=True)
class Serve:
    """answer over HTTP until a signal; running sandboxes are paused then"""

    host: str = "127.0.0.1"
    """address to listen on; others than this host's need --api-key"""
    port: int = 8049
    """port; 0 takes a free one"""
    api_key: tuple[str, ...] = ()
    """keys of clients; the environment's PERILUNE_SANDBOX_KEY is one more"""
    domain: str = "localhost"
    """guest ports are reached as PORT-ID.DOMAIN too"""
    driver: Literal["qemu", "firecracker"] = "qemu"
    """kind of virtual machine"""
    memory_mib: int | None = None
    """memory of all machines together; default: 80 % of what is free"""
    disk_gib: int = 64
    """bytes of layers and images"""
    pool: int = 0
    """booted machines kept ready for each template in use"""
    drain_seconds: float = 10.0
    """time that requests have to end after SIGTERM"""
    on_stop: Literal["pause", "kill"] = "pause"
    """what becomes of running sandboxes at the end"""

    def run(self) -> None:
        from perilune.sandbox import Assets, state_root
        from perilune.sandbox.options import Limits
        from perilune.sandbox.service import ServiceConfig, build_app
        from perilune.sandbox.service.run import serve

        if self.pool < 0:
            raise Error(f"--pool is {self.pool}; it must be 0 or more")
        Assets(state_root()).kernel()  # says what to do where nothing is set up
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        key = os.environ.get("PERILUNE_SANDBOX_KEY")
        config = ServiceConfig(
            api_keys=(*self.api_key, *([key] if key else [])),
            domain=self.domain,
            drain_s=self.drain_seconds,
            on_stop=self.on_stop,
        )
        memory = None if self.memory_mib is None else self.memory_mib << 20
        limits = Limits(memory, self.disk_gib << 30, pool_low=(self.pool + 1) // 2, pool_high=self.pool)
        serve(build_app(config, lambda: open_manager(self.driver, limits)), self.host, self.port)


async def open_manager(driver: str, limits: Limits) -> Manager:
    """A manager over this host's root directory."""
    from perilune.sandbox import Assets, Driver, Manager, state_root
    from perilune.sandbox.doctor import choose_accelerator
    from perilune.sandbox.firecracker import FirecrackerDriver
    from perilune.sandbox.firecracker_api import find_binary
    from perilune.sandbox.kernel import cache
    from perilune.sandbox.qemu import QemuDriver

    assets = Assets(state_root())
    if driver == "firecracker":
        used: Driver = FirecrackerDriver(assets.confine, find_binary(cache()) or Path("firecracker"))
    else:
        used = QemuDriver(assets.confine, await choose_accelerator(assets))
    return await Manager.open(assets, used, limits)


__all__ = ["Doctor", "Serve", "Setup"]
