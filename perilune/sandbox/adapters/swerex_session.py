"""A shell on a terminal of a guest, spoken to a command at a time.

Its prompt is a mark with the last exit code in it, so that one look at the output says that a command has ended, how,
and what it printed. A command is written to a file and sourced: no length or quoting can break it.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
import secrets
import time
from collections.abc import Sequence

from swerex.exceptions import BashIncorrectSyntaxError, CommandTimeoutError

from perilune.sandbox.box import Sandbox
from perilune.sandbox.driver import Command, Process
from perilune.sandbox.errors import SandboxError, Terminal

ROWS, COLUMNS = 50, 2000  # wide: a terminal breaks long lines
START_S = 30.0
_CONTROL = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")
_BASH = ["/bin/bash", "--norc", "--noprofile", "--noediting", "-i"]


class Session:
    """Open it with `Session.open`."""

    def __init__(self, box: Sandbox, process: Process, shell: str) -> None:
        self._box = box
        self._process = process
        self._shell = shell
        self._id = secrets.token_hex(8)
        self._text = ""
        self._more = asyncio.Event()
        self._ended = False
        self._count = 0
        self._prompt = re.compile(rf"<{self._id}:(\d+)>")
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, box: Sandbox, sources: Sequence[str], timeout_s: float) -> tuple[Session, str]:
        """A session, and what its startup files printed."""
        has_bash = (await box.exec("test -x /bin/bash")).exit_code == 0
        argv = _BASH if has_bash else ["/bin/sh", "-i"]
        command = Command(argv, env={"TERM": "dumb", "PS1": "", "HISTFILE": ""}, pty=(ROWS, COLUMNS), detach=True)
        session = cls(box, await box.start(command), argv[0])
        try:
            await session._send(f"stty -echo; PS2=; PS1='<{session._id}:$?>'\n")
            await session._wait(START_S, ())
            output = ""
            for path in sources:
                said, _, _ = await session._sourced(path, max(timeout_s, START_S), ())
                output += said
        except BaseException:
            await session.close()
            raise
        return session, output

    async def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        try:
            async for piece in self._process.output():
                self._text += decoder.decode(piece.data)
                self._more.set()
        finally:
            self._ended = True
            self._more.set()

    async def _send(self, text: str) -> None:
        await self._process.write(text.encode())

    async def _wait(self, limit_s: float, expect: Sequence[str]) -> tuple[str, int | None, str]:
        """What was printed up to the prompt or one of `expect`, the exit code, and which of them it was."""
        deadline = time.monotonic() + limit_s
        patterns = [(re.compile(pattern), pattern) for pattern in expect]
        while True:
            found = [(match, name) for pattern, name in patterns if (match := pattern.search(self._text))]
            prompt = self._prompt.search(self._text)
            if prompt is not None:
                found.append((prompt, ""))
            if found:
                match, name = min(found, key=lambda one: one[0].start())
                before, self._text = self._text[: match.start()], self._text[match.end() :]
                return before, None if name else int(match[1]), name
            if self._ended:
                raise Terminal("the session's shell has ended")
            self._more.clear()
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                    await self._more.wait()
            except TimeoutError:
                raise CommandTimeoutError(f"the command did not end within {limit_s:g} s") from None

    async def run(self, command: str, limit_s: float, expect: Sequence[str]) -> tuple[str, int | None, str]:
        """Run a command: its output, its exit code, and which of `expect` ended it.

        `BashIncorrectSyntaxError` before anything is run, `CommandTimeoutError` while it runs on.
        """
        self._count += 1
        path = f"/tmp/.session-{self._id}-{self._count}"
        begin = f"<{self._id}:begin>"
        checked = await self._box.exec([self._shell, "-n"], stdin=command + "\n")
        if checked.exit_code:
            said = checked.stderr.decode(errors="backslashreplace")
            raise BashIncorrectSyntaxError(f"{command!r}: {said}", extra_info={"bash_stdout": "", "bash_stderr": said})
        await self._box.write(path, f"rm -f {path}; printf '%s\\n' '{begin}'\n{command}\n")
        output, code, name = await self._sourced(path, limit_s, expect)
        return output.partition(begin)[2].removeprefix("\n"), code, name

    async def _sourced(self, path: str, limit_s: float, expect: Sequence[str]) -> tuple[str, int | None, str]:
        self._text = ""
        await self._send(f". {path}\n")
        output, code, name = await self._wait(limit_s, expect)
        return _plain(output), code, name

    async def type(self, line: str, limit_s: float, expect: Sequence[str]) -> tuple[str, str]:
        """Type a line for whatever program reads the terminal."""
        self._text = ""
        await self._send(line + "\n")
        output, _, name = await self._wait(limit_s, expect)
        return _plain(output).lstrip().removeprefix(line).strip(), name

    async def interrupt(self, limit_s: float, tries: int, expect: Sequence[str]) -> tuple[str, str]:
        """Ctrl-C until the prompt is back; then whatever runs is killed."""
        for attempt in range(tries + 1):
            await self._send("\x03" if attempt < tries else "\x1a")
            try:
                output, _, name = await self._wait(limit_s, expect)
                break
            except CommandTimeoutError:
                continue
        else:
            raise CommandTimeoutError(f"the session did not answer {tries} interrupts")
        if attempt == tries:  # it was stopped only
            await self._send("kill -9 %1\n")
            await self._wait(START_S, ())
        return _plain(output).partition(f"<{self._id}:begin>")[2].strip() or _plain(output).strip(), name

    async def close(self) -> None:
        """End the shell and all that runs in it."""
        self._reader.cancel()
        with contextlib.suppress(SandboxError):  # its machine may be gone, and it too
            await self._process.kill()


def _plain(text: str) -> str:
    return _CONTROL.sub("", text).replace("\r\n", "\n")


__all__ = ["Session"]
