"""Kimi-Linear against transformers' own implementation, both ways through a checkpoint on disk.

Nothing is forced (routing included), float32; 5e-5 absolute on logits of magnitude up to 5 is rounding.
"""

from pathlib import Path

import pytest
import torch
from models import random_tokens, tiny_model

from perilune import Sequences
from perilune.model import load, save

transformers = pytest.importorskip("transformers")
TOLERANCE = 5e-5


def test_our_checkpoint_in_transformers_and_back(tmp_path: Path) -> None:
    model = tiny_model("kimi_linear")
    save(model, tmp_path / "ours")
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.eval()
    assert theirs.config.layer_types == [
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    ]
    tokens = random_tokens(150, model.config.vocab_size)
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
        logits = model(tokens, Sequences.from_lengths([150]))
    assert (logits - expected).abs().max() <= TOLERANCE
    assert expected.abs().max() > 0.5

    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    theirs.save_pretrained(tmp_path / "theirs")
    again = load(tmp_path / "theirs", dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
        logits = again(tokens, Sequences.from_lengths([150]))
    assert (logits - expected).abs().max() <= TOLERANCE
