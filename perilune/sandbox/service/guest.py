"""The inside of a sandbox over HTTP: programs, files, folders. An API key or the sandbox's own token opens it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from perilune.sandbox.driver import Command, Process, Result
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.service.bodies import Exec, Input, Signal
from perilune.sandbox.service.context import Context, Ctx, with_access
from perilune.sandbox.service.errors import Refused, body_of, refused
from perilune.sandbox.service.programs import Program
from perilune.sandbox.service.streaming import Stream
from perilune.sandbox.states import State
from perilune.sandbox.transfer import normal, put_archive, take_archive

router = APIRouter(dependencies=[Depends(with_access)])
LINES = "application/x-ndjson"

Path = Annotated[str, Query(min_length=1, max_length=4096, description="absolute path in the guest")]


async def awake(ctx: Context, box: str) -> None:
    """Resume a paused sandbox that is to be resumed by its use."""
    record = ctx.record(box)
    if record.state in (State.PAUSED, State.RESUMING) and record.spec.get("auto_resume"):
        await ctx.manager.resume(box)


async def start(ctx: Context, box: str, command: Command) -> Process:
    """Start a program in a sandbox that runs, or is to be resumed."""
    await awake(ctx, box)
    return await ctx.manager.exec(box, command)


# Programs


@router.post("/sandboxes/{sandbox_id}/exec", tags=["guest"], response_model=None)
async def run(ctx: Ctx, sandbox_id: str, body: Exec, request: Request) -> dict[str, Any] | Response:
    """Run a program to its end, or with `stream` a line of JSON for each thing that happens.

    Lines: `{"pid"}` first, `{"stream": 1 | 2, "data": base64}` for what it prints, `{"exitCode", "timedOut"}` or
    `{"error"}` last. A client that goes takes the program along, unless it is detached.
    """
    ctx.record(sandbox_id)
    command = Command(
        body.cmd,
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        stdin=None if body.stdin is None else body.stdin.encode(),
        timeout_s=body.timeout,
        max_output=min(ctx.config.max_output, ctx.config.max_output if body.max_output is None else body.max_output),
        pty=None if body.pty is None else (body.pty.rows, body.pty.cols),
        interactive=body.interactive,
        detach=body.detach,
    )
    process = await start(ctx, sandbox_id, command)
    if body.stream:
        program = ctx.programs.add(sandbox_id, process, command, body.tag)
        return _streamed(program)
    if body.detach or body.interactive:
        ctx.programs.add(sandbox_id, process, command, body.tag, awaited=False)
        return {"pid": process.pid}
    result = await _result(process, request)
    return {
        "exitCode": result.exit_code,
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
        "timedOut": result.timed_out,
        "truncated": result.truncated,
    }


async def _result(process: Process, request: Request) -> Result:
    """Wait for a program's end; a client that goes takes it along."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting, leaving = asyncio.create_task(process.wait()), asyncio.create_task(gone())
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await _kill(process)
        return await waiting
    except BaseException:
        await _kill(process)
        raise
    finally:
        leaving.cancel()


async def _kill(process: Process) -> None:
    with contextlib.suppress(SandboxError):  # its machine may be gone, and it too
        await process.kill()


def _streamed(program: Program) -> Stream:
    heard = False

    async def lines() -> AsyncGenerator[bytes, None]:
        nonlocal heard
        yield _line({"pid": program.process.pid})
        async with contextlib.aclosing(program.listen()) as pieces:
            async for piece in pieces:
                yield _line({"stream": piece.stream, "data": base64.b64encode(piece.data).decode()})
        try:
            result = await program.end()
            yield _line({"exitCode": result.exit_code, "timedOut": result.timed_out})
        except SandboxError as error:
            yield _line({"error": body_of(refused(error))})
        heard = True

    async def closed() -> None:
        if not heard and not program.command.detach:
            await _kill(program.process)

    return Stream(lines(), LINES, closed=closed)


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


@router.get("/sandboxes/{sandbox_id}/exec", tags=["guest"])
async def programs(ctx: Ctx, sandbox_id: str) -> list[dict[str, Any]]:
    """Programs that were started over HTTP and run."""
    ctx.record(sandbox_id)
    return [
        {"pid": one.process.pid, "cmd": one.command.argv, "cwd": one.command.cwd, "tag": one.tag}
        for one in ctx.programs.running(sandbox_id)
    ]


@router.get("/sandboxes/{sandbox_id}/exec/{pid}", tags=["guest"], response_class=Response)
async def listen(ctx: Ctx, sandbox_id: str, pid: int) -> Stream:
    """What a program prints from now on, as `exec` with `stream` says it; who listened before does no more."""
    ctx.record(sandbox_id)
    program = ctx.programs.get(sandbox_id, pid)

    async def lines() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(program.listen()) as pieces:
            async for piece in pieces:
                yield _line({"stream": piece.stream, "data": base64.b64encode(piece.data).decode()})
        result = await program.end()
        yield _line({"exitCode": result.exit_code, "timedOut": result.timed_out})

    return Stream(lines(), LINES)


@router.post("/sandboxes/{sandbox_id}/exec/{pid}/input", status_code=204, tags=["guest"])
async def feed(ctx: Ctx, sandbox_id: str, pid: int, body: Input) -> None:
    """What a program reads on its stdin or terminal; or a new size of the terminal."""
    ctx.record(sandbox_id)
    process = ctx.programs.get(sandbox_id, pid).process
    if body.data:
        await process.write(from_base64(body.data, "data"))
    if body.size is not None:
        await process.resize(body.size.rows, body.size.cols)
    if body.close:
        await process.close_stdin()


@router.post("/sandboxes/{sandbox_id}/exec/{pid}/signal", status_code=204, tags=["guest"])
async def signal(ctx: Ctx, sandbox_id: str, pid: int, body: Signal | None = None) -> None:
    """Signal a program and all that it started."""
    ctx.record(sandbox_id)
    await ctx.programs.get(sandbox_id, pid).process.kill((body or Signal()).signal)


def from_base64(text: str, param: str) -> bytes:
    """Decode, or refuse by the field's name."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise Refused(400, "invalid", f"{param}: not base64 ({error})", param) from None


# Files


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body; refused as soon as it is too large, whatever it said of itself."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise Refused(413, "too_large", f"the body has more than {limit} bytes", "body")
    return bytes(data)


@router.get("/sandboxes/{sandbox_id}/files", tags=["guest"], response_class=Response)
async def read(ctx: Ctx, sandbox_id: str, path: Path) -> Response:
    """A file's bytes."""
    await awake(ctx, sandbox_id)
    data = await ctx.manager.read(sandbox_id, normal(path), ctx.config.max_file)
    return Response(data, media_type="application/octet-stream")


@router.put("/sandboxes/{sandbox_id}/files", status_code=204, tags=["guest"])
async def write(
    ctx: Ctx, sandbox_id: str, request: Request, path: Path, mode: Annotated[str, Query(pattern="^[0-7]{3,4}$")] = "644"
) -> None:
    """Write a file in one piece: the body is its bytes. Its folders are made."""
    await awake(ctx, sandbox_id)
    place = normal(path)
    await ctx.manager.write(sandbox_id, place, await read_body(request, ctx.config.max_file), int(mode, 8))


@router.get("/sandboxes/{sandbox_id}/folder", tags=["guest"], response_class=Response)
async def download(ctx: Ctx, sandbox_id: str, path: Path) -> Response:
    """A folder as a tar archive. What is in it is the guest's word: unpack it with care (`tarfile`'s data filter)."""
    await awake(ctx, sandbox_id)
    data = await take_archive(ctx.manager, sandbox_id, normal(path), ctx.config.max_file)
    return Response(data, media_type="application/x-tar")


@router.put("/sandboxes/{sandbox_id}/folder", status_code=204, tags=["guest"])
async def upload(ctx: Ctx, sandbox_id: str, request: Request, path: Path) -> None:
    """Unpack a tar archive, the body, into a folder, which is made."""
    await awake(ctx, sandbox_id)
    await put_archive(ctx.manager, sandbox_id, normal(path), await read_body(request, ctx.config.max_file))


__all__ = ["awake", "from_base64", "read_body", "router", "start"]
