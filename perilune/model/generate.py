"""Sampling from a model, one sequence at a time: temperature, top-k, top-p, min-p, a seed.

Legend: T prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from perilune.errors import Error
from perilune.model.state import SequenceState
from perilune.model.transformer import Transformer
from perilune.ops.sequences import Sequences


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the most likely one; None switches a filter off.

    The filters apply in the order top_k, top_p, min_p, each to the distribution after temperature.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise Error(f"temperature is {self.temperature}; must be >= 0")
        if self.top_k is not None and self.top_k < 1:
            raise Error(f"top_k is {self.top_k}; must be >= 1")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise Error(f"{name} is {value}; must be in (0, 1]")


def sample(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """Draw one token id from logits [V] of any float dtype; the lowest id wins ties at temperature 0.

    Raises Error for logits that are not finite numbers.
    """
    logits_V = logits_V.detach().to("cpu", torch.float64)
    if logits_V.isnan().any() or not logits_V.isfinite().any():
        raise Error("logits hold NaN or no finite value; the model or its input is broken")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probs_V = torch.softmax(logits_V / sampling.temperature, dim=-1)
    ordered_V, ids_V = probs_V.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        ordered_V[sampling.top_k :] = 0
    if sampling.top_p is not None:
        # A token stays if the mass before it has not yet reached top_p; the first always stays.
        total = ordered_V.sum()
        ordered_V[ordered_V.cumsum(0) - ordered_V >= sampling.top_p * total] = 0
    if sampling.min_p is not None:
        ordered_V[ordered_V < sampling.min_p * ordered_V[0]] = 0
    return int(ids_V[torch.multinomial(ordered_V, 1, generator=generator)])


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    stop_ids: Collection[int] = (),
    exact: bool = False,
) -> Iterator[int]:
    """Yield up to max_new_tokens token ids that continue `prompt`; one of stop_ids is yielded and ends it.

    exact: keep an exact state (slower; with `Parts` EXACT, logits equal one full pass bit for bit).
    Raises Error for an empty prompt or an id outside the vocabulary.
    """
    vocabulary = model.config.vocab_size
    if not prompt:
        raise Error("prompt is empty; needs at least one token (a beginning-of-sequence token, say)")
    for token in prompt:
        if not 0 <= token < vocabulary:
            raise Error(f"prompt holds token id {token}; the vocabulary is 0..{vocabulary - 1}")
    weight = model.lm_head.weight
    state = SequenceState.empty(model.config, exact, weight.device, weight.dtype)
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = torch.tensor(prompt, device=weight.device)
    for _ in range(max_new_tokens):
        x_TD = model.hidden(tokens, Sequences.from_lengths([tokens.shape[0]]), [state]).x_TD
        token = sample(model.parts.linear(x_TD[-1:], weight)[0], sampling, generator)
        yield token
        if token in stop_ids:
            return
        tokens = torch.tensor([token], device=weight.device)


__all__ = ["Sampling", "generate", "sample"]
