"""Numbers of the host on a device, without waiting for what the device is doing."""

from __future__ import annotations

import torch


def upload(values: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.tensor(values, dtype=dtype, device=device)`, which would wait for all work before it on a GPU."""
    cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=cuda).to(device, non_blocking=cuda)


__all__ = ["upload"]
