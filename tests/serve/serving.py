"""A real server on loopback with a tiny random Kimi-K3 model, for tests of what clients see."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from models import tiny_config

from perilune import Transformer
from perilune.chat import Tokenizer, train_bpe
from perilune.model import initialize
from perilune.serve import LLM, EngineConfig
from perilune.serve.server import ServerConfig, build_app
from perilune.serve.server.run import running

TEXT = Path(__file__).read_text(encoding="utf-8")


@lru_cache
def tiny_tokenizer() -> Tokenizer:
    """Bytes, a few merges, Kimi-K3's special tokens."""
    return train_bpe([TEXT], 400)


@lru_cache
def chat_model(seed: int = 0) -> Transformer:
    """Two KDA layers and an MLA layer of Kimi-K3's kind over the tiny vocabulary; random, so it babbles."""
    base, words = tiny_config("kimi_k3"), tiny_tokenizer()
    config = dataclasses.replace(
        base,
        vocab_size=words.vocab_size,
        num_layers=3,
        dense_layers=2,
        kda=dataclasses.replace(base.kda, layers=(0, 1)),
        mla=dataclasses.replace(base.mla, layers=(2,)),
        max_position_embeddings=32_768,
        bos_token_id=words.bos_id,
        eos_token_id=words.eos_id,
    )
    return initialize(Transformer(config), seed)


def tiny_llm(**options: object) -> LLM:
    """An LLM of the tiny model; options of `EngineConfig`."""
    config = EngineConfig(**{"arena_bytes": 20_000_000, "slots": 8, "token_budget": 1024} | options)
    return LLM(chat_model(), config, tokenizer=tiny_tokenizer())


def towards_ends() -> dict[str, float]:
    """A logit bias for markers and for what ends values of JSON: a random model babbles for less long."""
    words = tiny_tokenizer()
    ends = [words.specials[name] for name in ("<|open|>", "<|close|>")] + [words.encode(text)[0] for text in '"]}']
    return {str(token): 3.0 for token in ends}


@contextmanager
def serving(config: ServerConfig | None = None, **options: object) -> Iterator[str]:
    """The address of a running server; options of `EngineConfig`."""
    app = build_app(config or ServerConfig(model_names=("tiny",), drain_seconds=2), tiny_llm(**options))
    with running(app) as url:
        yield url


__all__ = ["chat_model", "serving", "tiny_llm", "tiny_tokenizer", "towards_ends"]
