"""What a step's tokens become: part of the answer, as far as drafts were right and nothing ends it."""

from __future__ import annotations

from perilune.serve.request import Output
from perilune.serve.work import Chunk, Result


def commit(chunk: Chunk, result: Result, output: Output, version: int) -> tuple[int, str | None]:
    """Append sampled tokens to the request and to the output: how many, and why the answer ends with the last.

    version: of the weights that made them. A stop callback that raises is the result's error.
    """
    request, params = chunk.request, chunk.request.params
    drafts = chunk.tokens[len(chunk.tokens) - chunk.drafts :]
    taken, reason = 0, None
    for i, token in enumerate(result.tokens):
        if i and drafts[i - 1] != result.tokens[i - 1]:
            break
        request.tokens.append(token)
        taken += 1
        made = request.length - request.prompt
        try:
            stop = request.stop is not None and request.stop(token)
        except Exception as error:  # the client's code: its request alone ends
            result.error = f"stop failed: {error!r}"
            break
        if stop or (token in params.stop_ids and made >= params.min_tokens):
            reason = "stop"
        elif made >= params.max_tokens:
            reason = "length"
        if reason is not None:
            break
    output.tokens = result.tokens[:taken]
    output.versions = [version] * taken
    if result.logprobs is not None:
        output.logprobs = result.logprobs[:taken]
    return taken, reason


__all__ = ["commit"]
