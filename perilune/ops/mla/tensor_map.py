"""Descriptors for Hopper's copy engine, made by the CUDA driver through ctypes.

Legend: T rows.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache

import torch

from perilune.errors import Error


def tensor_map(x: torch.Tensor, rows: int, columns: int, stride: int, box_rows: int) -> ctypes.Array[c_uint64]:
    """A CUtensorMap of [rows, columns] from x's address, rows `stride` numbers apart, in boxes of box_rows x 64.

    Boxes of bf16 are swizzled over 128 bytes, those of fp8 lie row by row; what lies outside reads as zeros.
    """
    return _tensor_map(x.data_ptr(), x.element_size(), rows, columns, stride, box_rows)


@lru_cache(maxsize=1024)
def _tensor_map(address: int, size: int, rows: int, columns: int, stride: int, box_rows: int) -> ctypes.Array[c_uint64]:
    space = (c_uint64 * 32)()
    offset = -ctypes.addressof(space) % 64 // 8  # the driver wants 64-byte alignment
    bf16, bytes_, plain, swizzle_128, promote_256, zeros = 9, 0, 0, 3, 3, 0
    code = _driver().cuTensorMapEncodeTiled(
        c_void_p(ctypes.addressof(space) + 8 * offset),
        c_int(bf16 if size == 2 else bytes_),
        c_uint32(2),
        c_void_p(address),
        (c_uint64 * 2)(columns, rows),
        (c_uint64 * 1)(size * stride),
        (c_uint32 * 2)(64, box_rows),
        (c_uint32 * 2)(1, 1),
        c_int(plain),
        c_int(swizzle_128 if size == 2 else plain),
        c_int(promote_256),
        c_int(zeros),
    )
    if code:
        raise Error(f"cuTensorMapEncodeTiled of [{rows}, {columns}] failed with CUDA driver error {code}")
    return (c_uint64 * 16)(*space[offset : offset + 16])


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


__all__ = ["tensor_map"]
