"""Text in and out: one call, streams, stop texts, requests side by side; with a tokenizer learned on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import alone, prompt, small_model

from perilune import Error, ModelConfig, Transformer
from perilune.chat import train_bpe
from perilune.model import initialize, save
from perilune.serve import LLM, EngineConfig, Params

CONFIG = EngineConfig(8_000_000, slots=4, token_budget=256, exact=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano shape with random weights and a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("nano")
    save(initialize(Transformer(ModelConfig.from_pretrained("nano")), seed=3), folder)
    train_bpe(["def main():\n    return 1\n" * 40], 2048).save(folder)
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, CONFIG)


def test_texts_become_texts(llm: LLM) -> None:
    assert llm.tokenizer is not None
    texts = ["def main():", "return 1", ""]
    answers = llm.generate(texts, max_tokens=12, temperature=0)
    for text, answer in zip(texts, answers, strict=True):
        begin = [] if llm.tokenizer.bos_id is None else [llm.tokenizer.bos_id]
        assert answer.prompt == begin + llm.tokenizer.encode(text)
        assert answer.tokens == alone(llm.engine.model, answer.prompt, 12)
        assert answer.text == llm.tokenizer.decode(answer.tokens, skip_special=True)
        assert answer.finished == "length"


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate(["def main():"], max_tokens=20, temperature=0)
    pieces = list(llm.stream("def main():", max_tokens=20, temperature=0))
    assert "".join(text for text, _ in pieces) == whole.text
    assert [token for _, output in pieces for token in output.tokens] == whole.tokens
    assert [output.finished for _, output in pieces[-2:]] == [None, "length"]


def test_a_stop_text_ends_the_answer_wherever_tokens_cut_it(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    plain = torch.zeros(2048, dtype=torch.bool)
    plain[[id for id in range(2048) if not tokenizer.is_special(id) and tokenizer.token_bytes(id).isalnum()]] = True
    options = {"max_tokens": 40, "temperature": 0, "mask": lambda tokens: plain}
    (free,) = llm.generate(["def main():"], **options)
    text = free.text
    assert len(text) >= 40
    stop = text[11:14]
    cut = text.index(stop)
    (answer,) = llm.generate(["def main():"], **options, stop=["never this", stop])
    assert (answer.text, answer.finished) == (text[:cut], "stop")
    shown = ""
    for piece, _ in llm.stream("def main():", **options, stop=[stop]):
        shown += piece
        assert text[:cut].startswith(shown)  # nothing is ever taken back
    assert shown == text[:cut]
    assert len(answer.tokens) < 40
    assert answer.stop == stop
    assert free.stop is None


def test_the_end_of_text_token_ends_a_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    bias = {llm.tokenizer.eos_id: 1e4}
    (answer,) = llm.generate(["def"], max_tokens=5, temperature=0, logit_bias=bias)
    assert (answer.tokens, answer.text, answer.finished) == ([llm.tokenizer.eos_id], "", "stop")
    assert answer.stop == llm.tokenizer.eos_id


def test_a_closed_stream_and_other_requests_live_side_by_side(llm: LLM) -> None:
    other = llm.add(prompt(30, 0), Params(max_tokens=60, temperature=0))
    stream = llm.stream("def main():", max_tokens=100, temperature=0)
    for _ in range(3):
        next(stream)
    stream.close()
    (answer,) = llm.generate([prompt(20, 1)], max_tokens=4, temperature=0)
    assert answer.tokens == alone(llm.engine.model, prompt(20, 1), 4)
    tokens: list[int] = []
    finished = []
    while not finished:
        pieces, finished = llm.step()
        tokens += [token for _, output in pieces for token in output.tokens if output.id == other]
    assert finished[0].id == other
    assert tokens == finished[0].tokens == alone(llm.engine.model, prompt(30, 0), 60)
    assert llm.engine.cache.leases == 0


class Wrong:
    """Drafts that are never right."""

    def propose(self, requests, width):  # type: ignore[no-untyped-def]
        return [[(request.tokens[-1] + 1) % 64] * width for request in requests]


def test_routing_of_every_computed_token() -> None:
    model = small_model()
    for exact, drafts in ((True, 0), (False, 0), (True, 5)):
        llm = LLM(model, EngineConfig(2_000_000, slots=2, exact=exact, token_budget=66, drafts=drafts))
        if drafts:
            llm.engine.speculation.drafter = Wrong()
        start = prompt(100, 0)
        (answer,) = llm.generate([start], max_tokens=6, temperature=0, routing=True)
        from perilune import Sequences
        from perilune.model import Stats

        stats = Stats()
        with torch.inference_mode():
            model.hidden(torch.tensor([*start, *answer.tokens]), Sequences.from_lengths([106]), stats=stats)
        expected = torch.stack([routing.ids_TJ for _, routing in sorted(stats.routing.items())], 1)
        assert answer.routing is not None
        assert answer.computed_from == 0
        assert torch.equal(answer.routing, expected[:105])


def test_errors(llm: LLM, checkpoint: Path) -> None:
    with pytest.raises(Error, match="prompts is one text"):
        llm.generate("def", max_tokens=1)
    with pytest.raises(Error, match="params and max_tokens are both given"):
        llm.generate(["def"], Params(), max_tokens=1)
    with pytest.raises(Error, match="params holds 1 items; must be 2"):
        llm.generate(["def", "x"], [Params()])
    with pytest.raises(Error, match="a text prompt needs a tokenizer"):
        LLM(small_model(), EngineConfig(10**6)).generate(["def"])
    with pytest.raises(Error, match="tokens holds id 9999"):
        llm.generate([[1, 2], [9999]], max_tokens=1)
    assert [output.finished for output in llm.engine.step()] == ["abort"]
    llm.engine.pause()
    with pytest.raises(Error, match="is paused"):
        llm.generate(["def"], max_tokens=1)
    llm.engine.resume()
    with pytest.raises(Error, match="one page needs"):
        LLM(checkpoint, EngineConfig(10))
