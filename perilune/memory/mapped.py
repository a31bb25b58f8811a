"""A lender's GPU buffer in the borrower's address space: CUDA's handles for other processes of one host, by ctypes.

Used instead of torch's own sharing of tensors between processes because that opens the buffer as one of the lender's
device, which costs the borrower a CUDA context there, hundreds of megabytes of the memory that is to be saved.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_size_t, c_uint, c_uint64

import torch

from perilune.errors import Error


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def share(room: torch.Tensor) -> tuple[bytes, int]:
    """(handle of the allocation that the tensor is in, the tensor's offset in it), for `open_room` in another process.

    Raises Error where CUDA refuses, as it does for memory of expandable segments.
    """
    handle, base, size = _Handle(), c_uint64(), c_size_t()
    with torch.cuda.device(room.device):
        _must(_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), c_uint64(room.data_ptr())))
        _must(_driver().cuIpcGetMemHandle(ctypes.byref(handle), c_uint64(room.data_ptr())))
    return bytes(handle.reserved), room.data_ptr() - base.value


def open_room(handle: bytes, offset: int, size: int, device: torch.device) -> torch.Tensor:
    """What `share` gave as a uint8 tensor [size] for streams of `device`; it stays mapped until the process ends.

    Raises Error when the device cannot reach the lender's.
    """
    address, lazily = c_uint64(), c_uint(1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    opened = _Handle((ctypes.c_ubyte * 64)(*handle))
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()
        _must(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), opened, lazily))
    storage = torch._C._construct_storage_from_data_pointer(address.value + offset, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,))  # type: ignore[call-overload, no-any-return]


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as cause:
        raise Error(f"peer memory: the CUDA driver cannot be loaded: {cause}") from cause


def _must(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"").decode()
        raise Error(f"peer memory: this GPU cannot use the other's memory: {said or code}")


__all__ = ["open_room", "share"]
