"""SWE-ReX's runtime and deployment over sandboxes. Needs `swe-rex`.

    deployment = SandboxDeployment(template="python")
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="cd /root && ls"))

A session is a shell on a terminal of the guest, so that interactive programs work in it. `checkpoint`, `pause`, `fork`
and the rest are at `deployment.box`; sessions go on after a pause.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionResponse,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateBashSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

from perilune.sandbox.adapters.swerex_session import Session
from perilune.sandbox.box import Sandbox
from perilune.sandbox.errors import GuestError, SandboxError

# SWE-ReX's "no time limit", as long as a sandbox is likely to live.
FOREVER_S = 1e6
ALIVE_S = 10.0


class SandboxRuntime(AbstractRuntime):
    """A runtime in one sandbox, which stays its owner's: `close` ends the sessions only."""

    def __init__(self, box: Sandbox, *, logger: logging.Logger | None = None) -> None:
        self.box = box
        self.logger = logger or logging.getLogger("perilune.sandbox.swerex")
        self._sessions: dict[str, Session] = {}

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether a program runs in the guest in time."""
        try:
            result = await self.box.exec("true", timeout_s=timeout or ALIVE_S)
        except SandboxError as error:
            return IsAliveResponse(is_alive=False, message=str(error))
        ended = "in time" if result.timed_out else f"with {result.exit_code}"
        return IsAliveResponse(is_alive=result.exit_code == 0, message="" if not result.exit_code else f"true: {ended}")

    # Sessions

    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        """A shell of its own; `SessionExistsError` if there is one of this name."""
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session!r} exists already")
        session, output = await Session.open(self.box, request.startup_source, request.startup_timeout)
        self._sessions[request.session] = session
        return CreateBashSessionResponse(output=output)

    async def run_in_session(self, action: Action) -> Observation:
        """Run a command or interrupt one; see SWE-ReX for what each field of an action does."""
        session = self._session(action.session)
        if isinstance(action, BashInterruptAction):
            output, expected = await session.interrupt(action.timeout, action.n_retry, action.expect)
            return BashObservation(output=output, exit_code=0, expect_string=expected)
        limit = action.timeout or FOREVER_S
        if action.is_interactive_command or action.is_interactive_quit:
            output, expected = await session.type(action.command, limit, action.expect)
            return BashObservation(output=output, exit_code=0, expect_string=expected)
        output, code, expected = await session.run(action.command, limit, action.expect)
        if action.check == "raise" and code != 0:
            said = f"{action.error_msg}: " if action.error_msg else ""
            raise NonZeroExitCodeError(f"{said}{action.command!r} ended with {code}: {output!r}")
        return BashObservation(
            output=output, exit_code=None if action.check == "ignore" else code, expect_string=expected
        )

    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        """End a session's shell and all that runs in it."""
        await self._session(request.session).close()
        del self._sessions[request.session]
        return CloseBashSessionResponse()

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            known = ", ".join(map(repr, self._sessions)) or "none"
            raise SessionDoesNotExistError(f"session {name!r} does not exist; there are: {known}")
        return self._sessions[name]

    # Without a session

    async def execute(self, command: Command) -> CommandResponse:
        """Run a program to its end. A list with `shell` runs its first word as the line, as `subprocess.run` does."""
        argv: str | list[str] = command.command
        if command.shell and not isinstance(argv, str):
            argv = ["/bin/sh", "-c", *argv]
        elif not command.shell and isinstance(argv, str):
            argv = [argv]
        if command.merge_output_streams:
            script, words = (argv, []) if isinstance(argv, str) else ('exec "$@"', argv)
            argv = ["/bin/sh", "-c", f"exec 2>&1; {script}", "sh", *words]
        limit = command.timeout or FOREVER_S
        result = await self.box.exec(argv, env=command.env, cwd=command.cwd or "", timeout_s=limit)
        if result.timed_out:
            raise CommandTimeoutError(f"{command.command!r} did not end within {limit:g} s")
        answer = CommandResponse(
            stdout=result.stdout.decode(errors="backslashreplace"),
            stderr=result.stderr.decode(errors="backslashreplace"),
            exit_code=result.exit_code,
        )
        if command.check and result.exit_code:
            said = f"{command.error_msg}: " if command.error_msg else ""
            raise NonZeroExitCodeError(
                f"{said}{command.command!r} ended with {result.exit_code}: {answer.stdout!r}, {answer.stderr!r}"
            )
        return answer

    # Files

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """A file as text; `FileNotFoundError` if it is not there."""
        try:
            data = await self.box.read(request.path)
        except GuestError as error:
            raise FileNotFoundError(str(error)) if "No such file" in str(error) else error from None
        return ReadFileResponse(content=data.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write a text file; its folders are made."""
        await self.box.write(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file or folder of this host into the guest."""
        await self.box.upload(Path(request.source_path), request.target_path)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        """End every session."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
        return CloseResponse()


class SandboxDeployment(AbstractDeployment):
    """A deployment that makes a sandbox when it is started and kills it when it is stopped.

    options: of `Sandbox.create` (template, manager, memory_mib, timeout_s, network, ...).
    """

    def __init__(self, *, logger: logging.Logger | None = None, **options: Any) -> None:
        self.logger = logger or logging.getLogger("perilune.sandbox.swerex")
        self.box: Sandbox | None = None
        self._options = options
        self._runtime: SandboxRuntime | None = None
        self._hooks = CombinedDeploymentHook()

    def add_hook(self, hook: DeploymentHook) -> None:
        """Tell a hook about steps of the start."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether the guest answers."""
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self, *args: Any, **kwargs: Any) -> None:
        """Make the sandbox; nothing happens if it is there."""
        if self._runtime is None:
            self._hooks.on_custom_step("Creating sandbox")
            self.box = await Sandbox.create(**self._options)
            self._runtime = SandboxRuntime(self.box, logger=self.logger)

    async def stop(self, *args: Any, **kwargs: Any) -> None:
        """Kill the sandbox; nothing happens if there is none."""
        box, self.box, self._runtime = self.box, None, None
        if box is not None:
            await box.kill()

    @property
    def runtime(self) -> SandboxRuntime:
        """The runtime; `DeploymentNotStartedError` before `start`."""
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime


__all__ = ["SandboxDeployment", "SandboxRuntime"]
