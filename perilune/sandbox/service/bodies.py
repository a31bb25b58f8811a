"""The JSON that requests bring, with E2B's names; an unknown field is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasGenerator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from perilune.sandbox.driver import Network
from perilune.sandbox.network import check
from perilune.sandbox.service.config import FORKS_PER_CALL
from perilune.sandbox.service.errors import Refused
from perilune.sandbox.service.views import EVERYWHERE

Seconds = Annotated[float, Field(gt=0, lt=1e9)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


def _alias(name: str) -> str:
    """E2B writes ID and MB in capitals."""
    return to_camel(name).replace("Id", "ID").replace("Mb", "MB")


class Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", alias_generator=AliasGenerator(validation_alias=_alias), populate_by_name=True
    )


class NetworkUpdate(Body):
    """allow_out: addresses, CIDR blocks, host names and *.DOMAIN; deny_out: addresses and blocks.
    allow_internet_access: everything that is not private."""

    allow_out: list[str] = []
    deny_out: list[str] = []
    allow_internet_access: bool | None = Field(default=None, validation_alias="allow_internet_access")
    allow_public_traffic: Literal[False] | None = None
    rules: Any = None
    egress_proxy: Any = None
    dns_servers: Any = None
    mask_request_host: Any = None
    https_ports: Any = None

    def network(self, internet: bool | None = None) -> Network:
        """As a policy; refuses what cannot be had."""
        for name in ("rules", "egress_proxy", "dns_servers", "mask_request_host", "https_ports"):
            if getattr(self, name):
                raise Refused(
                    400, "unsupported", f"network.{_alias(name)} cannot be had here", f"network.{_alias(name)}"
                )
        wide = self.allow_internet_access if internet is None else internet
        deny = tuple(self.deny_out)
        # E2B denies everything in this way; here that is so unless something is allowed.
        deny = tuple(block for block in deny if block not in EVERYWHERE) if self.allow_out else deny
        allow = (*self.allow_out, *(EVERYWHERE if wide and not self.allow_out else ()))
        network = Network(allow=allow, deny=deny)
        check(network)
        return network


class AutoResume(Body):
    enabled: bool = False


class NewSandbox(Body):
    """What `POST /sandboxes` takes. template_id: a template, or a snapshot's id or name. memory_mb, disk_size_mb:
    of this sandbox's machine. owner, idle: see `Options`. timeout: 15 seconds unless given, 300 of `/v2`."""

    template_id: Name = Field(default="busybox", validation_alias="templateID")
    timeout: Seconds | None = None
    auto_pause: bool = True
    auto_pause_memory: Literal[True] = True
    auto_resume: AutoResume | bool = False
    secure: bool = True
    allow_internet_access: bool | None = Field(default=None, validation_alias="allow_internet_access")
    network: NetworkUpdate | None = None
    metadata: dict[str, str] = {}
    env_vars: dict[str, str] = {}
    memory_mb: int | None = Field(default=None, ge=16, le=1 << 20)
    disk_size_mb: int | None = Field(default=None, ge=16, le=1 << 20)
    owner: str = Field(default="", max_length=200)
    idle: Seconds | None = None
    mcp: None = None
    iam: None = None
    volume_mounts: Annotated[list[Any], Field(max_length=0)] = []

    def resumes(self) -> bool:
        """Whether a paused one is resumed by its use."""
        return self.auto_resume if isinstance(self.auto_resume, bool) else self.auto_resume.enabled


class Timeout(Body):
    timeout: Seconds


class Refresh(Body):
    duration: Seconds = 15.0


class Connect(Body):
    timeout: Seconds | None = None
    memory: Literal[True] = True
    auto_pause: bool | None = None


class Pause(Body):
    memory: Literal[True] = True
    require_healthy_guest: bool = False


class NewSnapshot(Body):
    """name, label: the same, under E2B's name and ours. barrier_id: pairs it with something else, a model's state."""

    name: Name | None = None
    label: Name | None = None
    barrier_id: Name | None = None
    memory: Literal[True] = True


class Fork(Body):
    count: int = Field(default=1, ge=1, le=FORKS_PER_CALL)
    timeout: Seconds | None = None
    label: Name | None = None
    barrier_id: Name | None = None


class Rollback(Body):
    snapshot_id: Name


class Size(Body):
    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)


class Exec(Body):
    """A program to run. cmd: a shell command line, or a program and its arguments; an empty list, or none, is the
    program that the template is made for. cwd, user: the template's if they are empty. stdin: text. interactive: more
    of it comes by `.../input`. detach: no time limit, and nobody waits. stream: see docs/sandbox-service.md."""

    cmd: str | list[str] = []
    env: dict[str, str] = {}
    cwd: str = ""
    user: str = ""
    stdin: str | None = None
    timeout: Seconds = 60.0
    max_output: int | None = Field(default=None, ge=0)
    pty: Size | None = None
    interactive: bool = False
    detach: bool = False
    stream: bool = False
    tag: Name | None = None


class Input(Body):
    """data: base64 of what the program reads. close: its stdin ends after that."""

    data: str = ""
    close: bool = False
    size: Size | None = None


class Signal(Body):
    signal: int = Field(default=9, ge=1, le=64)


__all__ = [
    "Connect",
    "Exec",
    "Fork",
    "Input",
    "NetworkUpdate",
    "NewSandbox",
    "NewSnapshot",
    "Pause",
    "Refresh",
    "Rollback",
    "Signal",
    "Size",
    "Timeout",
]
