"""What `generate` and `chat` share: a checkpoint folder as a model and a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from perilune.errors import Error

if TYPE_CHECKING:
    import torch

    from perilune.chat import Tokenizer
    from perilune.model import Transformer

LAST_SEED = 2**64 - 1

Dtype = Literal["stored", "float32", "bfloat16", "float64"]


def require_draws(max_tokens: int, seed: int) -> None:
    """Raise Error for a number of tokens or a seed that cannot be served."""
    if max_tokens < 1:
        raise Error(f"max_tokens is {max_tokens}; must be >= 1")
    if not -(2**63) <= seed <= LAST_SEED:
        raise Error(f"seed is {seed}; must fit in 64 bits")


def device(name: str) -> torch.device:
    """A torch device by name; "auto" is the first GPU where there is one. Raises Error for one that is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError:
        raise Error(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:0, ...") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise Error(f"device is {name!r}; this machine has {torch.cuda.device_count()} CUDA devices")
    return found


def open_checkpoint(folder: str, on: str, dtype: Dtype) -> tuple[Transformer, Tokenizer]:
    """Load the model, experts as they are stored, and the tokenizer of a checkpoint folder. Raises Error as their own
    loaders do."""
    import torch

    from perilune.chat import Tokenizer
    from perilune.config import ModelConfig
    from perilune.model import load

    place = device(on)
    # The tokenizer first: it is small, and a folder without one is refused before the weights are read.
    family = "k3" if ModelConfig.from_pretrained(folder).family == "kimi_k3" else "k2"
    tokenizer = Tokenizer.load(folder, family)
    return load(folder, place, None if dtype == "stored" else getattr(torch, dtype), packed=True), tokenizer


__all__ = ["LAST_SEED", "Dtype", "device", "open_checkpoint", "require_draws"]
