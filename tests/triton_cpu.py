"""Triton on a machine without a GPU: its interpreter, switched on before the kernels are imported."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_scalars(tensor: Any, *scope: Any) -> None:
        """Loop bounds are one-element arrays in the interpreter; NumPy 2.4 no longer turns those into ints."""
        _patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_scalars
