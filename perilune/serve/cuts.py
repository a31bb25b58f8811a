"""What of each running request a step computes: chunks under a budget of tokens, on the kernels' grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perilune.config import ModelConfig
from perilune.serve.cache import live
from perilune.serve.cache.cache import PrefixCache
from perilune.serve.request import Request, State
from perilune.serve.work import Chunk
from perilune.sizes import count

if TYPE_CHECKING:
    from perilune.serve.scheduler import Scheduler


def decode_chunks(scheduler: Scheduler, now: float, budget: int) -> list[Chunk]:
    """The next token of every answer, with drafts where there is room."""
    decoding = [request for request in scheduler.running if request.state is State.DECODE]
    scheduler.propose(decoding)
    chunks = []
    # Drafts take what is left when every sequence has its token and prompts can go on.
    spare = budget - len(decoding) - scheduler.cache.geometry.grid
    for request in decoding:
        if request.state is not State.DECODE:  # preempted for an earlier one
            continue
        left = request.longest - request.length
        drafts = request.drafts[: max(0, min(left - 1, spare))]
        if not _room(scheduler, request, request.length + len(drafts), now):
            continue
        spare -= len(drafts)
        tokens = [request.tokens[-1], *drafts]
        chunks.append(Chunk(request, tokens, request.computed, len(drafts), len(tokens), decodes=True))
    return [chunk for chunk in chunks if chunk.request.state is State.DECODE]


def _room(scheduler: Scheduler, request: Request, end: int, now: float) -> bool:
    """Pages up to token `end`, at the expense of the youngest of the lowest priority if need be."""
    while True:
        if grow(scheduler.cache, request, end, now):
            return True
        victim = min(reversed(scheduler.running), key=lambda other: other.priority)  # of equals the last
        if victim is request and len(scheduler.running) == 1:
            scheduler.end(request, "error", "no memory is left for its next token")
            return False
        scheduler.preempt(victim, now, scheduler.config.park)
        if victim is request:
            return False


def _turn(scheduler: Scheduler, request: Request, now: float) -> tuple[int, bool, float]:
    overdue = scheduler.admission.overdue(request, now)
    return -request.priority, not overdue, request.arrival if overdue else request.length - request.computed


def grow(cache: PrefixCache, request: Request, end: int, now: float) -> bool:
    """Pages for tokens up to `end`; False where there are none."""
    lease, stage = request.lease, request.stage
    assert lease is not None
    assert stage is not None
    known = len(stage.pages)
    grown = live.grow(cache, lease, stage, end, now)
    request.table += stage.pages[known:]
    return grown


def prompt_chunks(scheduler: Scheduler, budget: int, now: float) -> list[Chunk]:
    """What of the prompts that have begun fits into a step: the one with least left first, so that a short one does not
    wait for a longer one that came before, unless that has waited for too long. Long ones leave a share to short ones,
    and where somebody waits for the step's end, a token after a long prefix counts for the work that it is.
    """
    filling = [request for request in scheduler.running if request.state is State.PREFILL]
    filling.sort(key=lambda request: _turn(scheduler, request, now))
    share, grid, reach = budget, scheduler.cache.geometry.grid, scheduler.reach
    short = any(not scheduler.admission.is_long(request) for request in [*filling, *scheduler.waiting])
    hurried = short or len(filling) < len(scheduler.running)
    if short:
        # Never less than a chunk: short requests may be waiting for the memory of a long one.
        share = max(grid, int(budget * scheduler.config.long_share))
    chunks = []
    for request in filling:
        long = scheduler.admission.is_long(request)
        room = min(budget, share) if long else budget
        if long and hurried:
            room = min(room, max(grid, int(room * reach / (reach + request.computed))))
        ends = [depth for depth in request.marks if depth > request.computed] if scheduler.device.on_grid else []
        end = min([request.computed + room, request.length, *ends])
        point, inside = end // grid * grid, end != request.length and end not in request.marks
        if inside or (scheduler.device.on_grid and point > request.computed):
            end = point
        if end <= request.computed:
            continue
        tokens = request.tokens[request.computed : end]
        budget -= len(tokens)
        share -= len(tokens) if long else 0
        scored = request.params.prompt_logprobs is not None and request.scored <= request.computed < request.prompt
        exports = scheduler.checkpoints.exports(request, end, now)
        last = int(end == request.length)
        chunks.append(Chunk(request, tokens, request.computed, 0, last, scored, exports=exports))
    return chunks


def reach_of(config: ModelConfig) -> float:
    """The length of a prefix after which a token costs twice: attention to it takes as many products as the rest."""
    mla = config.mla
    pairs = len(mla.layers) * mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    return count(config).active / pairs


__all__ = ["decode_chunks", "grow", "prompt_chunks", "reach_of"]
