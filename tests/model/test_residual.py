"""The residual stream: mixing ahead gives the same model, at the places and in the groups that it should."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from models import tiny_config, tiny_model

from perilune import Sequences, Transformer
from perilune.config import AttnResConfig
from perilune.model import DEFAULT, EXACT, initialize, residual


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Mix ahead on a CPU as on a GPU, from the first block on; lists (finished blocks, mixers) of every pass."""
    made: list[tuple[int, int]] = []
    passes = residual.mix_completed

    def listed(sources: list[torch.Tensor], norms: list[torch.Tensor], *rest: object) -> object:
        made.append((len(sources), len(norms)))
        return passes(sources, norms, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(residual, "mix_completed", listed)
    monkeypatch.setattr(residual, "implementation", lambda sources: "triton")
    monkeypatch.setattr(residual, "AHEAD_BLOCKS", 1)
    return made


def test_mixing_ahead_gives_the_same_hidden_state(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual, "AHEAD_SITES", 4)
    # Blocks of 3 layers: sites 1..6 have the embedding, 7..12 one block more; groups of at most 4.
    config = dataclasses.replace(tiny_config(), attn_res=AttnResConfig(3))
    model = initialize(Transformer(config), 0).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("query_D"):
                p.normal_()
    tokens, sequences = torch.arange(40) % config.vocab_size, Sequences.from_lengths([25, 15])
    expected = model.hidden(tokens, sequences, taps=(0, 1, -1))
    assert calls == []
    with torch.no_grad():
        got = model.hidden(tokens, sequences, taps=(0, 1, -1))
    assert calls == [(1, 4), (1, 2), (2, 4), (2, 2)]
    # float64: the sums only run in another order.
    torch.testing.assert_close(got.x_TD, expected.x_TD, rtol=1e-9, atol=1e-9)
    for tap, x_TD in expected.taps.items():
        torch.testing.assert_close(got.taps[tap], x_TD, rtol=1e-9, atol=1e-9)


def test_exact_parts_and_gradients_do_not_mix_ahead(calls: list[tuple[int, int]]) -> None:
    model, tokens = tiny_model(), torch.arange(9)
    sequences = Sequences.from_lengths([9])
    with torch.no_grad():
        exact = model.with_parts(EXACT).hidden(tokens, sequences).x_TD
        plain = model.with_parts(dataclasses.replace(DEFAULT, mix_ahead=False)).hidden(tokens, sequences).x_TD
    model.hidden(tokens, sequences).x_TD.sum().backward()
    assert calls == []
    torch.testing.assert_close(exact, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_gpu_mixing_ahead_gives_the_same_hidden_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "AHEAD_BLOCKS", 1)
    model, tokens = tiny_model().cuda(), torch.arange(70, device="cuda")
    sequences = Sequences.from_lengths([40, 30], device="cuda")
    with torch.no_grad():
        ahead = model.hidden(tokens, sequences).x_TD
        each = model.with_parts(dataclasses.replace(DEFAULT, mix_ahead=False)).hidden(tokens, sequences).x_TD
    assert not torch.equal(ahead, each)
    # fp32 sums in another order, amplified through six layers.
    torch.testing.assert_close(ahead, each, rtol=1e-3, atol=1e-3)
