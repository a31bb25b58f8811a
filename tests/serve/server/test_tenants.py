"""Keys, whose cache is whose, and limits."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import httpx
import pytest
from keys import KEYS
from serving import serving
from starlette.requests import Request

from perilune.serve.server import ServerConfig
from perilune.serve.server.tenants import Tenants

CHAT = "/v1/chat/completions"


def body(seed: int, length: int = 60) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{seed} tell me " * length}], "max_tokens": 2}


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def cached(url: str, key: str, seed: int, **more: Any) -> int:
    response = httpx.post(f"{url}{CHAT}", json={**body(seed), **more}, headers=headers(key), timeout=60)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_without_a_key_there_is_no_answer(keyed: str) -> None:
    for given in ({}, headers("wrong"), {"authorization": KEYS[0]}, {"authorization": f"Basic {KEYS[0]}"}):
        for response in (
            httpx.post(f"{keyed}{CHAT}", json=body(0), headers=given, timeout=60),
            httpx.get(f"{keyed}/v1/models", headers=given, timeout=60),
            httpx.get(f"{keyed}/ui/state", headers=given, timeout=60),
        ):
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{keyed}/v1/models", headers={"x-api-key": KEYS[1]}, timeout=60).status_code == 200
    assert [m["id"] for m in httpx.get(f"{keyed}/v1/models", headers=headers(KEYS[0]), timeout=60).json()["data"]] == [
        "tiny",
        "also-tiny",
    ]
    assert httpx.get(f"{keyed}/health", timeout=60).status_code == 200
    assert httpx.get(f"{keyed}/ui/", timeout=60).status_code == 200


def test_a_tenant_never_hits_what_another_one_cached(keyed: str) -> None:
    alice, bob = KEYS
    assert cached(keyed, alice, 1) == 0
    assert cached(keyed, alice, 1) > 128
    assert cached(keyed, bob, 1) == 0
    assert cached(keyed, bob, 1) > 128
    assert cached(keyed, alice, 1, cache_salt="mine") == 0
    assert cached(keyed, alice, 1, cache_salt="mine") > 128
    assert cached(keyed, alice, 1, cache_salt="min") == 0


def test_a_tenant_sees_its_own_prefixes_only(keyed: str) -> None:
    alice, bob = KEYS
    cached(keyed, alice, 2)
    seen = [httpx.get(f"{keyed}/ui/state", headers=headers(key), timeout=60).json() for key in (alice, bob)]
    depths = [sum(node["end"] - node["start"] for node in each["nodes"]) for each in seen]
    cached(keyed, alice, 3)
    after = [httpx.get(f"{keyed}/ui/state", headers=headers(key), timeout=60).json() for key in (alice, bob)]
    grown = [sum(node["end"] - node["start"] for node in each["nodes"]) for each in after]
    assert grown[0] > depths[0]
    assert grown[1] == depths[1]


def test_salts_cannot_be_spelled_by_another_tenant() -> None:
    tenants = [tenant for _, tenant in Tenants(ServerConfig(api_keys=("a", "b")))._known]
    assert tenants[0].salt != tenants[1].salt
    extras = [None, "", "x", "x/1/x", f"/{tenants[1].salt}"]
    salts = [tenant.salted(extra) for tenant in tenants for extra in extras]
    assert len(set(salts)) == len(salts) - 2  # None and "" are the same
    assert not any(tenants[0].owns(salt) for salt in salts[len(extras) :])
    assert all(tenants[0].owns(salt) for salt in salts[: len(extras)])


@pytest.mark.parametrize("key", ["clé-à", "Å", "ключ", "a key", "=="])
def test_a_key_may_hold_any_text(key: str) -> None:
    """Headers are bytes: of UTF-8's, some look like spaces of Latin-1."""
    tenants = Tenants(ServerConfig(api_keys=(key,)))
    for header in ((b"authorization", b"Bearer  " + key.encode() + b"\t"), (b"x-api-key", key.encode())):
        request = Request({"type": "http", "headers": [header]})
        assert tenants.who(request) == tenants._known[0][1]


def test_a_body_that_is_too_large(keyed: str) -> None:
    response = httpx.post(f"{keyed}{CHAT}", json=body(0, 10_000), headers=headers(KEYS[0]), timeout=60)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize("stream", [False, True])
def test_more_answers_than_can_ever_run_are_no_reason_to_try_again(keyed: str, stream: bool) -> None:
    fields = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "stream": stream}
    response = httpx.post(f"{keyed}/v1/completions", json=fields, headers=headers(KEYS[0]), timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_too_many_requests_of_one_key(keyed: str) -> None:
    """Three run, the fourth is refused, and another key is not concerned."""
    running = threading.Barrier(4, timeout=30)

    def occupy() -> None:
        fields = {**body(9, 1), "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{keyed}{CHAT}", json=fields, headers=headers(KEYS[0]), timeout=60) as response:
            chunks = response.iter_bytes()
            next(chunks)
            running.wait()
            done.wait(30)

    done = threading.Event()
    threads = [threading.Thread(target=occupy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        running.wait()
        response = httpx.post(f"{keyed}{CHAT}", json=body(9, 1), headers=headers(KEYS[0]), timeout=60)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert httpx.post(f"{keyed}{CHAT}", json=body(9, 1), headers=headers(KEYS[1]), timeout=60).status_code == 200
    finally:
        done.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.slow
def test_the_time_of_a_foreign_hit_is_that_of_a_miss() -> None:
    """Bob cannot tell from the time whether Alice has asked the same before.

    Thirty rounds in one run, in random order within a round. A permutation test of the medians: what Alice cached and
    what nobody cached cannot be told apart by Bob (p > 0.01), while Alice's own hit can (p < 0.001: the test would see
    a difference of that kind).
    """
    alice, bob = KEYS
    draw = random.Random(0)
    config = ServerConfig(model_names=("tiny",), api_keys=KEYS, drain_seconds=2)
    times: dict[str, list[float]] = {"hit": [], "foreign": [], "miss": []}
    with serving(config, arena_bytes=200_000_000) as url, httpx.Client(base_url=url, timeout=60) as client:

        def timed(key: str, seed: int) -> float:
            begin = time.perf_counter()
            fields = {**body(seed, 120), "max_tokens": 1}
            assert client.post(CHAT, json=fields, headers=headers(key)).status_code == 200
            return time.perf_counter() - begin

        for seed in range(1000, 1030):  # as many digits for all
            timed(alice, seed)
            cases = [("hit", alice, seed), ("foreign", bob, seed), ("miss", bob, seed + 1000)]
            draw.shuffle(cases)
            for name, key, number in cases:
                times[name].append(timed(key, number))

    def median(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    def p_value(one: list[float], other: list[float]) -> float:
        seen, both, larger = abs(median(one) - median(other)), one + other, 0
        for _ in range(2000):
            draw.shuffle(both)
            larger += abs(median(both[: len(one)]) - median(both[len(one) :])) >= seen
        return larger / 2000

    found = p_value(times["foreign"], times["miss"]), p_value(times["hit"], times["miss"])
    print({name: round(median(values) * 1e3, 1) for name, values in times.items()}, found)
    assert found[0] > 0.01
    assert found[1] < 0.001
