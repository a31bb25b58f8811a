"""Secrets of sandboxes, derived from one secret of the service."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path


class Tokens:
    """The secrets under one root directory. path: of the secret that all come from; made where it is not there."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.touch(mode=0o600)
            path.write_bytes(secrets.token_bytes(32))
        self._seed = path.read_bytes()

    def of(self, box: str, kind: str) -> str:
        """The one of a sandbox for a purpose."""
        return hmac.new(self._seed, f"{kind}:{box}".encode(), hashlib.sha256).hexdigest()

    def check(self, box: str, kind: str, token: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self.of(box, kind).encode(), token.encode())


__all__ = ["Tokens"]
