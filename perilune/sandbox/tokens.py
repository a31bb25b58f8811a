"""Secrets of sandboxes, derived from one secret of the service."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from perilune.sandbox.errors import SandboxError

_BYTES = 32


class Tokens:
    """The secrets under one root directory. path: of the secret that all come from; made where it is not there.

    Raises `SandboxError` if it is not whole: what would be derived of it could be guessed.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_BYTES))
                file.flush()
                os.fsync(file.fileno())
            new.rename(path)
        self._seed = path.read_bytes()
        if len(self._seed) != _BYTES:
            raise SandboxError(
                f"{path} has {len(self._seed)} bytes; it must have {_BYTES}: remove it, every token is another one then"
            )

    def of(self, box: str, kind: str) -> str:
        """The one of a sandbox for a purpose."""
        return hmac.new(self._seed, f"{kind}:{box}".encode(), hashlib.sha256).hexdigest()

    def check(self, box: str, kind: str, token: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self.of(box, kind).encode(), token.encode())


__all__ = ["Tokens"]
