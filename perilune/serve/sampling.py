"""The tokens of a step: logits shaped by each request's parameters, drawn with a number that belongs to the position.

The random number of a token is a hash of its request's seed and its position. So a request draws the same tokens in
whatever batch it runs, after preemption, and with speculation: a draft is right if it is the token that would have
been drawn without it. That keeps every distribution as it is, and accepts a draft as often as the rejection rule does
for drafters that propose one token with certainty.

Legend: R rows, D model width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from perilune.errors import Error
from perilune.model import Stats
from perilune.model.sampling import draw, ordered
from perilune.ops.upload import upload
from perilune.serve.request import Logprob, Params, Request
from perilune.serve.work import Chunk, Result

_PIECE = 256  # rows of a long prompt whose logits exist at a time


class Later:
    """A tensor on its way to the host: read it when it is needed, wait for it alone and not for what came after."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x, self._event = x, None
        if x.is_cuda:
            self._x = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Any]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._x.tolist()
        return values


@dataclass
class Drawn:
    """What a step found, perhaps still being computed. rows: for each drawn token its chunk's result.

    tokens_R: on the device, for a step that goes on from them. listed: rows whose log probabilities are wanted, with
    how many others each lists.
    """

    found: list[Result]
    rows: list[Result]
    tokens_R: torch.Tensor | None = None
    numbers: Later | None = None
    listed: list[tuple[int, int]] = field(default_factory=list)
    scores: tuple[Later, Later, Later] | None = None

    def results(self) -> list[Result]:
        """One result a chunk; waits for the step."""
        if self.numbers is None:
            return self.found
        tokens, broken, stuck = self.numbers.read()
        for row, result in enumerate(self.rows):
            result.tokens.append(tokens[row])
            result.broken |= bool(broken[row])
            result.stuck |= bool(stuck[row])
        if self.scores is not None:
            own, ids, values = (later.read() for later in self.scores)
            for i, (row, top) in enumerate(self.listed):
                best = tuple(zip(ids[i][:top], values[i][:top], strict=True))
                mine = self.rows[row].logprobs
                self.rows[row].logprobs = [*(mine or []), Logprob(tokens[row], own[i], best)]
        return self.found


def start(
    chunks: Sequence[Chunk],
    x_RD: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    stats: Stats | None = None,
    ahead: int = 0,
) -> Drawn:
    """Begin to draw what the hidden states of a step give for each of its chunks. head: x_RD -> logits_RV.

    ahead: tokens that the requests will have more than they have now when this step is looked at.
    """
    found, drawn = list[Result](), list[tuple[int, int]]()
    at = begin = 0
    for chunk in chunks:
        result = Result()
        if chunk.scored:
            result.prompt_logprobs = _score(chunk, x_RD[at : at + chunk.rows], head)
        if stats is not None and chunk.request.params.routing:
            rows = slice(begin, begin + len(chunk.tokens))
            result.routing = torch.stack([r.ids_TJ[rows] for _, r in sorted(stats.routing.items())], dim=1).cpu()
        drawn += [(len(found), at + chunk.rows - chunk.sampled + i) for i in range(chunk.sampled)]
        at, begin = at + chunk.rows, begin + len(chunk.tokens)
        found.append(result)
    step = Drawn(found, [found[i] for i, _ in drawn])
    if drawn:
        logits_RV = head(take(x_RD, [row for _, row in drawn]))
        _draw(step, [chunks[i] for i, _ in drawn], logits_RV, ahead)
    return step


def alike(chunk: Chunk) -> bool:
    """Whether the next step of this chunk's request can be begun before its token is known on the host."""
    request = chunk.request
    simple = chunk.decodes and not chunk.drafts and not request.params.routing
    return simple and not _shapes(request.params, request)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def shape(logits_V: torch.Tensor, request: Request, drafts: Sequence[int]) -> torch.Tensor:
    """Logits after bias, penalties, the mask, and without stop tokens before min_tokens, as a new tensor.

    drafts: tokens after the committed ones that this position comes after.
    """
    params, logits_V = request.params, logits_V.clone()
    answer = [*request.tokens[request.prompt :], *drafts]
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*request.tokens, *drafts}), device=logits_V.device)
        old = logits_V[seen]
        logits_V[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if answer and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(answer)
        ids = torch.tensor(list(counts), device=logits_V.device)
        uses = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=logits_V.device)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * uses
    for token, bias in params.logit_bias.items():
        logits_V[token] += bias
    if len(answer) + 1 < params.min_tokens and params.stop_ids:
        logits_V[list(params.stop_ids)] = float("-inf")
    if request.mask is not None:
        logits_V[~_allowed(request.mask([*request.tokens, *drafts]), logits_V)] = float("-inf")
    return logits_V


def _allowed(given: Any, logits_V: torch.Tensor) -> torch.Tensor:
    """A mask as bool [V], from that or from the bits of int32 words."""
    mask: torch.Tensor = torch.as_tensor(given, device=logits_V.device)
    size = logits_V.shape[0]
    if mask.dtype == torch.int32 and mask.shape == (-(-size // 32),):
        mask = (mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=mask.device)).bitwise_and(1).bool()
        mask = mask.flatten()[:size]
    if mask.dtype != torch.bool or mask.shape != (size,):
        got = f"{mask.dtype} {list(mask.shape)}"
        raise Error(f"mask gave {got}; must be torch.bool [{size}], or torch.int32 [{-(-size // 32)}] of bits")
    return mask


def _shapes(params: Params, request: Request) -> bool:
    return params.shapes_logits or params.min_tokens > 0 or request.mask is not None


def _draw(step: Drawn, chunks: Sequence[Chunk], logits_RV: torch.Tensor, ahead: int) -> None:
    """One token for each row; rows of a chunk follow each other."""
    if all(_plain(chunk.request) for chunk in chunks):
        tokens_R, broken_R = logits_RV.argmax(-1), _broken(logits_RV)
        step.tokens_R, step.numbers = tokens_R, Later(torch.stack([tokens_R, broken_R, torch.zeros_like(tokens_R)]))
        return
    # Half precision cannot hold small probabilities.
    wide = torch.float64 if logits_RV.device.type == "cpu" else torch.float32
    logits_RV = raw_RV = logits_RV.to(wide)
    places = _places(chunks)
    shaped = [r for r, chunk in enumerate(chunks) if _shapes(chunk.request.params, chunk.request)]
    if shaped:
        logits_RV = raw_RV.clone()
        for r in shaped:
            drafts = chunks[r].tokens[len(chunks[r].tokens) - chunks[r].drafts :][: places[r]]
            try:
                logits_RV[r] = shape(raw_RV[r], chunks[r].request, drafts)
            except Exception as error:  # a mask is the client's code: its request alone ends
                step.rows[r].error = f"mask failed: {error!r}"
    broken_R, stuck_R = _broken(raw_RV), ~logits_RV.isfinite().any(-1)
    tokens_R = logits_RV.argmax(-1)
    random = [r for r, chunk in enumerate(chunks) if chunk.request.params.temperature > 0]
    if random:
        # A row without numbers is drawn from all the same: its request ends.
        rows_NV = take(torch.where((broken_R | stuck_R)[:, None], 0.0, logits_RV), random)
        numbers = [uniform(chunks[r].request.seed, chunks[r].request.length + ahead + places[r]) for r in random]
        weights_NV, ids_NV = ordered(rows_NV, [chunks[r].request.params.sampling(0) for r in random])
        drawn_N = draw(weights_NV, ids_NV, upload(numbers, wide, raw_RV.device))
        tokens_R = tokens_R.index_copy(0, upload(random, torch.int64, raw_RV.device), drawn_N)
    step.tokens_R, step.numbers = tokens_R, Later(torch.stack([tokens_R, broken_R, stuck_R]))
    tops = [(r, chunk.request.params.logprobs) for r, chunk in enumerate(chunks)]
    step.listed = [(r, top) for r, top in tops if top is not None]
    if step.listed:
        rows = [r for r, _ in step.listed]
        parts = _logprobs(take(raw_RV, rows), take(tokens_R, rows), max(top for _, top in step.listed))
        step.scores = (Later(parts[0]), Later(parts[1]), Later(parts[2]))


def _broken(logits_RV: torch.Tensor) -> torch.Tensor:
    """bool [R]: whether a row has an entry that is not a finite number, in one pass: extremes keep NaN."""
    low_R, high_R = logits_RV.aminmax(dim=-1)
    return (low_R * 0 + high_R * 0) != 0


def take(x_RX: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows, ascending; nothing is copied if they are all."""
    return x_RX if len(rows) == len(x_RX) else x_RX[upload(rows, torch.int64, x_RX.device)]


def _plain(request: Request) -> bool:
    """Whether the most likely token is all that is wanted."""
    params = request.params
    return params.temperature == 0 and params.logprobs is None and not _shapes(params, request)


def _places(chunks: Sequence[Chunk]) -> list[int]:
    """The place of each row among its chunk's."""
    places: list[int] = []
    for r, chunk in enumerate(chunks):
        places.append(places[-1] + 1 if r and chunks[r - 1] is chunk else 0)
    return places


def _score(chunk: Chunk, x_TD: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> list[Logprob]:
    """Log probabilities of the prompt tokens after each of the chunk's positions."""
    request, scores = chunk.request, list[Logprob]()
    top = request.params.prompt_logprobs or 0
    count = min(len(chunk.tokens), request.prompt - 1 - chunk.start)
    for first in range(0, count, _PIECE):
        last = min(first + _PIECE, count)
        following = request.tokens[chunk.start + first + 1 : chunk.start + last + 1]
        logits_RV = head(x_TD[first:last]).to(torch.promote_types(x_TD.dtype, torch.float32))
        parts = _logprobs(logits_RV, torch.tensor(following, device=x_TD.device), top)
        for token, own, ids, values in zip(following, *(part.tolist() for part in parts), strict=True):
            scores.append(Logprob(token, own, tuple(zip(ids, values, strict=True))))
    return scores


def _logprobs(logits_RV: torch.Tensor, tokens_R: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """Own log probability [R] of each token, and ids and log probabilities [R, top] of the likeliest."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    own_R = logprobs_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)
    values_RK, ids_RK = logprobs_RV.topk(min(top, logprobs_RV.shape[-1]), dim=-1)
    return own_R, ids_RK, values_RK


__all__ = ["Drawn", "Later", "alike", "shape", "start", "take", "uniform"]
