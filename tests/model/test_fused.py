"""Fused input projections: the same outputs, and parameters that stay parameters."""

from __future__ import annotations

import pytest
import torch
from models import random_tokens, tiny_model

from perilune import Sequences
from perilune.model.fused import fuse_inplace, inputs_of, project, whole
from perilune.model.kda import KdaLayer
from perilune.ops.linear import linear


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_one_product_gives_what_each_gives(family: str) -> None:
    """float64; sums of 48 products in another order differ by at most some 1e-14."""
    model, apart = tiny_model(family, torch.float64), tiny_model(family, torch.float64)
    x_TD = torch.randn(7, model.config.hidden_size, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        fuse_inplace(model)
    for layer, plain in zip(model.layers, apart.layers, strict=True):
        assert whole(inputs_of(plain.attn)) is None
        assert whole(inputs_of(layer.attn)) is not None
        found, expected = (project(attn, x_TD, linear) for attn in (layer.attn, plain.attn))
        assert (
            len(found)
            == len(expected)
            == (4 if isinstance(layer.attn, KdaLayer) else 2 + hasattr(layer.attn, "g_proj"))
        )
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 1e-12
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_training_and_loading_reach_the_fused_weights() -> None:
    model = tiny_model("kimi_linear")
    fuse_inplace(model)
    attn = model.layers[0].attn
    pointer = whole(inputs_of(attn)).data_ptr()  # type: ignore[union-attr]
    fuse_inplace(model)
    assert whole(inputs_of(attn)).data_ptr() == pointer  # type: ignore[union-attr]
    model(random_tokens(9, model.config.vocab_size), Sequences.from_lengths([9])).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in inputs_of(attn))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    fresh = tiny_model("kimi_linear")
    joined = torch.cat([weight.detach() + 1.0 for weight in inputs_of(fresh.layers[0].attn)])
    assert torch.equal(whole(inputs_of(attn)), joined)  # type: ignore[arg-type]
    model.load_state_dict(fresh.state_dict())
    again = torch.cat([weight.detach() for weight in inputs_of(fresh.layers[0].attn)])
    assert torch.equal(whole(inputs_of(attn)), again)  # type: ignore[arg-type]
