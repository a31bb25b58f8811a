"""The table of cuts: every parameter is in it, and parts joined again are the whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from perilune.config import PRESETS, ModelConfig
from perilune.errors import Error
from perilune.model import Transformer
from perilune.parallel.tensor import GROUPS, TABLE, check_ranks, cut_tensor, find_cut, join_tensors


def shallow(name: str) -> ModelConfig:
    """The preset with two layers of each kind: one KDA, one MLA, one dense, one sparse at least."""
    config = ModelConfig.from_pretrained(name)
    kda, mla = dataclasses.replace(config.kda, layers=(0, 1)), dataclasses.replace(config.mla, layers=(2,))
    return dataclasses.replace(config, num_layers=3, kda=kda, mla=mla, hf_present=None, hf_extra={})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_and_buffer_is_in_the_table_and_no_cut_changes_what_is_joined(preset: str) -> None:
    config = shallow(preset)
    with torch.device("meta"):
        model = Transformer(config)
    names = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    seen = set()
    for name, value in names.items():
        cut = find_cut(config, name)
        if cut is None:
            continue
        seen.add(cut.group)
        # The unit is what the dim really holds: blocks of so many pieces.
        assert value.shape[cut.dim] % (cut.blocks * cut.pieces(config)) == 0, name
    assert seen >= {"attention", "mlp", "shared", "experts", "vocabulary"}
    with pytest.raises(Error, match=r"layers\.0\.attn\.new is not in the table"):
        find_cut(config, "layers.0.attn.new")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_are_heads_and_join_to_the_whole(ranks: int) -> None:
    for cuts in TABLE.values():
        for cut in cuts.values():
            if cut is None:
                continue
            shape = [5, 7, 4]
            shape[cut.dim] = cut.blocks * 6 * 2
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            parts = [cut_tensor(whole, cut, rank, ranks) for rank in range(ranks)]
            assert torch.equal(join_tensors(parts, cut), whole)
            # By hand: block b of rank r is the r-th run of that block.
            for rank, part in enumerate(parts):
                run = 12 // ranks
                for b in range(cut.blocks):
                    want = whole.narrow(cut.dim, b * 12 + rank * run, run)
                    assert torch.equal(part.narrow(cut.dim, b * run, run), want)


def test_ranks_that_do_not_divide_are_named() -> None:
    config = ModelConfig.from_pretrained("kimi-k3")
    check_ranks(config, 8)
    with pytest.raises(Error, match=r"parallel\.tp is 7; must divide vocab_size = 163840"):
        check_ranks(config, 7)
    with pytest.raises(Error, match=r"parallel\.tp is 64; must divide kda\.num_heads = 96"):
        check_ranks(config, 64)
    with pytest.raises(Error, match=r"parallel\.tp is 0"):
        check_ranks(config, 0)
    check_ranks(config, 128, ("vocabulary",))
    assert set(GROUPS) == {cut.group for cuts in TABLE.values() for cut in cuts.values() if cut is not None}
