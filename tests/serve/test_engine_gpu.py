"""The engine on a GPU, eager and as CUDA graphs, with and without drafts, against one full pass in float64.

bf16: of all log probabilities together, the median and the largest error may be twice those of full bf16 passes on the
same GPU (a token near a tie of the router goes to another expert, in either), plus 0.01.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import lru_cache

import pytest
import torch
from engines import make, prompt, serve

from perilune import ModelConfig, Sequences, Transformer
from perilune.config import Gate
from perilune.serve import Params
from perilune.serve.cache import Placement

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
VOCABULARY = 1024
GATES = {"softplus": Gate("softplus", None), "safe": Gate("safe", -5.0)}


@lru_cache
def models(gate: str = "softplus") -> tuple[Transformer, Transformer]:
    """Kimi-Linear's widths, 4 layers, 16 experts: bf16 weights (fp32 where checkpoints keep it), and float64.

    gate "safe": as in Kimi-K3, whose chunks are prepared by another kernel.
    """
    base = ModelConfig.from_pretrained("kimi-linear-48b-a3b")
    config = dataclasses.replace(
        base,
        vocab_size=VOCABULARY,
        num_layers=4,
        kda=dataclasses.replace(base.kda, layers=(0, 1, 2), gate=GATES[gate]),
        mla=dataclasses.replace(base.mla, layers=(3,)),
        moe=dataclasses.replace(base.moe, num_experts=16),
        hf_present=None,
        hf_extra={},
    )
    with torch.device("cuda"):
        model = Transformer(config)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf.endswith(("norm", "norm_D", "norm_K")):
                parameter.fill_(1.0)
            elif leaf in ("A_log_H", "dt_bias_HK"):
                parameter.uniform_(-1.0, 1.0, generator=generator)
            else:
                parameter.normal_(0.0, 0.03, generator=generator)
            if leaf not in ("conv_CW", "A_log_H", "dt_bias_HK", "o_norm_K"):
                parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval(), copy.deepcopy(model).double()


class Oracle:
    """Two right tokens, then wrong ones, where the text is known."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def propose(self, requests, width):  # type: ignore[no-untyped-def]
        rows = []
        for request in requests:
            size = request.length
            row = next((t[size : size + width] for t in self.texts if t[:size] == request.tokens), [])
            rows.append([token if i < 2 else (token + 1) % VOCABULARY for i, token in enumerate(row)])
        return rows


def scores(model: Transformer, text: list[int], start: int) -> torch.Tensor:
    """Log probabilities of text[start:] in one pass."""
    device = model.lm_head.weight.device
    with torch.inference_mode():
        logits = model(torch.tensor(text, device=device), Sequences.from_lengths([len(text)])).double().cpu()
    return torch.log_softmax(logits, -1)[torch.arange(start - 1, len(text) - 1), torch.tensor(text[start:])]


@pytest.mark.parametrize("graphs", [0, 64])
def test_answers_are_as_close_to_float64_as_a_full_pass(graphs: int) -> None:
    model, exact = models()
    prompts = [prompt(200, 0, VOCABULARY), prompt(70, 1, VOCABULARY), [3, 4, 5, 6] * 30]
    prompts.append(prompts[0][:130] + prompts[1][:20])
    params = Params(max_tokens=24, temperature=0, logprobs=0)
    known: list[list[int]] = []
    mine, full = list[torch.Tensor](), list[torch.Tensor]()
    for drafts in (0, 4):
        placement = Placement(min_turn=1)
        engine = make(model, False, 900, placement=placement, graphs=graphs, drafts=drafts, drafter=Oracle(known))
        turns = prompts
        for turn in range(2):
            outputs = serve(engine, turns, params)
            assert all(output.cached > 0 for output in outputs) or turn == 0
            for start, output in zip(turns, outputs, strict=True):
                text = start + output.tokens
                assert output.logprobs is not None
                given = torch.tensor([entry.logprob for entry in output.logprobs], dtype=torch.float64)
                wanted = scores(exact, text, len(start))
                mine.append((given - wanted).abs())
                full.append((scores(model, text, len(start)) - wanted).abs())
            turns = [start + output.tokens for start, output in zip(turns, outputs, strict=True)]
        known = [start + output.tokens for start, output in zip(turns, outputs, strict=True)]
        assert engine.counters.accepted > 0 or not drafts
        prefills = engine.runner._prefills  # type: ignore[attr-defined]
        assert bool(prefills and prefills._captured) == (graphs > 0)
    errors, usual = torch.cat(mine), torch.cat(full)
    figures = [round(x.item(), 4) for x in (errors.median(), usual.median(), errors.max(), usual.max())]
    print(f"graphs {graphs}: median error {figures[0]}, full pass {figures[1]}; largest {figures[2]}, {figures[3]}")
    assert errors.median() <= 2 * usual.median() + 0.01
    assert errors.max() <= 2 * usual.max() + 0.01


@pytest.mark.parametrize("gate", list(GATES))
def test_short_pieces_after_a_long_prefix_as_graphs(gate: str) -> None:
    """The same hit continued by graphs and by launches: either as close to one float64 pass as the other."""
    model, exact = models(gate)
    base = prompt(1500, 7, VOCABULARY)
    turns = [
        [*base[:cut], *prompt(more, 8 + i, VOCABULARY)]
        for i, (cut, more) in enumerate(((1500, 1), (1480, 90), (700, 200)))
    ]
    errors = {}
    for graphs in (0, 64):
        engine = make(model, False, 900, graphs=graphs, token_budget=2048)
        serve(engine, [base], Params(max_tokens=1, temperature=0))
        found = []
        for turn in turns:
            (output,) = serve(engine, [turn], Params(max_tokens=4, temperature=0, logprobs=0))
            assert output.cached >= 1472 or turn is turns[2]
            assert output.logprobs is not None
            given = torch.tensor([entry.logprob for entry in output.logprobs], dtype=torch.float64)
            found.append((given - scores(exact, [*turn, *output.tokens], len(turn))).abs())
        errors[graphs] = torch.cat(found)
    print({graphs: (round(e.median().item(), 4), round(e.max().item(), 4)) for graphs, e in errors.items()})
    assert errors[64].median() <= 2 * errors[0].median() + 0.01
    assert errors[64].max() <= 2 * errors[0].max() + 0.05


def test_prompts_come_back_from_the_host() -> None:
    """One at a time, so that both engines compute the same batches: what came back gives the tokens of what stayed."""
    model, _ = models()
    params = Params(max_tokens=8, temperature=0)
    prompts = [prompt(129 + 13 * i, 50 + i, VOCABULARY) for i in range(6)]
    wide = make(model, False, 900, graphs=0, slots=1)
    state = wide.cache.geometry.state_pages
    narrow = make(model, False, 2 * state + 12, graphs=0, host_pages=9 * state, slots=1)
    for turn in range(3):
        for start in prompts:
            (kept,), (moved,) = (serve(engine, [start], params) for engine in (wide, narrow))
            assert kept.tokens == moved.tokens
            assert (kept.cached, moved.cached) == ((0, 0) if turn == 0 else (128 if len(start) < 193 else 192,) * 2)
    assert narrow.cache.moved[1] > 0
