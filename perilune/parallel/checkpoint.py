"""Tensors of which each rank holds boxes, as torch's distributed checkpoint reads and writes them.

Names and shapes in the files are those of whole parameters, so a checkpoint of any layout loads into any other, and no
rank ever holds more than its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from perilune.parallel.layout import Box


class Part(torch.Tensor):
    """This rank's boxes of a tensor; `size()` is that of the whole, which is what the checkpoint's planner compares."""

    boxes: Sequence[Box]
    whole: torch.Size

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(part: torch.Tensor, boxes: Sequence[Box], whole: Sequence[int]) -> Part:
        """`part`, sharing its memory."""
        made = part.detach().as_subclass(Part)
        made.boxes, made.whole = boxes, torch.Size(whole)
        return made

    def size(self, dim: int | None = None) -> Any:
        return self.whole if dim is None else self.whole[dim]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._plain())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.begin), torch.Size(box.size)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = next(box for box in self.boxes if index.offset is None or tuple(index.offset) == box.begin)
        return box.of_part(self._plain())

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def unwrap(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts as plain tensors."""
    return {name: value._plain() if isinstance(value, Part) else value for name, value in tensors.items()}


__all__ = ["Part", "unwrap"]
