"""What E2B's SDKs ask the daemon in a sandbox, answered by the service: programs, files, folders.

Requests come with the headers E2b-Sandbox-Id and E2b-Sandbox-Port (see route.py) and the sandbox's access token.
Services: process.Process and filesystem.Filesystem (connect.py), and /files, /health.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import posixpath
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from perilune.sandbox.driver import Command, Process
from perilune.sandbox.errors import GuestError, NotFound, SandboxError
from perilune.sandbox.service import connect
from perilune.sandbox.service.bodies import Size
from perilune.sandbox.service.context import Context
from perilune.sandbox.service.envd_files import FILES
from perilune.sandbox.service.errors import Refused, response
from perilune.sandbox.service.guest import awake, from_base64, read_body, start
from perilune.sandbox.service.programs import Program

PORT = 49983
Fields = dict[str, Any]
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}


async def answer(ctx: Context, box: str, request: Request) -> Response:
    """Answer one request to the daemon of a sandbox."""
    path = request.url.path
    if path == "/health":
        return await _health(ctx, box)
    if not ctx.manager.check_token(box, "access", request.headers.get("x-access-token", "")):
        return response(Refused(401, "unauthorized", "X-Access-Token: the token of this sandbox is needed"))
    try:
        if path == "/files":
            await awake(ctx, box)
            return await (_read if request.method == "GET" else _write)(ctx, box, request)
        ctx.record(box)
        return await _call(ctx, box, request, path.removeprefix("/"))
    except (SandboxError, Refused, HTTPException, ValueError) as error:
        return response(error) if path == "/files" else connect.failed(error)


async def _health(ctx: Context, box: str) -> Response:
    """204, or 502 in the words by which E2B's clients know that a sandbox does not run."""
    try:
        record = ctx.record(box)
        if ctx.manager.machines.running.get(box) is not None or record.spec.get("auto_resume"):
            return Response(status_code=204)
    except NotFound:
        pass
    return JSONResponse({"sandboxId": box, "message": "The sandbox was not found", "code": 502}, 502)


async def _call(ctx: Context, box: str, request: Request, name: str) -> Response:
    if name == "process.Process/StreamInput":
        return await _stream_input(ctx, box, request)
    data = await read_body(request, connect.MESSAGE_MAX)
    if name in ("process.Process/Start", "process.Process/Connect"):
        if data[:1] != b"\0" or len(data) < 5:
            raise Refused(400, "invalid", "the body must be one message of the Connect protocol")
        return await _listen(ctx, box, request, name, connect.fields_of(data[5:]))
    work = CALLS.get(name)
    if work is None:
        raise Refused(501, "unimplemented", f"{name} is not here")
    await awake(ctx, box)
    return JSONResponse(await work(ctx, box, connect.fields_of(data)))


# Programs


async def _listen(ctx: Context, box: str, request: Request, name: str, fields: Fields) -> Response:
    ping = request.headers.get("keepalive-ping-interval", "")
    every = float(ping) if ping.isdigit() and int(ping) > 0 else None

    async def events() -> AsyncGenerator[Fields, None]:
        # An error before the first message is the stream's end too, as the protocol wants.
        if name.endswith("Connect"):
            program = _program(ctx, box, fields)
        else:
            program = await _start(ctx, box, request, fields)
        yield {"event": {"start": {"pid": program.process.pid}}}
        async with contextlib.aclosing(_events(program, every)) as happened:
            async for event in happened:
                yield {"event": event}

    return connect.stream(events())


async def _start(ctx: Context, box: str, request: Request, fields: Fields) -> Program:
    config = fields.get("process") or {}
    argv = [str(config.get("cmd", "")), *map(str, config.get("args") or [])]
    if not argv[0]:
        raise Refused(400, "invalid", "process.cmd is empty; it must name a program", "process.cmd")
    limit = request.headers.get("connect-timeout-ms", "")
    pty = _size(fields)
    command = Command(
        argv,
        env={str(key): str(value) for key, value in (config.get("envs") or {}).items()},
        cwd=str(config.get("cwd") or _home(_user(request))),
        user=_user(request),
        timeout_s=int(limit) / 1000 if limit.isdigit() and int(limit) > 0 else Command("").timeout_s,
        pty=pty,
        interactive=pty is None and fields.get("stdin", True) is True,
        detach=not limit.isdigit(),
    )
    tag = fields.get("tag")
    return ctx.programs.add(box, await _start_shell(ctx, box, command), command, None if tag is None else str(tag))


async def _start_shell(ctx: Context, box: str, command: Command) -> Process:
    """E2B's clients want bash; a template without it has another shell of the same calls."""
    try:
        return await start(ctx, box, command)
    except GuestError as error:
        if command.argv[0] != "/bin/bash" or "No such file" not in str(error):
            raise
        return await start(ctx, box, replace(command, argv=["/bin/sh", *command.argv[1:]]))


def _user(request: Request) -> str:
    """The user's name stands where a login's would."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return "root"
    try:
        name = base64.b64decode(given, validate=True).decode().split(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise Refused(400, "invalid", "Authorization: not a user's name in base64", "Authorization") from None
    return name or "root"


def _home(user: str) -> str:
    return "/root" if user == "root" else "/"


async def _events(program: Program, every: float | None) -> AsyncGenerator[Fields, None]:
    """What a program does as E2B's events, and a sign of life when it does nothing for long."""
    pieces = program.listen()
    waiting: asyncio.Future[Any] = asyncio.ensure_future(anext(pieces))
    try:
        while True:
            done, _ = await asyncio.wait([waiting], timeout=every)
            if not done:
                yield {"keepalive": {}}
                continue
            try:
                piece = waiting.result()
            except StopAsyncIteration:
                break
            kind = "pty" if program.command.pty else ("stdout" if piece.stream == 1 else "stderr")
            yield {"data": {kind: base64.b64encode(piece.data).decode()}}
            waiting = asyncio.ensure_future(anext(pieces))
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])
        await pieces.aclose()
    result = await program.end()
    if result.timed_out:
        raise Refused(504, "deadline_exceeded", f"the program was killed after {program.command.timeout_s:g} s")
    ended: Fields = {"exitCode": result.exit_code, "exited": True, "status": f"exit status {result.exit_code}"}
    if result.exit_code:
        ended["error"] = ended["status"]
    yield {"end": ended}


def _program(ctx: Context, box: str, fields: Fields) -> Program:
    which = fields.get("process") or {}
    pid = which.get("pid")
    return ctx.programs.get(box, None if pid is None else int(pid), which.get("tag"))


async def _list(ctx: Context, box: str, fields: Fields) -> Fields:
    processes = []
    for one in ctx.programs.running(box):
        argv = [one.command.argv] if isinstance(one.command.argv, str) else list(one.command.argv)
        config = {"cmd": argv[0], "args": argv[1:], "envs": dict(one.command.env), "cwd": one.command.cwd}
        processes.append({"config": config, "pid": one.process.pid} | ({"tag": one.tag} if one.tag else {}))
    return {"processes": processes}


async def _feed(process: Process, fields: Fields) -> None:
    given = fields.get("input") or {}
    for name in ("stdin", "pty"):
        if name in given:
            await process.write(from_base64(given[name], f"input.{name}"))


async def _send_input(ctx: Context, box: str, fields: Fields) -> Fields:
    await _feed(_program(ctx, box, fields).process, fields)
    return {}


async def _stream_input(ctx: Context, box: str, request: Request) -> Response:
    program: Program | None = None
    async for message in connect.messages(request):
        if "start" in message:
            program = _program(ctx, box, message["start"])
        elif "data" in message:
            if program is None:
                raise Refused(400, "invalid", "data came before start", "start")
            await _feed(program.process, message["data"])

    async def one() -> AsyncGenerator[Fields, None]:
        yield {}

    return connect.stream(one())


async def _send_signal(ctx: Context, box: str, fields: Fields) -> Fields:
    signal = _SIGNALS.get(fields.get("signal", 0))
    if signal is None:
        allowed = "SIGNAL_SIGTERM or SIGNAL_SIGKILL"
        raise Refused(400, "invalid", f"signal is {fields.get('signal')!r}; it must be {allowed}", "signal")
    await _program(ctx, box, fields).process.kill(signal)
    return {}


async def _close_stdin(ctx: Context, box: str, fields: Fields) -> Fields:
    await _program(ctx, box, fields).process.close_stdin()
    return {}


async def _update(ctx: Context, box: str, fields: Fields) -> Fields:
    size = _size(fields)
    if size is not None:
        await _program(ctx, box, fields).process.resize(*size)
    return {}


def _size(fields: Fields) -> tuple[int, int] | None:
    """Rows and columns of a terminal, as bodies.Size allows them."""
    size = (fields.get("pty") or {}).get("size")
    if size is None:
        return None
    try:
        given = Size.model_validate(size)
    except ValidationError as error:
        raise Refused(400, "invalid", f"pty.size is {size!r}; {error.errors()[0]['msg']}", "pty.size") from None
    return given.rows, given.cols


CALLS: dict[str, Callable[[Context, str, Fields], Awaitable[Fields]]] = {
    "process.Process/List": _list,
    "process.Process/SendInput": _send_input,
    "process.Process/SendSignal": _send_signal,
    "process.Process/CloseStdin": _close_stdin,
    "process.Process/Update": _update,
    **FILES,
}


# Files


def place(path: str, user: str) -> str:
    """An absolute guest path; others are of the user's home."""
    if not path:
        raise Refused(400, "invalid", "path is empty; it must name a file", "path")
    return posixpath.normpath(posixpath.join(_home(user), path))


async def _read(ctx: Context, box: str, request: Request) -> Response:
    path = place(request.query_params.get("path", ""), request.query_params.get("username") or "root")
    data = await ctx.manager.read(box, path, ctx.config.max_file)
    return Response(data, media_type="application/octet-stream")


async def _write(ctx: Context, box: str, request: Request) -> Response:
    user = request.query_params.get("username") or "root"
    given = request.query_params.get("path")
    written = []
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        limit = ctx.config.max_file
        async with request.form(max_files=1000, max_fields=0) as form:
            for _, part in form.multi_items():
                assert isinstance(part, UploadFile)
                data = await part.read(limit + 1)
                if len(data) > limit:
                    raise Refused(413, "too_large", f"{part.filename} has more than {limit} bytes", "file")
                written.append(await _put(ctx, box, place(given or part.filename or "", user), data))
    else:
        data = await read_body(request, ctx.config.max_file)
        written.append(await _put(ctx, box, place(given or "", user), data))
    return JSONResponse(written)


async def _put(ctx: Context, box: str, path: str, data: bytes) -> Fields:
    await ctx.manager.write(box, path, data)
    return {"name": posixpath.basename(path), "path": path, "type": "file"}


__all__ = ["PORT", "answer"]
