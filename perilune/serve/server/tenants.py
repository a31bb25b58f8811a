"""Who asks: an API key is a tenant, whose cache no other tenant can see and who may run so many requests at once."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

from starlette.requests import Request

from perilune.serve.server.config import ServerConfig
from perilune.serve.server.errors import ApiError


@dataclass(frozen=True)
class Tenant:
    """name: for logs, tells nothing of the key. salt: part of the name of every prefix of this tenant."""

    name: str
    salt: str

    def salted(self, extra: str | None) -> str:
        """The salt of one request; extra: what the client adds to part its cache further."""
        return self.salt if not extra else f"{self.salt}/{len(extra)}/{extra}"

    def owns(self, salt: str) -> bool:
        """Whether a prefix of this salt is of this tenant; without keys everybody is one tenant."""
        return not self.salt or salt == self.salt or salt.startswith(f"{self.salt}/")


OPEN = Tenant("open", "")


class Tenants:
    """Keys and how many requests each has on its way."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._known = [(key.encode(), _tenant(key)) for key in config.api_keys]
        self._running: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Requests on their way."""
        return self._running.total()

    def who(self, request: Request) -> Tenant:
        """The tenant of the request's key, sent as `Authorization: Bearer` or `x-api-key`. Raises ApiError, 401."""
        if not self._known:
            return OPEN
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = bearer if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        # Headers are bytes: latin-1 gives them back. Every key is compared, so that time tells nothing.
        found = [
            tenant for key, tenant in self._known if hmac.compare_digest(key, given.strip(" \t").encode("latin-1"))
        ]
        if not found:
            raise ApiError(401, "the API key is missing or wrong", "Authorization", {"WWW-Authenticate": "Bearer"})
        return found[0]

    @contextmanager
    def running_for(self, tenant: Tenant, requests: int) -> Iterator[None]:
        """Count requests as on their way. Raises ApiError: 429 where they are too many now, 400 where always."""
        config = self.config
        if requests > (most := min(config.max_running, config.max_running_per_key)):
            raise ApiError(400, f"n and the number of prompts ask for {requests} answers; allowed: up to {most}", "n")
        if self._running[tenant.name] + requests > config.max_running_per_key:
            raise _busy(
                f"{self._running[tenant.name]} requests of this key are on their way", config.max_running_per_key
            )
        if self.running + requests > config.max_running:
            raise _busy(f"{self.running} requests are on their way", config.max_running)
        self._running[tenant.name] += requests
        try:
            yield
        finally:
            self._running[tenant.name] -= requests


def _busy(what: str, allowed: int) -> ApiError:
    return ApiError(429, f"{what}; allowed: {allowed}. Try again later", None, {"Retry-After": "1"})


def _tenant(key: str) -> Tenant:
    digest = blake2b(key.encode(), person=b"perilune-tenant").hexdigest()
    return Tenant(digest[:12], digest[12:76])


__all__ = ["OPEN", "Tenant", "Tenants"]
