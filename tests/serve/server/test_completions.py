"""/v1/completions, /tokenize, /detokenize and /v1/models."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving import tiny_llm, tiny_tokenizer
from test_chat import stream

from perilune.serve.request import Logprob
from perilune.serve.server import reply

PATH = "/v1/completions"


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"prompt": "def main():", "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_text_continues_as_the_engine_says(client: httpx.Client) -> None:
    (direct,) = tiny_llm().generate(["def main():"], max_tokens=8, temperature=0)
    answer = ask(client, temperature=0, return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == (direct.text, direct.tokens)
    assert (choice["prompt_token_ids"], answer["usage"]["prompt_tokens"]) == (direct.prompt, len(direct.prompt))
    chunks = stream(client, PATH, prompt="def main():", max_tokens=8, temperature=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == direct.text
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_token_ids_and_several_prompts(client: httpx.Client) -> None:
    ids = tiny_tokenizer().encode("return 1")
    many = ask(client, prompt=[ids, ids[:3]], temperature=0)["choices"]
    assert [choice["index"] for choice in many] == [0, 1]
    assert many[0]["text"] == ask(client, prompt=ids, temperature=0)["choices"][0]["text"]
    pairs = ask(client, prompt=["a", "b"], n=2, seed=3)["choices"]
    assert len(pairs) == 4


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs_scores_the_prompt(client: httpx.Client, max_tokens: int) -> None:
    prompt = "def main():"
    (direct,) = tiny_llm().generate([prompt], max_tokens=3, temperature=0, prompt_logprobs=2, logprobs=2)
    answer = ask(client, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)
    (choice,), usage = answer["choices"], answer["usage"]
    scores = choice["logprobs"]
    expected = [score.logprob for score in direct.prompt_logprobs + direct.logprobs[:max_tokens]]
    assert scores["token_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    assert len(scores["tokens"]) == len(direct.prompt) + max_tokens == len(scores["text_offset"])
    assert usage["completion_tokens"] == max_tokens
    assert choice["text"].startswith(prompt)


def test_offsets_are_where_tokens_are_in_the_text(client: httpx.Client) -> None:
    """Also of tokens that are part of a character, and of special ones, which are not in the text."""
    prompt = "h\u00e9 \U0001f600 def"
    (choice,) = ask(client, prompt=prompt, echo=True, logprobs=0, max_tokens=3, temperature=0)["choices"]
    scores = choice["logprobs"]
    whole = [
        (at, word) for at, word in zip(scores["text_offset"], scores["tokens"], strict=True) if "\ufffd" not in word
    ]
    assert whole[0] == (0, "[BOS]")
    assert all(choice["text"].startswith(word, at) for at, word in whole[1:])
    assert scores["text_offset"][scores["tokens"].index(" ")] == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_the_cached_tokens_of_several_prompts_are_summed(client: httpx.Client, streamed: bool) -> None:
    """As their prompt tokens are; of several answers to one prompt those of the best."""
    prompts = [f"{i} prompts of one request, {streamed} " * 20 for i in range(2)]
    for prompt in prompts:  # the second leaves a checkpoint where the first parts from it
        ask(client, prompt=prompt, max_tokens=1)
        ask(client, prompt=prompt, max_tokens=1)
    each = [ask(client, prompt=prompt, max_tokens=1)["usage"] for prompt in prompts]
    fields = {"prompt": prompts, "n": 2, "max_tokens": 1}
    if streamed:
        usage = stream(client, PATH, **fields, stream_options={"include_usage": True})[-1]["usage"]
    else:
        usage = ask(client, **fields)["usage"]
    assert usage["prompt_tokens"] == sum(one["prompt_tokens"] for one in each)
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in each]
    assert min(cached) > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == sum(cached)


def test_the_likeliest_of_tokens_that_show_the_same_text_is_listed() -> None:
    """OpenAI's list is by text: bytes that are no text of their own all show as U+FFFD. The token itself is in it."""
    words = tiny_tokenizer()
    parts = [id for id in range(words.vocab_size) if words.decode([id]) == "\ufffd"]
    (a,) = words.encode("a")
    score = Logprob(a, -4.0, ((parts[0], -1.0), (parts[1], -2.0)))
    (listed,) = reply.text_logprobs(words, [score], [a], reply.Offsets(words))["top_logprobs"]
    assert listed == {"\ufffd": -1.0, "a": -4.0}
    assert [*listed] == ["\ufffd", "a"]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_where_none_are_asked_for(client: httpx.Client, stream: bool) -> None:
    """Even where the model would end at once."""
    body = {"prompt": "a", "max_tokens": 0, "logit_bias": {str(tiny_tokenizer().eos_id): 100}, "stream": stream}
    response = client.post(
        "/v1/completions", json=body | ({"stream_options": {"include_usage": True}} if stream else {})
    )
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if "[DONE]" not in line]
    chunks = [json.loads(line) for line in lines if line]
    (choice,) = [choice for chunk in chunks for choice in chunk["choices"]]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_a_stop_text_and_a_stop_token(client: httpx.Client) -> None:
    token = tiny_tokenizer().encode("a")[0]
    bias = {str(token): 100.0}
    choice = ask(client, logit_bias=bias, stop="aa", max_tokens=50)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "aa")
    answer = ask(client, logit_bias=bias, stop_token_ids=[token], max_tokens=50)
    assert answer["usage"]["completion_tokens"] == 1


def test_wrong_prompts_are_named(client: httpx.Client) -> None:
    for prompt, param in (
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", 3], "prompt[1]"),
        ([1, 10**6], "prompt"),
        ([True], "prompt"),
        ([False], "prompt"),
        ([1, False], "prompt"),
        ([[1, True]], "prompt[0]"),
        ({"a": 1}, "prompt"),
        (["a"] * 257, "prompt"),
    ):
        response = client.post(PATH, json={"prompt": prompt})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), prompt
    for field, value in (("suffix", "x"), ("best_of", 2), ("logprobs", 21)):
        response = client.post(PATH, json={"prompt": "a", field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_tokens_of_a_text_and_back(client: httpx.Client) -> None:
    words = tiny_tokenizer()
    answer = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["tokens"] == [words.bos_id, *words.encode("héllo")]
    assert (answer["count"], len(answer["token_strs"])) == (len(answer["tokens"]), len(answer["tokens"]))
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == "[BOS]héllo"
    messages = [{"role": "user", "content": "q"}]
    chat = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    rendered = client.post("/v1/chat/completions/render", json={"messages": messages}).json()["prompt_token_ids"]
    assert chat == rendered
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [10**6]}).json()["error"]["param"] == "tokens"


def test_models(client: httpx.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["max_model_len"] > 1000
    assert client.get("/v1/models/tiny").json() == model
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/version").json()["version"]
