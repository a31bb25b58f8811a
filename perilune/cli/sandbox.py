"""`perilune sandbox`: the service and what it serves, from a shell.

`serve`, `setup` and `doctor` work on this host; all others ask a service that runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import tyro

from perilune.cli.parse import parse
from perilune.cli.sandbox_local import Doctor, Serve, Setup
from perilune.cli.sandbox_shell import run_program
from perilune.cli.sandbox_tables import table, top_table
from perilune.errors import Error
from perilune.sandbox.service.client import Client

Id = Annotated[str, tyro.conf.Positional]
Words = Annotated[tuple[str, ...], tyro.conf.Positional]


@dataclass(frozen=True)
class Remote:
    """Every command that asks a service."""

    url: str | None = None
    """of the service; default: $PERILUNE_SANDBOX_URL, or this host's"""

    def client(self) -> Client:
        """The service, with the key of $PERILUNE_SANDBOX_KEY."""
        return Client(self.url)


@dataclass(frozen=True)
class Create(Remote):
    """make a sandbox and print its id"""

    template: Annotated[str, tyro.conf.Positional] = "busybox"
    """a template, or a snapshot's id or label"""
    timeout: float = 3600.0
    """seconds to live; then it is paused"""
    kill: bool = False
    """after --timeout it is killed, not paused"""
    memory_mib: int | None = None
    """memory; default: the template's"""
    disk_mib: int | None = None
    """writable disk; default: the template's"""
    metadata: tuple[str, ...] = ()
    """NAME=VALUE, for listing"""
    env: tuple[str, ...] = ()
    """NAME=VALUE, for every program"""
    allow: tuple[str, ...] = ()
    """addresses, CIDR blocks, host names and *.DOMAIN that it may reach; default: none"""

    def run(self) -> None:
        body: dict[str, Any] = {"templateID": self.template, "timeout": self.timeout, "autoPause": not self.kill}
        body |= {"metadata": _pairs("metadata", self.metadata), "envVars": _pairs("env", self.env)}
        if self.memory_mib is not None:
            body["memoryMB"] = self.memory_mib
        if self.disk_mib is not None:
            body["diskSizeMB"] = self.disk_mib
        if self.allow:
            body["network"] = {"allowOut": list(self.allow)}
        print(self.client().call("POST", "/sandboxes", body)["sandboxID"])


@dataclass(frozen=True)
class Ls(Remote):
    """list sandboxes, or snapshots"""

    snapshots: bool = False
    """snapshots instead"""
    metadata: str | None = None
    """only those with NAME=VALUE&NAME=VALUE"""
    json: bool = False
    """print JSON"""

    def run(self) -> None:
        client = self.client()
        path = "/snapshots" if self.snapshots else "/v2/sandboxes"
        rows = client.call("GET", path, metadata=None if self.snapshots else self.metadata)
        if self.json:
            print(json.dumps(rows, indent=2))
        elif self.snapshots:
            names = ("snapshotID", "sandboxID", "label", "barrierID", "bytes", "createdAt")
            print(table(names, [[row[name] for name in names] for row in rows]))
        else:
            names = ("sandboxID", "templateID", "phase", "memoryMB", "endAt", "metadata")
            print(table(names, [[row[name] for name in names] for row in rows]))


@dataclass(frozen=True)
class Exec(Remote):
    """run a program in a sandbox: its output here, its exit code too"""

    box: Id = tyro.MISSING
    """the sandbox"""
    command: Words = ()
    """program and arguments, after `--`; one word is a shell command line"""
    cwd: str = ""
    """working directory; default: the template's"""
    user: str = ""
    """user; default: the template's"""
    timeout: float = 60.0
    """seconds; then the program and all that it started are killed"""

    def run(self) -> None:
        if not self.command:
            raise Error("command is missing; give it after `--`: perilune sandbox exec ID -- ls -l")
        body = {"cmd": self.command[0] if len(self.command) == 1 else list(self.command)}
        _exit(
            run_program(self.client(), self.box, body | {"cwd": self.cwd, "user": self.user, "timeout": self.timeout})
        )


@dataclass(frozen=True)
class Shell(Remote):
    """a shell in a sandbox, in this terminal"""

    box: Id = tyro.MISSING
    """the sandbox"""
    program: str = "/bin/sh"
    """what runs"""

    def run(self) -> None:
        if not sys.stdin.isatty():
            raise Error("stdin is no terminal; `perilune sandbox exec` runs programs without one")
        _exit(run_program(self.client(), self.box, {"cmd": [self.program, "-l"], "timeout": 1e8}, terminal=True))


@dataclass(frozen=True)
class Pause(Remote):
    """save sandboxes and free their processor and memory"""

    boxes: Words = ()
    """the sandboxes"""

    def run(self) -> None:
        _each(self.client(), "POST", "/pause", self.boxes)


@dataclass(frozen=True)
class Resume(Remote):
    """let paused sandboxes go on"""

    boxes: Words = ()
    """the sandboxes"""

    def run(self) -> None:
        _each(self.client(), "POST", "/resume", self.boxes)


@dataclass(frozen=True)
class Rm(Remote):
    """kill sandboxes; their snapshots stay"""

    boxes: Words = ()
    """the sandboxes, or with --snapshot snapshots"""
    snapshot: bool = False
    """delete snapshots instead"""

    def run(self) -> None:
        _each(self.client(), "DELETE", "", self.boxes, "/snapshots" if self.snapshot else "/sandboxes")


@dataclass(frozen=True)
class Fork(Remote):
    """copy a sandbox, running or paused, and print the copies' ids"""

    box: Id = tyro.MISSING
    """the sandbox"""
    count: int = 1
    """copies, at most 16 in a call"""
    label: str | None = None
    """keep the instant as a snapshot of this name"""
    barrier: str | None = None
    """id that pairs the snapshot with something else"""

    def run(self) -> None:
        body = {"count": self.count} | _named(self.label, self.barrier)
        results = self.client().call("POST", f"/sandboxes/{quote(self.box, safe='')}/fork", body)
        for result in results:
            if "sandbox" in result:
                print(result["sandbox"]["sandboxID"])
        failed = [result["error"]["message"] for result in results if "error" in result]
        if failed:
            raise Error(f"{len(failed)} of {len(results)} forks failed: {failed[0]}")


@dataclass(frozen=True)
class Snapshot(Remote):
    """save a sandbox while it runs on, and print the snapshot's id"""

    box: Id = tyro.MISSING
    """the sandbox"""
    label: str | None = None
    """its name"""
    barrier: str | None = None
    """id that pairs it with something else"""

    def run(self) -> None:
        body = _named(self.label, self.barrier)
        print(self.client().call("POST", f"/sandboxes/{quote(self.box, safe='')}/snapshots", body)["snapshotID"])


@dataclass(frozen=True)
class Top(Remote):
    """what sandboxes cost, again and again"""

    every: float = 2.0
    """seconds between two looks"""
    once: bool = False
    """one look"""

    def run(self) -> None:
        client = self.client()
        while True:
            rows = client.call("GET", "/top")
            text = top_table(rows)
            print(text if self.once else f"\x1b[H\x1b[2J{text}", flush=True)
            if self.once:
                return
            time.sleep(self.every)


COMMANDS: dict[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (Create, Ls, Exec, Shell, Pause, Resume, Fork, Snapshot, Rm, Top, Doctor, Setup, Serve)
}

HELP = f"""usage: perilune sandbox COMMAND [options]

Virtual machines for agents: saved in milliseconds, paused, resumed, forked.

commands:
{chr(10).join(f"  {name:<10} {kind.__doc__}" for name, kind in COMMANDS.items())}

examples:
  perilune sandbox setup
  perilune sandbox serve &
  id=$(perilune sandbox create python)
  perilune sandbox exec $id -- python3 -c 'print(6 * 7)'
  perilune sandbox fork $id --count 4
"""


def run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise Error(f"sandbox command {name!r} is unknown; allowed: {', '.join(COMMANDS)}")
    kind = COMMANDS[name]
    options, words = _split(rest)
    args = parse(kind, f"sandbox {name}", options, f"{kind.__doc__[0].upper()}{kind.__doc__[1:]}.")
    if words is not None:
        if kind is not Exec or args.command:
            raise Error(f"`--` is for the command of `sandbox exec`; {' '.join(words)!r} is too much")
        args = Exec(**{**args.__dict__, "command": tuple(words)})
    run_: Callable[[], None] = args.run
    run_()


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What is ours, and what comes after `--`."""
    if "--" not in arguments:
        return list(arguments), None
    place = list(arguments).index("--")
    return list(arguments[:place]), list(arguments[place + 1 :])


def _pairs(name: str, given: Sequence[str]) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise Error(f"--{name} is {pair!r}; it must be NAME=VALUE")
    return dict(pair.split("=", 1) for pair in given)


def _named(label: str | None, barrier: str | None) -> dict[str, str]:
    return {name: value for name, value in (("label", label), ("barrierID", barrier)) if value is not None}


def _each(client: Client, method: str, verb: str, boxes: Sequence[str], place: str = "/sandboxes") -> None:
    """One request for each; all are tried, the first error is raised."""
    if not boxes:
        raise Error("no sandbox is named; `perilune sandbox ls` lists them")
    errors = []
    for box in boxes:
        try:
            client.call(method, f"{place}/{quote(box, safe='')}{verb}", {} if method == "POST" else None)
        except Error as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _exit(code: int) -> None:
    if code:
        raise SystemExit(code)


__all__ = ["COMMANDS", "run"]
