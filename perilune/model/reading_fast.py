"""Tensors of a safetensors file through fastsafetensors: several threads, GPUDirect Storage where the machine has it.

Yoshimura et al., "Speeding up model loading with fastsafetensors", https://arxiv.org/abs/2505.23072
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import torch
from fastsafetensors import ParallelLoader

from perilune.errors import Error

# A file goes through the device in chunks of so many bytes, two at a time.
CHUNK = 1 << 30
# The kernel module of GPUDirect Storage.
DRIVER = Path("/proc/driver/nvidia-fs")


def read_tensors(path: Path, sizes: Mapping[str, int], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on `device`) of those tensors, in the order of the file; the bytes of no other are read.

    sizes: name -> bytes. Raises Error where fastsafetensors cannot read the file.
    """
    try:
        loader = ParallelLoader(
            None,
            [str(path)],
            device=str(device),
            nogds=not DRIVER.exists(),
            all_local=True,
            tensor_filter=sizes.__contains__,
            max_batch_bytes=max(CHUNK, *sizes.values()),
            accumulate_resident=False,
            use_tqdm_on_load=False,
        )
        with closing(loader), closing(loader.iterate_weights()) as tensors:
            yield from tensors
    except Exception as error:
        raise Error(f"fastsafetensors cannot read {str(path)!r}: {error}") from error


__all__ = ["read_tensors"]
