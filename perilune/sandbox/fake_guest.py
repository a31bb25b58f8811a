"""The guest of the fake driver: files, a clock, a random generator and a shell of a dozen words, in memory."""

from __future__ import annotations

import asyncio
import random
import shlex
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

# Called with (stream, bytes); waits while the reader is full.
Sink = Callable[[int, bytes], Awaitable[None]]


@dataclass
class Guest:
    """All that a capture of the fake driver keeps. clock: seconds that the guest's time is behind the host's."""

    hostname: str
    files: dict[str, bytes] = field(default_factory=dict)
    detached: list[str] = field(default_factory=list)
    seed: int = 0
    clock: float = 0.0

    def state(self) -> dict[str, object]:
        """As plain JSON, with the time at which it was taken."""
        files = {path: data.hex() for path, data in self.files.items()}
        return {
            "hostname": self.hostname,
            "files": files,
            "detached": self.detached,
            "seed": self.seed,
            "time": time.time() - self.clock,
        }

    @classmethod
    def restored(cls, state: dict[str, object]) -> Guest:
        """The guest as it was: its clock stands behind by the time that has passed since."""
        files = {str(path): bytes.fromhex(data) for path, data in state["files"].items()}  # type: ignore[attr-defined]
        return cls(
            hostname=str(state["hostname"]),
            files=files,
            detached=list(state["detached"]),  # type: ignore[call-overload]
            seed=int(state["seed"]),  # type: ignore[call-overload]
            clock=time.time() - float(state["time"]),  # type: ignore[arg-type]
        )

    def random_uuid(self) -> str:
        """The next identifier of the guest's generator, which a copied guest repeats until it is refreshed."""
        generator = random.Random(self.seed)
        self.seed = generator.getrandbits(63)
        return str(uuid.UUID(int=generator.getrandbits(128), version=4))

    async def shell(self, script: str, stdin: bytes, sink: Sink) -> int:
        """Run commands joined by `;`; returns the exit code of the last one."""
        code = 0
        for line in script.split(";"):
            words = shlex.split(line)
            if not words:
                continue
            if words[0] == "exit":
                return int(words[1]) if len(words) > 1 else code
            code = await self._command(words, stdin, sink)
        return code

    async def _command(self, words: list[str], stdin: bytes, sink: Sink) -> int:
        target = None
        append = ">>" in words
        for sign in (">>", ">"):
            if sign in words:
                at = words.index(sign)
                words, target = words[:at], words[at + 1]
        stream = 2 if ">&2" in words else 1
        words = [word for word in words if word != ">&2"]
        if words[0] == "sleep":
            await asyncio.sleep(float(words[1]))
            return 0
        if words[0] == "yes":
            while True:
                await sink(1, b"y\n" * 2048)
                await asyncio.sleep(0)
        code, text = self._text(words, stdin)
        if target is None:
            await sink(stream if code == 0 else 2, text)
        else:
            self.files[target] = (self.files.get(target, b"") if append else b"") + text
        return code

    def _text(self, words: list[str], stdin: bytes) -> tuple[int, bytes]:
        name, *rest = words
        match name:
            case "true" | "sync" | ":":
                return 0, b""
            case "false":
                return 1, b""
            case "echo":
                return 0, (" ".join(rest) + "\n").encode()
            case "hostname":
                return 0, f"{self.hostname}\n".encode()
            case "date":
                return 0, f"{int(time.time() - self.clock)}\n".encode()
            case "cat" if not rest:
                return 0, stdin
            case "cat" if rest[0] == "/proc/sys/kernel/random/uuid":
                return 0, f"{self.random_uuid()}\n".encode()
            case "cat" if rest[0] in self.files:
                return 0, self.files[rest[0]]
            case "cat":
                return 1, f"cat: can't open '{rest[0]}': No such file or directory\n".encode()
            case "rm":
                return (0, b"") if self.files.pop(rest[-1], None) is not None else (1, b"rm: no such file\n")
        return 127, f"sh: {name}: not found\n".encode()


__all__ = ["Guest", "Sink"]
