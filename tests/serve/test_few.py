"""The parts of steps with few tokens: whose they replace, and on a GPU that they give the bits of the usual ones."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from engines import make, small_model

from perilune import ModelConfig
from perilune.model.moe import SparseMoe
from perilune.model.parts import DEFAULT, EXACT, in_turn, mixture
from perilune.serve.few import Beside, few_tokens, mixture_of_few
from perilune.serve.graphs import Recorder


def test_parts_that_were_chosen_stay() -> None:
    beside = Beside()
    ours = few_tokens(DEFAULT, beside)
    assert (ours.mixture, ours.beside, ours.linear) == (mixture_of_few, beside, DEFAULT.linear)
    elsewhere = dataclasses.replace(DEFAULT, mixture=partial(mixture))
    assert few_tokens(elsewhere, beside) is elsewhere
    waiting = dataclasses.replace(DEFAULT, beside=lambda call, device: in_turn(call, device))
    assert few_tokens(waiting, beside) is waiting


@pytest.mark.parametrize("parts", [DEFAULT, EXACT], ids=["default", "exact"])
def test_on_a_cpu_nothing_changes(parts) -> None:  # type: ignore[no-untyped-def]
    model, beside = small_model(), Beside()
    (moe,) = (layer.ffn for layer in model.layers if isinstance(layer.ffn, SparseMoe))
    x_TD = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), beside.recording():
        assert torch.equal(moe(x_TD, few_tokens(parts, beside))[0], moe(x_TD, parts)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("latent", [None, 128])
def test_recorded_beside_the_experts_the_bits_are_those_of_one_after_the_other(latent: int | None) -> None:
    base = ModelConfig.from_pretrained("kimi-k3" if latent else "kimi-linear-48b-a3b")
    sizes = dataclasses.replace(base.moe, num_experts=64, top_k=8, expert_size=256, latent_size=latent)
    config = dataclasses.replace(base, hidden_size=512, moe=sizes, quant=None)
    with torch.device("cuda"):
        moe = SparseMoe(config)
    for i, parameter in enumerate(moe.parameters()):
        with torch.no_grad():
            parameter.normal_(0.0, 0.05, generator=torch.Generator("cuda").manual_seed(i))
    moe, beside = moe.bfloat16(), Beside()
    moe.router.bias_E = moe.router.bias_E.float()
    parts, recorder = few_tokens(DEFAULT, beside), Recorder(torch.device("cuda"), beside.recording)
    with torch.inference_mode():
        for tokens in (1, 5, 100, 300):  # 300 have too many choices for the one kernel
            x_TD = torch.randn(tokens, 512, device="cuda").bfloat16()

            def work(numbers: torch.Tensor, x_TD: torch.Tensor = x_TD) -> torch.Tensor:
                # Several layers one after the other: streams fork and meet, memory is used again.
                for _ in range(4):
                    x_TD = torch.nn.functional.rms_norm(x_TD + moe(x_TD, parts)[0], (512,))
                return x_TD

            recorded = recorder.record(work, [0], "few")
            for _ in range(3):
                x_TD.normal_()
                want = x_TD
                for _ in range(4):
                    want = torch.nn.functional.rms_norm(want + moe(want, DEFAULT)[0], (512,))
                assert torch.equal(recorded.run([0]), want)


def test_the_model_that_was_given_keeps_its_parts() -> None:
    """A runner's model is a twin: parts of its own, the same weights."""
    model = small_model()
    engine = make(model, False)
    assert engine.runner.model.parts.mixture is mixture_of_few  # type: ignore[attr-defined]
    assert model.parts is DEFAULT
    own = dict(engine.runner.model.named_parameters())  # type: ignore[attr-defined]
    assert all(own[name] is parameter for name, parameter in model.named_parameters())
