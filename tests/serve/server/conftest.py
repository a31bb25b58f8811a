"""Servers that several tests share: starting one takes a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from keys import KEYS
from serving import serving

from perilune.serve.server import ServerConfig


@pytest.fixture(scope="session")
def client() -> Iterator[httpx.Client]:
    """A server without keys."""
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def keyed() -> Iterator[str]:
    """The address of a server with two keys and small limits."""
    config = ServerConfig(
        model_names=("tiny", "also-tiny"), api_keys=KEYS, max_body_bytes=20_000, max_running_per_key=3, drain_seconds=2
    )
    with serving(config) as url:
        yield url
