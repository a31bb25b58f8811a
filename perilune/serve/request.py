"""A request, its states, and what a step gives back for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any

from perilune.errors import Error
from perilune.model.sampling import Sampling
from perilune.serve.cache.cache import Lease, Stage
from perilune.serve.cache.chain import Chain
from perilune.serve.cache.placement import Mark


@dataclass(frozen=True)
class Params:
    """How one request is continued.

    temperature 0 takes the most likely token; None switches top_k, top_p or min_p off. seed None: the engine picks one.
    repetition_penalty divides (multiplies, if negative) the logits of tokens seen in the prompt or the answer;
    presence_penalty and frequency_penalty are subtracted once, and once a use, for tokens of the answer.
    logit_bias is added. stop_ids end the answer and are part of it; not before min_tokens.
    logprobs, prompt_logprobs: how many of the most likely tokens are listed beside the token's own log probability
    (None: none at all); of the model's distribution, before penalties and temperature. prompt_logprobs computes the
    whole prompt. routing: give the experts of every computed token.
    Raises Error for a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_ids: Sequence[int] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routing: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if not (isinstance(value, Integral) or (value is None and name not in ("max_tokens", "min_tokens"))):
                raise Error(f"{name} is {value!r}; must be an integer")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (isinstance(value, Real) or (value is None and name in ("top_p", "min_p"))):
                raise Error(f"{name} is {value!r}; must be a number")
        if self.max_tokens < 1:
            raise Error(f"max_tokens is {self.max_tokens}; must be >= 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise Error(f"min_tokens is {self.min_tokens}; allowed: 0..{self.max_tokens} (max_tokens)")
        self.sampling(0)  # checks its fields
        # Beyond these the division leaves what floating point can tell apart.
        if self.temperature and not 1e-6 <= self.temperature <= 1e6:
            raise Error(f"temperature is {self.temperature}; allowed: 0, 1e-6..1e6")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise Error(f"repetition_penalty is {self.repetition_penalty}; allowed: 1e-3..1e3")
        token_ids("stop_ids", self.stop_ids)
        token_ids("logit_bias", self.logit_bias)
        for token, bias in self.logit_bias.items():
            if not (isfinite(bias) and abs(bias) <= 1e6) and bias != -inf:
                raise Error(f"logit_bias of token {token} is {bias}; allowed: -1e6..1e6, or -inf")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= 100:
                raise Error(f"{name} is {getattr(self, name)}; allowed: -100..100")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1024:
                raise Error(f"{name} is {value}; allowed: 0..1024")

    def sampling(self, seed: int) -> Sampling:
        """The draw's part of the parameters."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, seed)

    @property
    def shapes_logits(self) -> bool:
        """Whether the logits are changed before they are sampled from."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalties or self.logit_bias)


def token_ids(name: str, ids: Iterable[int]) -> list[int]:
    """The ids as Python integers, from a list, an array or a tensor. Raises Error for anything else."""
    found = array("q")  # a million of them in a fraction of a loop's time
    try:
        found.extend(iter(ids))
    except (TypeError, OverflowError) as error:
        raise Error(f"{name} must be token ids (integers): {error}") from None
    return found.tolist()


class State(Enum):
    """Where a request stands. Only the scheduler moves it, and only along NEXT."""

    WAITING = "waiting"
    PREFETCHING = "prefetching"  # its hit is being copied from the host
    REMOTE = "remote"  # its hit is being computed elsewhere
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"  # preempted: holds no slot and no page of its own
    DONE = "done"


NEXT = {
    State.WAITING: {State.PREFETCHING, State.PREFILL, State.DONE},
    State.REMOTE: {State.WAITING, State.DONE},
    State.PREFETCHING: {State.PREFILL, State.WAITING, State.DONE},
    State.PREFILL: {State.DECODE, State.PARKED, State.DONE},
    State.DECODE: {State.PARKED, State.DONE},
    State.PARKED: {State.PREFETCHING, State.PREFILL, State.DONE},
    State.DONE: set[State](),
}


@dataclass(frozen=True)
class Logprob:
    """Natural log probability of a token and of the most likely ones, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Output:
    """What one step adds to a request: tokens with the weight version each was made by.

    logprobs: one a token, if asked for. prompt_logprobs: of prompt tokens 1.. that this step computed, in order.
    routing: experts of the tokens this step computed, [tokens, sparse layers, J], from position `computed_from` on.
    finished: None, or "stop", "length", "abort", "deadline", "error".
    cached: prompt tokens that were not computed. error: a sentence if finished is "error". hold: number of the lease
    on the request's end, where it asked for one.
    """

    id: int
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    routing: Any = None
    computed_from: int = 0
    finished: str | None = None
    cached: int = 0
    error: str | None = None
    hold: int | None = None

    @property
    def says_something(self) -> bool:
        """Whether it holds anything that was not known before."""
        return bool(self.tokens or self.prompt_logprobs or self.finished) or self.routing is not None


@dataclass
class Counters:
    """Sums since the start, in tokens but for steps and preempted.

    stateless: prompt tokens whose KV was cached but no state at their end, so that they were computed again: what other
    checkpoints would have saved. accepted / drafted is the acceptance of speculation.
    """

    steps: int = 0
    prefill: int = 0
    decode: int = 0
    cached: int = 0
    stateless: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0


@dataclass(eq=False)
class Request:
    """One request on its way. tokens: prompt and committed answer. computed: how many of them are in its state.

    chain: of the first chain.length tokens, in version `version` of the weights. marks: checkpoints to leave, by depth.
    publish: False once its state mixes versions of the weights; nothing of it may be reused then.
    stop: called with every committed token in order; True ends the answer with that token.
    mask: called with all tokens so far, and with drafts behind them; what may follow, as a bool for each token of the
        vocabulary, or one bit (int32 words, the lowest bit first, as grammar libraries fill them).
    priority: requests of a higher one start first, and are preempted last, whatever the others have waited.
    """

    id: int
    tokens: list[int]
    params: Params
    arrival: float
    salt: str = ""
    turn: int = 0
    client_marks: Sequence[int] = ()
    deadline: float | None = None
    hold: float | None = None  # seconds that its end stays leased
    stop: Callable[[int], bool] | None = None
    mask: Callable[[Sequence[int]], Any] | None = None
    priority: int = 0
    seed: int = 0
    state: State = State.WAITING
    prompt: int = 0
    computed: int = 0
    cached: int = 0
    scored: int = 0  # tokens whose prompt_logprobs were given
    version: int = 0
    publish: bool = True
    slot: int | None = None
    lease: Lease | None = None
    stage: Stage | None = None
    chain: Chain | None = None
    table: list[int] = field(default_factory=list)
    marks: dict[int, Mark] = field(default_factory=dict)
    drafts: list[int] = field(default_factory=list)
    accept: float = 0.6  # running share of drafts that were accepted
    cold: bool = False  # start without the cache
    ahead: bool = False  # its last token is being computed by a step that was begun early
    first_cached: bool = True  # `cached` is that of the first admission

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    def move(self, state: State) -> None:
        """Go on to another state."""
        assert state in NEXT[self.state], f"request {self.id} cannot go from {self.state} to {state}"
        self.state = state

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens after which it ends at the latest."""
        return self.prompt + self.params.max_tokens


__all__ = ["NEXT", "Counters", "Logprob", "Output", "Params", "Request", "State", "token_ids"]
