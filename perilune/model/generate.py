"""Sampling from a model, one sequence at a time: temperature, top-k, top-p, min-p, a seed.

Legend: T prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from perilune.errors import Error
from perilune.model.sampling import Sampling, ordered
from perilune.model.state import SequenceState
from perilune.model.transformer import Transformer
from perilune.ops.sequences import Sequences

_DEFAULT = Sampling()


def sample(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """Draw one token id from logits [V] of any float dtype; the lowest id wins ties at temperature 0.

    Raises Error for logits that are not finite numbers.
    """
    logits_V = logits_V.detach().to("cpu", torch.float64)
    if logits_V.isnan().any() or not logits_V.isfinite().any():
        raise Error("logits hold NaN or no finite value; the model or its input is broken")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    weights_NV, ids_NV = ordered(logits_V[None], [sampling])
    return int(ids_NV[0, torch.multinomial(weights_NV[0], 1, generator=generator)])


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = _DEFAULT,
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
