"""Two engines in processes of their own behind one server: the same answers, one picture, one end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving import chat_model, tiny_llm, tiny_tokenizer
from test_chat import TOOL, ask, joined, stream
from test_life import metrics

from perilune.model import save
from perilune.serve import EngineConfig
from perilune.serve.replicas import Replicas
from perilune.serve.server import ServerConfig, build_app
from perilune.serve.server.run import running


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save(chat_model(), folder)
    tiny_tokenizer().save(folder)
    engines = Replicas(folder, EngineConfig(20_000_000, slots=8, token_budget=1024), 2)
    app = build_app(ServerConfig(model_names=("tiny",), drain_seconds=5), engines)
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
    assert [process.poll() is not None for process in engines._processes] == [True, True]


def test_answers_are_those_of_one_engine(several: httpx.Client) -> None:
    (direct,) = tiny_llm().generate(["def main():"], max_tokens=8, temperature=0)
    body = {"prompt": "def main():", "max_tokens": 8, "temperature": 0}
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: several.post("/v1/completions", json=body).json(), range(8))]
    assert {answer["choices"][0]["text"] for answer in answers} == {direct.text}
    assert metrics(several)["vllm:generation_tokens_total"] == 64


@pytest.mark.parametrize("most", [200, 1000])
def test_a_grammar_rules_in_the_other_process(several: httpx.Client, most: int) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": most, "thinking": False, "seed": 5}
    choice = ask(several, **fields)["choices"][0]
    got = joined(stream(several, **fields))
    for call in choice["message"]["tool_calls"]:
        assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
    assert got["finish"] == choice["finish_reason"]
    if most == 200:  # the text before the call goes on until it is ended for it
        assert choice["finish_reason"] == "length"


def test_health_pictures_and_errors(several: httpx.Client) -> None:
    assert several.get("/health").json() == {"status": "ok"}
    assert several.get("/ui/state").json()["tiers"]
    response = several.post("/v1/completions", json={"prompt": "a", "max_tokens": 10**8})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    bad = {"prompt": "a", "structured_outputs": {"regex": "["}}
    assert several.post("/v1/completions", json=bad).status_code == 400
