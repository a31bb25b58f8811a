"""The model against a second model written from the equations (plain.py), and both against the golden logits.

In float64 the two differ by rounding only: 1.6e-12 on logits of absmax 6 (k3-tiny), 1.6e-13 (k3-eps), so 1e-9 leaves
room for another machine; a wrong constant moves them by more than 1e-4 (the MLA norms' epsilon in k3-tiny: 4e-4).

The golden logits are float32. k3-tiny amplifies: rounding each operation once to float32, in whatever order, moves a
token's logits by 6e-5 in the median and by 4e-4 to 8e-4 at most. So a float32 program that adds in another order than
the golden one's is not expected within 2e-4 of it (none of some 250 orders was; the nearest: 3.1e-4). What can be asked
is that the golden logits are as far from float64 as those of other float32 programs are.
"""

from __future__ import annotations

import re
from functools import cache

import plain
import pytest
import torch
from models import GOLDENS
from safetensors.torch import load_file

from perilune import Sequences
from perilune.model import DEFAULT, EXACT, Parts, load

F32, F64 = torch.float32, torch.float64
QUANTILES = (0.5, 0.9, 0.99, 1.0)


@cache
def golden(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [2, T] and logits [2, T, V]."""
    tensors = load_file(GOLDENS / name / "golden.safetensors")
    return tensors["input_ids"], tensors["logits"]


@cache
def oracle(name: str, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return plain.logits(plain.Weights(GOLDENS / name, dtype), golden(name)[0])


@cache
def perilune(name: str, dtype: torch.dtype, parts: Parts = DEFAULT) -> torch.Tensor:
    ids_BT = golden(name)[0]
    with torch.inference_mode():
        logits_TV = load(GOLDENS / name, dtype=dtype, parts=parts)(
            ids_BT.flatten(), Sequences.from_lengths([ids_BT.shape[1]] * ids_BT.shape[0])
        )
    return logits_TV.view(*ids_BT.shape, -1)


def token_errors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Maximum over the vocabulary for each token."""
    return (a.double() - b.double()).abs().amax(-1).flatten()


@pytest.mark.parametrize("name", ["k3-tiny", "k3-eps"])
@pytest.mark.parametrize("parts", [DEFAULT, EXACT], ids=["default", "exact"])
def test_the_same_function_in_float64(name: str, parts: Parts) -> None:
    assert perilune(name, F64, parts).dtype == oracle(name, F64).dtype == F64
    assert token_errors(perilune(name, F64, parts), oracle(name, F64)).max() <= 1e-9


def test_float32_oracle_gives_the_golden_logits_of_the_short_model() -> None:
    """6 layers amplify less: 2.6e-5 here."""
    assert token_errors(oracle("k3-eps", F32), golden("k3-eps")[1]).max() <= 2e-4


@pytest.mark.parametrize("name", ["k3-tiny", "k3-eps"])
def test_golden_is_as_far_from_float64_as_float32_programs_are(name: str) -> None:
    """Measured ratios of the quantiles to the programs': 0.5 to 1.8; the last tokens of 300 scatter most."""
    levels = torch.tensor(QUANTILES, dtype=F64)
    programs = [oracle(name, F32), perilune(name, F32), perilune(name, F32, EXACT)]
    noise = torch.stack([torch.quantile(token_errors(x, oracle(name, F64)), levels) for x in programs])
    distance = torch.quantile(token_errors(golden(name)[1], oracle(name, F64)), levels)
    room = torch.tensor([1.5, 1.5, 2.5, 4.0], dtype=F64)
    assert (distance <= room * noise.amax(0)).all(), (distance, noise)
    assert (distance >= noise.amin(0) / room).all(), (distance, noise)
    assert torch.equal(golden(name)[1].argmax(-1), oracle(name, F64).argmax(-1))


def test_a_small_wrong_constant_is_far_outside_the_noise() -> None:
    """0.4 % of the bound of SiTU's linear half moves the median token by 36 times the golden one's rounding."""
    weights = plain.Weights(GOLDENS / "k3-tiny", F64)
    weights.config["activation_situ_linear_beta"] *= 1.004
    ids_BT, expected = golden("k3-tiny")
    with torch.inference_mode():
        wrong = token_errors(plain.logits(weights, ids_BT), expected).median()
    assert wrong > 10 * token_errors(oracle("k3-tiny", F64), expected).median()


# perilune's parameter -> the oracle's tensors it holds; {0} is the layer's prefix.
GRADIENTS = {
    r"embed.weight": ["model.embed_tokens"],
    r"lm_head.weight": ["lm_head"],
    r"norm_D": ["model.norm"],
    r"output_res\.norm_D": ["model.output_attn_res_norm"],
    r"output_res\.query_D": ["model.output_attn_res_proj"],
    r"layers\.\d+\.attn_norm_D": ["{0}input_layernorm"],
    r"layers\.\d+\.ffn_norm_D": ["{0}post_attention_layernorm"],
    r"layers\.\d+\.attn_res\.norm_D": ["{0}self_attention_res_norm"],
    r"layers\.\d+\.attn_res\.query_D": ["{0}self_attention_res_proj"],
    r"layers\.\d+\.ffn_res\.norm_D": ["{0}mlp_res_norm"],
    r"layers\.\d+\.ffn_res\.query_D": ["{0}mlp_res_proj"],
    r"layers\.\d+\.attn\.((?!kv_a)\w+_proj)\.weight": ["{0}self_attn.{1}"],
    r"layers\.\d+\.attn\.kv_a_proj\.weight": ["{0}self_attn.kv_a_proj_with_mqa"],
    r"layers\.\d+\.attn\.(q|kv)_a_norm": ["{0}self_attn.{1}_a_layernorm"],
    r"layers\.\d+\.attn\.conv_CW": [f"{{0}}self_attn.{x}_conv1d" for x in "qkv"],
    r"layers\.\d+\.attn\.A_log_H": ["{0}self_attn.A_log"],
    r"layers\.\d+\.attn\.dt_bias_HK": ["{0}self_attn.dt_bias"],
    r"layers\.\d+\.attn\.o_norm_K": ["{0}self_attn.o_norm"],
    r"layers\.\d+\.ffn\.(\w+_proj)\.weight": ["{0}mlp.{1}"],
    r"layers\.\d+\.ffn\.latent_norm": ["{0}block_sparse_moe.routed_expert_norm"],
    r"layers\.\d+\.ffn\.latent_(down|up)\.weight": ["{0}block_sparse_moe.routed_expert_{1}_proj"],
    r"layers\.\d+\.ffn\.router\.weight": ["{0}block_sparse_moe.gate"],
    r"layers\.\d+\.ffn\.shared\.(\w+)\.weight": ["{0}block_sparse_moe.shared_experts.{1}"],
    r"layers\.\d+\.ffn\.gate_up_E2FL": [
        f"{{0}}block_sparse_moe.experts.{e}.{x}" for e in range(8) for x in ("w1", "w3")
    ],
    r"layers\.\d+\.ffn\.down_ELF": [f"{{0}}block_sparse_moe.experts.{e}.w2" for e in range(8)],
}


def test_the_same_gradients_in_float64() -> None:
    """Of every weight, for a random direction of the logits: 1e-13 of the largest component; 1e-9 asked."""
    folder, lengths = GOLDENS / "k3-eps", [70, 70]
    ids_BT = golden("k3-eps")[0][:, :70]
    weights, model = plain.Weights(folder, F64), load(folder, dtype=F64)
    for tensor in weights.tensors.values():
        tensor.requires_grad_()
    expected = plain.logits(weights, ids_BT)
    direction = torch.randn(expected.shape, dtype=F64)
    (expected * direction).sum().backward()
    (model(ids_BT.flatten(), Sequences.from_lengths(lengths)).view_as(expected) * direction).sum().backward()
    for name, parameter in model.named_parameters():
        pattern = next(p for p in GRADIENTS if re.fullmatch(p, name))
        groups = re.fullmatch(pattern, name).groups()  # type: ignore[union-attr]
        layer = "model." + ".".join(name.split(".")[:2]) + "."
        parts = [weights[stored.format(layer, *groups)].grad for stored in GRADIENTS[pattern]]
        if parameter.grad is None:  # The first layer mixes nothing: it has no use for these.
            assert name.startswith("layers.0.attn_res")
            assert parts == [None]
            continue
        gradient = torch.cat([part.flatten(1) if part.dim() > 1 else part for part in parts if part is not None])
        actual = parameter.grad.reshape(-1)
        wanted = gradient.reshape(-1)[: actual.numel()]  # A_log is stored with padding.
        assert (actual - wanted).abs().max() <= 1e-9 * wanted.abs().max(), name
