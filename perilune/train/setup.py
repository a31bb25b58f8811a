"""What a run's settings name: its device, its tokenizer, and the shape and first numbers of its model."""

from __future__ import annotations

import dataclasses

import torch

from perilune.chat import Tokenizer
from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Transformer, outline
from perilune.parallel.fill import Values, drawn, stored
from perilune.parallel.layout import KEPT
from perilune.parallel.mesh import local_rank, processes
from perilune.train.config import TrainConfig
from perilune.train.qat import qat_quant


def device_of(name: str) -> torch.device:
    """The device that a config's `device` is on this process. Raises Error for one that is not there."""
    if name == "auto":
        return device_of("cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Error(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Error(f"device is {name!r}, but torch sees no GPU")
    if device.type == "cuda" and device.index is None and processes() > 1:
        return torch.device("cuda", local_rank())
    return device


def tokenizer_path(config: TrainConfig) -> str:
    """Raises Error where the config names none."""
    path = config.tokenizer or config.init_from
    if path is None:
        raise Error("tokenizer is not set; name a tokenizer file or folder (init_from would bring its own)")
    return path


def shape_of(config: TrainConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model that a run trains. Raises Error as `ModelConfig.from_pretrained`."""
    source = config.init_from or config.model
    shape = ModelConfig.from_pretrained(source)
    quant = qat_quant(config.qat, shape.quant, source)
    if config.init_from is not None:
        return dataclasses.replace(shape, quant=quant)
    return dataclasses.replace(
        shape,
        bos_token_id=shape.bos_token_id if tokenizer.bos_id is None else tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=shape.pad_token_id if tokenizer.pad_id is None else tokenizer.pad_id,
        quant=quant,
    )


def outline_model(config: TrainConfig, tokenizer: Tokenizer) -> tuple[Transformer, Values]:
    """The run's whole model without memory, in its dtypes, and where its first numbers come from."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = outline(shape_of(config, tokenizer))
    wide = torch.promote_types(dtype, torch.float32)
    for name, param in model.named_parameters():
        param.data = param.data.to(wide if name.endswith(KEPT) else dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(wide)
    return model, drawn(model, config.seed) if config.init_from is None else stored(config.init_from, model)


__all__ = ["device_of", "outline_model", "shape_of", "tokenizer_path"]
