"""Pinned host memory of exactly the bytes that were asked for.

PyTorch's allocator of pinned memory rounds a size up to a power of two and keeps what is freed: 604 MB take 1074, a
host tier of 100 GB takes 137. Here large memory is a mapping of its own, registered with CUDA (CUDA runtime API,
cudaHostRegister), and goes back to the system with its tensor.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial

import torch

LEAST = 1 << 20  # bytes under which PyTorch's allocator is used: a mapping costs a page at least, and system calls


class _Mapping(mmap.mmap):
    """Memory that CUDA is told to forget before it is unmapped (a weak reference would tell afterwards)."""

    forget: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.forget is not None:
            self.forget()


def host_empty(shape: Sequence[int], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """An uninitialised tensor in host memory, pinned if `pin`; no copy may be under way when it goes.

    Raises RuntimeError where it cannot be had.
    """
    size = math.prod(shape) * dtype.itemsize
    if not pin or size < LEAST:
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    try:
        mapping = _Mapping(-1, size)
    except OSError as cause:
        raise RuntimeError(f"{size} bytes of host memory cannot be mapped: {cause}") from cause
    # A child process that gives it up would have CUDA forget the parent's.
    mapping.madvise(mmap.MADV_DONTFORK)
    flat = torch.frombuffer(mapping, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(flat.data_ptr(), size, 0))
    if code:
        raise RuntimeError(f"{size} bytes of host memory cannot be pinned: CUDA error {code}")
    mapping.forget = partial(cudart.cudaHostUnregister, flat.data_ptr())
    return flat.view(dtype).view(shape)


__all__ = ["host_empty"]
