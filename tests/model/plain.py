"""Kimi-K3's forward pass written from its equations in ordinary torch: the model tests' oracle.

It shares nothing with perilune: batched [B, T] tensors, released tensor names, its own MXFP4 decoder, KDA token by
token, attention with the whole score matrix, one expert after the other. Any dtype; all of it runs in that dtype.

Legend: B sequences of equal length, T tokens, D model, H heads, K key dim, V value dim, E experts, F expert width,
C channels of a convolution, W its width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

PREFIX = "language_model."
MLA_EPS = 1e-6  # The low-rank norms of MLA do not use rms_norm_eps.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [out, in/2] (low nibble first) and exponents uint8 [out, in/32] -> [out, in]."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)
    powers = torch.tensor([2.0 ** (e - 127) for e in range(256)], dtype=torch.float64)
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return (values[nibbles.long()] * powers[scale.long()].repeat_interleave(32, dim=1)).to(dtype)


class Weights:
    """The tensors of a released checkpoint in one dtype, by their name without `language_model.` and `.weight`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
        self.tensors: dict[str, torch.Tensor] = {}
        stored: dict[str, torch.Tensor] = {}
        for shard in sorted(folder.glob("model-*.safetensors")):
            stored.update(load_file(shard))
        for name, x in stored.items():
            key = name.removeprefix(PREFIX)
            if key.endswith(".weight_packed"):
                key = key.removesuffix("_packed")
                x = decode(x, stored[name.removesuffix("_packed") + "_scale"], dtype)
            if not key.endswith(".weight_scale"):
                self.tensors[key.removesuffix(".weight")] = x.to(dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return F.linear(x, self[name])

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        """RMSNorm over the last axis."""
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self[name]


def logits(w: Weights, ids_BT: torch.Tensor) -> torch.Tensor:
    """[B, T, vocabulary]: every sequence from its beginning."""
    config = w.config
    kda_layers = config["linear_attn_config"]["kda_layers"]
    partial_BTD = F.embedding(ids_BT, w["model.embed_tokens"])
    bank: list[torch.Tensor] = []
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h_BTD = mix(w, [*bank, partial_BTD], layer + "self_attention_res") if bank else partial_BTD
        boundary = i % config["attn_res_block_size"] == 0
        if boundary:
            bank.append(partial_BTD)
        attention = kda if i + 1 in kda_layers else mla
        a_BTD = attention(w, w.norm(h_BTD, layer + "input_layernorm"), layer + "self_attn.")
        partial_BTD = a_BTD if boundary else partial_BTD + a_BTD
        h_BTD = mix(w, [*bank, partial_BTD], layer + "mlp_res")
        x_BTD = w.norm(h_BTD, layer + "post_attention_layernorm")
        if i < config["first_k_dense_replace"]:
            partial_BTD = partial_BTD + mlp(w, x_BTD, layer + "mlp.")
        else:
            partial_BTD = partial_BTD + latent_moe(w, x_BTD, layer + "block_sparse_moe.")
    h_BTD = mix(w, [*bank, partial_BTD], "model.output_attn_res")
    return w.linear(w.norm(h_BTD, "model.norm"), "lm_head")


def mix(w: Weights, sources: list[torch.Tensor], name: str) -> torch.Tensor:
    """Attention over the sources [B, T, D] with a learned query; the sources themselves are summed, not their norms."""
    v_NBTD = torch.stack(sources)
    scores_NBT1 = w.linear(w.norm(v_NBTD, name + "_norm"), name + "_proj")
    return (torch.softmax(scores_NBT1, dim=0) * v_NBTD).sum(0)


def kda(w: Weights, x_BTD: torch.Tensor, name: str) -> torch.Tensor:
    """Gated delta rule with one decay per key channel: decay, erase and write, then read."""
    config = w.config["linear_attn_config"]
    H, K = int(config["num_heads"]), int(config["head_dim"])

    def convolved(kind: str) -> torch.Tensor:
        u_BCT = w.linear(x_BTD, f"{name}{kind}_proj").transpose(1, 2)
        w_C1W = w[f"{name}{kind}_conv1d"]
        y_BCT = F.conv1d(u_BCT, w_C1W, padding=w_C1W.shape[-1] - 1, groups=w_C1W.shape[0])
        y_BTC = F.silu(y_BCT[..., : x_BTD.shape[1]]).transpose(1, 2)
        return y_BTC.reshape(*y_BTC.shape[:2], H, K)

    def unit(y_BTHK: torch.Tensor) -> torch.Tensor:
        return y_BTHK * torch.rsqrt(y_BTHK.pow(2).sum(-1, keepdim=True) + 1e-6)

    q_BTHK, k_BTHK, v_BTHV = unit(convolved("q")) * K**-0.5, unit(convolved("k")), convolved("v")
    z_BTHK = w.linear(w.linear(x_BTD, name + "f_a_proj"), name + "f_b_proj") + w[name + "dt_bias"]
    rate_H1 = w[name + "A_log"][:H].exp().unsqueeze(-1)
    g_BTHK = config["gate_lower_bound"] * torch.sigmoid(rate_H1 * z_BTHK.unflatten(-1, (H, K)))
    beta_BTH = torch.sigmoid(w.linear(x_BTD, name + "b_proj"))

    state_BHKV = x_BTD.new_zeros(x_BTD.shape[0], H, K, K)
    outputs = []
    for t in range(x_BTD.shape[1]):
        k_BHK1 = k_BTHK[:, t].unsqueeze(-1)
        state_BHKV = state_BHKV * g_BTHK[:, t].exp().unsqueeze(-1)
        error_BHV = v_BTHV[:, t] - (state_BHKV * k_BHK1).sum(-2)
        write_BHV = beta_BTH[:, t].unsqueeze(-1) * error_BHV
        state_BHKV = state_BHKV + k_BHK1 * write_BHV.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, q_BTHK[:, t]))
    o_BTHV = w.norm(torch.stack(outputs, dim=1), name + "o_norm")
    gate_BTHV = w.linear(x_BTD, name + "g_proj").unflatten(-1, (H, K))
    return w.linear((o_BTHV * torch.sigmoid(gate_BTHV)).flatten(2), name + "o_proj")


def mla(w: Weights, x_BTD: torch.Tensor, name: str) -> torch.Tensor:
    """Latent attention without positions: the "rope" part of a key is shared by the heads and is not rotated."""
    config = w.config
    H, V = config["num_attention_heads"], config["v_head_dim"]
    nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    latent_BTR = w.norm(w.linear(x_BTD, name + "q_a_proj"), name + "q_a_layernorm", MLA_EPS)
    q_BHTK = w.linear(latent_BTR, name + "q_b_proj").unflatten(-1, (H, nope + rope)).transpose(1, 2)
    c_BTR, shared_BTK = w.linear(x_BTD, name + "kv_a_proj_with_mqa").split([rank, rope], dim=-1)
    kv_BTF = w.linear(w.norm(c_BTR, name + "kv_a_layernorm", MLA_EPS), name + "kv_b_proj")
    k_BHTK, v_BHTV = kv_BTF.unflatten(-1, (H, nope + V)).transpose(1, 2).split([nope, V], dim=-1)
    k_BHTK = torch.cat([k_BHTK, shared_BTK.unsqueeze(1).expand(-1, H, -1, -1)], dim=-1)
    T = x_BTD.shape[1]
    future_TT = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores_BHTT = q_BHTK @ k_BHTK.transpose(2, 3) * (nope + rope) ** -0.5
    p_BHTT = torch.softmax(scores_BHTT.masked_fill(future_TT, float("-inf")), dim=-1)
    o_BTF = (p_BHTT @ v_BHTV).transpose(1, 2).flatten(2)
    return w.linear(o_BTF * torch.sigmoid(w.linear(x_BTD, name + "g_proj")), name + "o_proj")


def situ(w: Weights, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Smoothly bounded SwiGLU."""
    bound, linear_bound = float(w.config["activation_situ_beta"]), float(w.config["activation_situ_linear_beta"])
    return bound * torch.tanh(gate / bound) * torch.sigmoid(gate) * (linear_bound * torch.tanh(up / linear_bound))


def mlp(
    w: Weights, x: torch.Tensor, name: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> torch.Tensor:
    """Gated MLP, [..., D] -> [..., D]."""
    gate, up, down = (name + part for part in names)
    return w.linear(situ(w, w.linear(x, gate), w.linear(x, up)), down)


def latent_moe(w: Weights, x_BTD: torch.Tensor, name: str) -> torch.Tensor:
    """Routed experts in the latent space (normalised after their sum) plus the shared MLP on the full input."""
    x_SD = x_BTD.flatten(0, 1)
    scores_SE = torch.sigmoid(w.linear(x_SD, name + "gate"))
    ids_SJ = (scores_SE + w[name + "gate.e_score_correction_bias"]).topk(w.config["num_experts_per_token"]).indices
    picked_SJ = scores_SE.gather(1, ids_SJ)
    weights_SJ = picked_SJ / (picked_SJ.sum(-1, keepdim=True) + 1e-20) * w.config["routed_scaling_factor"]
    latent_SL = w.linear(x_SD, name + "routed_expert_down_proj")
    sum_SL = torch.zeros_like(latent_SL)
    for expert in range(w.config["num_experts"]):
        rows, slots = (ids_SJ == expert).nonzero(as_tuple=True)
        y_RL = mlp(w, latent_SL[rows], f"{name}experts.{expert}.", ("w1", "w3", "w2"))
        sum_SL.index_add_(0, rows, y_RL * weights_SJ[rows, slots].unsqueeze(-1))
    routed_SD = w.linear(w.norm(sum_SL, name + "routed_expert_norm"), name + "routed_expert_up_proj")
    return routed_SD.view_as(x_BTD) + mlp(w, x_BTD, name + "shared_experts.")
