"""With attention residuals a layer keeps what a layer of a plain residual network keeps, and a few numbers a token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from memory_models import World, small_config

from perilune import Transformer
from perilune.memory import Memory, Plan, load_plan
from perilune.memory.census import Census
from perilune.model import initialize

TOKENS, WIDTH, SUBLAYERS = 75, 32, 8


def kept(layers: int, residuals: bool, plan: Plan, device: torch.device) -> int:
    """Bytes alive between the passes."""
    config, world = small_config(layers), World()
    world.model = initialize(Transformer(config if residuals else dataclasses.replace(config, attn_res=None)), 0)
    world.model.to(device)
    world.tokens, world.sequences = world.tokens.to(device), world.sequences.to(device)
    weights = [*world.model.parameters(), *world.model.buffers(), world.tokens, world.sequences.cu_seqlens]
    world.forward()
    with Census(device) as census, Memory(plan, weights).step():
        loss = world.forward()
        return census.alive() - loss.nbytes


@pytest.mark.parametrize("plan", ["none", "full-recompute"])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_keeps_what_a_plain_residual_layer_keeps(plan: str, kind: str) -> None:
    # Four layers more: two blocks more, three KDA layers and one MLA.
    grown = {}
    for residuals in (False, True):
        few, many = (kept(n, residuals, load_plan(plan), torch.device(kind)) for n in (4, 8))
        grown[residuals] = many - few
    # fp32 scores, norms and probabilities of at most five sources, and the output's norm.
    allowed = SUBLAYERS * TOKENS * 4 * (3 * 5 + 1)
    if kind == "cpu":
        # The plain version, unlike the kernels, keeps the mixture.
        allowed += SUBLAYERS * TOKENS * WIDTH * 4
    assert 0 <= grown[True] - grown[False] <= allowed
    # Copies of the sources, which shared blocks spare, would be three times that.
    assert allowed < SUBLAYERS * TOKENS * WIDTH * 4 * 3
