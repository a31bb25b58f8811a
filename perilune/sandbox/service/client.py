"""A client of a service, with the standard library alone: what the command line speaks through."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from perilune.sandbox.errors import Conflict, NotFound, SandboxError, Unavailable

URL = "http://127.0.0.1:8049"
# Longer than any transition; programs have limits of their own, and their streams none here.
TIMEOUT_S = 180.0
_KINDS: Mapping[int, type[SandboxError]] = {404: NotFound, 409: Conflict, 503: Unavailable}


class Client:
    """url, key: of the service; $PERILUNE_SANDBOX_URL and $PERILUNE_SANDBOX_KEY where none is given."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self.url = url or os.environ.get("PERILUNE_SANDBOX_URL") or URL
        self._key = key or os.environ.get("PERILUNE_SANDBOX_KEY") or ""
        self._place = urlsplit(self.url)
        if self._place.scheme not in ("http", "https") or not self._place.hostname:
            raise ValueError(f"url is {self.url!r}; it must begin with http:// or https:// and a host")

    def _open(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> http.client.HTTPResponse:
        host = self._place.hostname or ""
        if self._place.scheme == "https":
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, self._place.port, timeout=timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, self._place.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._key:
            headers["X-API-Key"] = self._key
        try:
            connection.request(method, self._place.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            why = f"{type(error).__name__}: {error}"
            raise Unavailable(
                f"no service answers at {self.url} ({why}): start one with `perilune sandbox serve`"
            ) from None
        if response.status >= 400:
            raise _error(response)
        return response

    def call(self, method: str, path: str, fields: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """One request; its answer's JSON, or None. Raises the service's error as a `SandboxError`."""
        body = None if fields is None else json.dumps(fields).encode()
        with self._open(method, _with(path, query), body, TIMEOUT_S) as response:
            data = response.read()
        return json.loads(data) if data else None

    def stream(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The lines of a streamed answer as they come."""
        body = None if fields is None else json.dumps(fields).encode()
        with self._open(method, path, body, None) as response:
            for line in response:
                yield json.loads(line)

    def read(self, box: str, path: str) -> bytes:
        """A file of a guest."""
        with self._open("GET", _with(f"/sandboxes/{quote(box)}/files", {"path": path}), None, TIMEOUT_S) as response:
            return response.read()

    def write(self, box: str, path: str, data: bytes) -> None:
        """Write a file of a guest."""
        self._open("PUT", _with(f"/sandboxes/{quote(box)}/files", {"path": path}), data, TIMEOUT_S).close()


def _with(path: str, query: Mapping[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return path + ("?" + urlencode(given) if given else "")


def _error(response: http.client.HTTPResponse) -> SandboxError:
    data = response.read(1 << 20)
    try:
        message = str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        message = data.decode(errors="replace")[:300]
    return _KINDS.get(response.status, SandboxError)(message)


__all__ = ["URL", "Client"]
