"""Numbers of the host on a device, without waiting for what the device is doing."""

from __future__ import annotations

import torch


def upload(values: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.tensor(values, dtype=dtype, device=device)`, which would wait for all work before it on a GPU."""
    here = torch.tensor(values, dtype=dtype)
    # An array of NumPy cannot be pinned as it is made into a tensor.
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


__all__ = ["upload"]
