"""A model by folder or by its name on the Hugging Face hub. Only data is fetched: no code of a repository is run."""

from __future__ import annotations

import re
from pathlib import Path

from perilune.errors import Error

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json", "tiktoken.model", "generation_config.json"]
_WEIGHTS = [*_SMALL, "*.safetensors", "*.safetensors.index.json"]


def folder_of(model: str, revision: str | None = None, cache: str | None = None, weights: bool = True) -> Path:
    """The folder of a model's files; what is not there is fetched, unless HF_HUB_OFFLINE is set.

    weights: False fetches the small files only, enough to say whether the model fits.
    Raises Error for a name that is neither a folder nor on the hub, or not in the cache of an offline machine.
    """
    if Path(model).is_dir():
        return Path(model)
    if not _NAME.fullmatch(model):
        raise Error(f"model is {model!r}; must be a folder, or a name on the Hugging Face hub such as 'owner/name'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=cache, allow_patterns=_WEIGHTS if weights else _SMALL
        )
    except LocalEntryNotFoundError:
        raise Error(
            f"model is {model!r}, which is no folder here, not in the cache, and the hub cannot be reached"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as problem:
        raise Error(f"model {model!r} cannot be fetched from the hub: {str(problem).splitlines()[0]}") from None
    folder = Path(str(found))
    if not (folder / "config.json").is_file():
        raise Error(f"model {model!r} has no config.json")
    return folder


__all__ = ["folder_of"]
