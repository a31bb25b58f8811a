"""Whether a model fits, and how much memory its cache gets: counted from its config, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.sizes import ROUTED, VISION, count

_STEP = 0.05  # share of the memory that a step's own tensors are given
_SHORTEST = 4096  # tokens that one request must find room for, unless the server allows fewer


@dataclass(frozen=True)
class Fit:
    """Bytes of one device: weights, states of running requests, a step, and what is left for pages and checkpoints."""

    weights: int
    states: int
    step: int
    arena: int


def fit(
    config: ModelConfig,
    memory: int,
    ranks: int = 1,
    share: float = 0.9,
    slots: int = 64,
    longest: int | None = None,
    element: int | None = None,
) -> Fit:
    """Divide `memory` bytes of each of `ranks` devices, of which `share` may be used.

    longest: tokens of one request that must fit. element: bytes of a weight, if it is not that of the files.
    Raises Error, with the arithmetic, where the model does not fit.
    """
    sizes = count(config)
    packed = () if config.quant is None else (ROUTED,)  # stays as it is in the files
    whole = sum(
        part.bytes if element is None or part.name in packed else part.parameters * element
        for part in sizes.components
        if part.name not in VISION
    )
    weights = -(-whole // ranks)
    states = -(-slots * sizes.kda_state_with_conv_bytes // ranks)
    budget = int(memory * share)
    step = int(budget * _STEP)
    tokens = min(longest or _SHORTEST, config.max_position_embeddings)
    least = tokens * sizes.kv_bytes_per_token + -(-sizes.kda_state_with_conv_bytes // ranks)
    arena = budget - weights - states - step
    if arena < least:
        need = weights + states + step + least
        raise Error(
            f"the model does not fit: each of {ranks} device{'s' * (ranks > 1)} needs {_gb(weights)} of weights + "
            f"{_gb(states)} of states for {slots} requests + {_gb(step)} for a step + {_gb(least)} of cache for one "
            f"request of {tokens} tokens = {_gb(need)}; it may use {share:g} x {_gb(memory)} = {_gb(budget)}. "
            f"{_advice(weights, states, budget, ranks)}"
        )
    return Fit(weights, states, step, arena)


def _advice(weights: int, states: int, budget: int, ranks: int) -> str:
    if weights + budget * _STEP > budget * 0.95:
        more = -(-weights * ranks * 10 // (budget * 8))
        return f"At least {more} such devices are needed (--tensor-parallel-size)"
    return "Fewer requests at once (--max-num-seqs) or a smaller --max-model-len may fit"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


__all__ = ["Fit", "fit"]
