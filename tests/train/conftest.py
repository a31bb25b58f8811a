"""A model of a few thousand parameters with every mechanism, its tokenizer, and a run on invented text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_tiny import VOCAB, invented_text, tiny_model

from perilune.chat import train_bpe
from perilune.train.config import TrainConfig, from_dict


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/config.json, tokenizer/, train/ and held-out/."""
    root = tmp_path_factory.mktemp("material")
    for name, seeds in {"train": range(8), "held-out": range(100, 102)}.items():
        (root / name).mkdir()
        for seed in seeds:
            (root / name / f"{seed}.txt").write_text(invented_text(seed))
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(tiny_model()))
    train_bpe([invented_text(i) for i in range(8)], VOCAB).save(root / "tokenizer")
    return root


@pytest.fixture
def tiny_run(material: Path, tmp_path: Path) -> TrainConfig:
    """A run of 12 steps with an evaluation and a checkpoint every 4."""
    return from_dict(
        {
            "out": str(tmp_path / "run"),
            "model": str(material / "model"),
            "tokenizer": str(material / "tokenizer"),
            "steps": 12,
            "accumulate": 2,
            "eval_every": 4,
            "checkpoint_every": 4,
            "device": "cpu",
            "data": {
                "train": [str(material / "train")],
                "held_out": [str(material / "held-out")],
                "batch_tokens": 160,
                "sequence_tokens": 100,
            },
            "optim": {"lr": 0.01},
        }
    )
