"""Harbor's environment over sandboxes. Needs `harbor` (Python 3.12).

    harbor run ... --environment-import-path perilune.sandbox.adapters.harbor:SandboxEnvironment --ek template=python

A task's Dockerfile is not built: `template` names a template that was made of its image (`perilune.sandbox.oci`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import NetworkMode, NetworkPolicy

from perilune.sandbox.box import Sandbox
from perilune.sandbox.driver import Network
from perilune.sandbox.errors import GuestError
from perilune.sandbox.manager import Manager
from perilune.sandbox.snapshot import Snapshot

EVERYWHERE = ("0.0.0.0/0",)
# Harbor's "no time limit", and what a sandbox lives without a word from it.
FOREVER_S = 1e6
LIFE_S = 24 * 3600.0


class SandboxEnvironment(BaseEnvironment):
    """One sandbox for a trial. template: what it is made from. manager: the process's own unless given.

    `checkpoint` and `restore` are beyond Harbor's interface; `box` has the rest.
    """

    def __init__(self, *args: Any, template: str | None = None, manager: Manager | None = None, **kwargs: Any) -> None:
        self._template = template
        self._manager = manager
        self._box: Sandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "perilune"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        if not self._template and not self.task_env_config.docker_image:
            raise FileNotFoundError(
                "neither `template` nor the task's docker_image is given; a Dockerfile is not built here: make a "
                "template of its image"
            )

    @property
    def box(self) -> Sandbox:
        """The sandbox; `RuntimeError` before `start`."""
        if self._box is None:
            raise RuntimeError("the environment is not started")
        return self._box

    async def start(self, force_build: bool) -> None:
        """Make the sandbox. force_build has no effect: nothing is built."""
        if self._box is not None:
            return
        template = self._template or str(self.task_env_config.docker_image).replace("/", "_").replace(":", "_")
        self._box = await Sandbox.create(
            template,
            manager=self._manager,
            memory_mib=self._effective_memory_mb,
            disk_mib=self._effective_storage_mb,
            timeout_s=LIFE_S,
            on_timeout="kill",
            owner="harbor",
            metadata={"session": self.session_id, "environment": self.environment_name},
            env=self._startup_env(),
            network=_network(self.network_policy),
        )
        folders = [str(mount["target"]) for mount in self._mounts]
        if folders:
            await self._box.exec(["mkdir", "-p", *folders], user="root")

    async def stop(self, delete: bool) -> None:
        """Kill the sandbox, or with `delete` false pause it: it waits without cost, for somebody to look into."""
        box, self._box = self._box, None
        if box is not None:
            await (box.kill() if delete else box.pause())

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        await self.box.manager.set_network(self.box.id, _network(network_policy))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a shell command; after its time it and all that it started are killed, and its exit code is 124."""
        who = self._resolve_user(user)
        result = await self.box.exec(
            command,
            env=self._merge_env(env),
            cwd=cwd or self.task_env_config.workdir or "",
            user="" if who is None else str(who),
            timeout_s=timeout_sec or FOREVER_S,
        )
        stdout, stderr = (data.decode(errors="replace") for data in (result.stdout, result.stderr))
        callback = self._output_callback()
        if callback is not None:
            for text, name in ((stdout, "stdout"), (stderr, "stderr")):
                if text:
                    await callback(text, name)
        return ExecResult(stdout=stdout, stderr=stderr, return_code=124 if result.timed_out else result.exit_code)

    # Files

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file of this host into the guest."""
        source = Path(source_path)
        if not source.is_file():
            raise FileNotFoundError(f"{source} is no file")
        await self.box.upload(source, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what is in a folder of this host into one of the guest."""
        source = Path(source_dir)
        if not source.is_dir():
            raise NotADirectoryError(f"{source} is no folder")
        await self.box.upload(source, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file of the guest here."""
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(await self._read(source_path))

    async def _read(self, path: str) -> bytes:
        try:
            return await self.box.read(path)
        except GuestError as error:
            raise FileNotFoundError(str(error)) if "No such file" in str(error) else error from None

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what is in a folder of the guest here, over what is there."""
        if not await self.is_dir(source_dir):
            raise NotADirectoryError(f"{source_dir} is no folder of the guest")
        await self.box.download(source_dir, Path(target_dir))

    # Beyond Harbor's interface

    async def checkpoint(self, label: str | None = None) -> Snapshot:
        """Save the environment while it runs on."""
        return await self.box.checkpoint(label)

    async def restore(self, snapshot: Snapshot | str) -> None:
        """Let it go on from a snapshot."""
        await self.box.rollback(snapshot)


def _network(policy: NetworkPolicy) -> Network:
    match policy.network_mode:
        case NetworkMode.NO_NETWORK:
            return Network()
        case NetworkMode.PUBLIC:
            return Network(allow=EVERYWHERE)
        case _:
            return Network(allow=tuple(policy.allowed_hosts))


__all__ = ["SandboxEnvironment"]
