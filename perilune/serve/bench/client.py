"""One streamed request to an OpenAI-compatible server, and its times."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2 as httpx

from perilune.errors import Error
from perilune.serve.bench.workload import WORDS, Item


@dataclass(frozen=True)
class Target:
    """Where to send: url is the server's base ("http://127.0.0.1:8000", with or without /v1).

    stop_at_eos: let the model end its answers; else `ignore_eos` asks for answers of full length.
    """

    url: str
    model: str
    endpoint: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    stop_at_eos: bool = False

    @property
    def base(self) -> str:
        """The base with /v1."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else url + "/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def path(self) -> str:
        return self.base + ("/chat/completions" if self.endpoint == "chat" else "/completions")

    def body(self, prompt: str, output: int, stream: bool = True) -> dict[str, Any]:
        """The JSON of a request."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": output, "temperature": 1.0, "stream": stream}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            body["stream_options"] = {"include_usage": True}
        if not self.stop_at_eos:
            body["ignore_eos"] = True
        return body


@dataclass
class Record:
    """Times in seconds after the start of the load. planned: when it was to be sent; first: first text; last: the end.

    gaps: between two pieces of text, which hold one token or several. Token counts are the server's; output_tokens is
    the number of pieces where it counts none.
    """

    planned: float
    sent: float = 0.0
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """From the planned time: a client that is late must not make a server look fast."""
        return (self.last if self.first is None else self.first) - self.planned

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there was only one."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)


def open_client(target: Target, timeout: float) -> httpx.AsyncClient:
    """A client without a limit of connections: an open loop never waits for a free one."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(headers=target.headers, timeout=timeout, limits=limits, trust_env=False)


async def find_model(client: httpx.AsyncClient, target: Target) -> str:
    """The first model that the server names. Raises Error where it cannot be asked."""
    try:
        answer = await client.get(target.base + "/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise Error(f"{target.base}/models names no model: {error}; is the server running, the key right?") from None


async def words_per_token(client: httpx.AsyncClient, target: Target, words: int = 256) -> float:
    """How many of our words are one token of the server, from the prompt tokens that it counts.

    Two lengths, so that what a chat template adds does not count. Raises Error for a server that answers no request.
    """
    counts = []
    for number, length in enumerate((words, 3 * words)):
        text = " ".join(random.Random(f"words {number}").choices(WORDS, k=length))
        try:
            answer = await client.post(target.path, json=target.body(text, 1, stream=False))
        except httpx.HTTPError as error:
            raise Error(f"{target.path} does not answer: {error}") from None
        if answer.status_code != 200:
            raise Error(f"{target.path} answers {answer.status_code}: {answer.text[:300]}")
        try:
            counts.append(int(answer.json()["usage"]["prompt_tokens"]))
        except (ValueError, KeyError, TypeError):
            return 1.0
    return 2 * words / max(1, counts[1] - counts[0])


async def measure(client: httpx.AsyncClient, target: Target, item: Item, begin: float, planned: float) -> Record:
    """Send one item now; whatever goes wrong is in `Record.error`. begin: of the load, by time.perf_counter()."""
    record = Record(planned, sent=time.perf_counter() - begin)
    pieces, last = 0, None
    try:
        async with client.stream("POST", target.path, json=target.body(item.prompt, item.output)) as answer:
            if answer.status_code != 200:
                await answer.aread()
                record.error = f"status {answer.status_code}: {answer.text[:200]}"
                return record
            async for line in lines(answer.aiter_bytes()):
                if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                    continue
                chunk = json.loads(data)
                if chunk.get("error"):
                    record.error = str(chunk["error"])[:200]
                    return record
                _count(record, chunk.get("usage") or {})
                if not _says_something(chunk):
                    continue
                now = time.perf_counter() - begin
                pieces += 1
                if last is None:
                    record.first = now
                else:
                    record.gaps.append(now - last)
                last = now
    except (httpx.HTTPError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
    finally:
        record.last = time.perf_counter() - begin
    record.output_tokens = record.output_tokens or pieces
    if record.error is None and not record.output_tokens:
        record.error = "an answer without a token"
    return record


async def lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Lines of an event stream. httpx's `aiter_lines` also ends them at U+2028 and its like, which JSON may hold."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")


def _count(record: Record, usage: dict[str, Any]) -> None:
    record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens
    record.output_tokens = usage.get("completion_tokens") or record.output_tokens
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or record.cached_tokens


def _says_something(chunk: dict[str, Any]) -> bool:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            return True
    return False


__all__ = ["Record", "Target", "find_model", "lines", "measure", "open_client", "words_per_token"]
