"""The train room: data, loss, optimizers, checkpoints, the training loop and its report."""

from perilune.train.config import BalanceConfig, DataConfig, OptimConfig, TrainConfig, from_dict, load_config
from perilune.train.trainer import Result, Trainer, train

__all__ = [
    "BalanceConfig",
    "DataConfig",
    "OptimConfig",
    "Result",
    "TrainConfig",
    "Trainer",
    "from_dict",
    "load_config",
    "train",
]
