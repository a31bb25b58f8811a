"""Bodies of the OpenAI-shaped requests. Types and ranges are checked here, meaning where a request is prepared.

Fields are OpenAI's, or vLLM's where OpenAI has none. Fields that nobody here knows are ignored. Of a list or table the
first wrong item ends the reading: a body has room for millions, each an error that others would wait for.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Object = dict[str, Any]
_FIRST = Field(fail_fast=True)
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], _FIRST]
Bias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], _FIRST]
Texts = Annotated[list[str], _FIRST]


class Strict(BaseModel):
    """No number from a text, no infinity."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Strict):
    """What chat and completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    logit_bias: Bias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None


class Chat(Sampling):
    """/v1/chat/completions. thinking: a switch, or {"type": "enabled" | "disabled", "effort": ..., "keep": "all"}."""

    messages: Any
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    thinking: Any = None
    thinking_effort: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: Object | None = None


class Completion(Sampling):
    """/v1/completions. prompt: a text, texts, token ids, or lists of them."""

    prompt: Any
    suffix: str | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class Tokenize(Strict):
    """/tokenize: a `prompt`, or `messages` with what belongs to them."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    thinking: Any = None
    thinking_effort: Any = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class Detokenize(Strict):
    """/detokenize."""

    model: str | None = None
    tokens: Ids


__all__ = ["Chat", "Completion", "Detokenize", "Object", "Sampling", "StreamOptions", "Strict", "Texts", "Tokenize"]
