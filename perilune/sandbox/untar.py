"""Archives that somebody else made: what leads out of the folder is refused by tarfile's own filters."""

from __future__ import annotations

import tarfile

from perilune.sandbox.errors import Unavailable


def require_filters() -> None:
    """Raise `Unavailable` on Python 3.11.0 to 3.11.3, whose tarfile writes wherever an archive says (PEP 706)."""
    if not hasattr(tarfile, "data_filter"):
        raise Unavailable("unpacking archives safely needs Python 3.11.4 or newer")


__all__ = ["require_filters"]
