"""Starting weights, and which parameters Muon orthogonalises, by parameter name.

Sources: Kimi Linear report (A_log, dt_bias), Kimi K3 report (zero AttnRes queries, per-head Muon for q, k, v).
"""

from __future__ import annotations

import math

import torch

from perilune.model.transformer import Transformer


@torch.no_grad()
def initialize(model: Transformer, seed: int = 0) -> Transformer:
    """Fill every weight of `model` from one seed, in place; the same numbers on every device. Returns the model."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        value = torch.empty(parameter.shape, dtype=torch.float32)
        if leaf in ("attn_norm_D", "ffn_norm_D", "norm_D", "o_norm_K", "q_a_norm", "kv_a_norm", "latent_norm"):
            value.fill_(1.0)
        elif leaf == "query_D":
            value.zero_()
        elif leaf == "A_log_H":
            if config.kda.gate.mode == "safe":
                value.zero_()
            else:
                value.uniform_(1.0, 16.0, generator=generator).log_()
        elif leaf == "dt_bias_HK":
            low, high = math.log(1e-3), math.log(1e-1)
            dt = value.uniform_(low, high, generator=generator).exp_()
            # Inverse of softplus, so that the first decays are dt.
            value.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif leaf == "conv_CW":
            limit = parameter.shape[1] ** -0.5
            value.uniform_(-limit, limit, generator=generator)
        else:
            value.normal_(0.0, config.initializer_range, generator=generator)
        parameter.copy_(value)
    for name, buffer in model.named_buffers():
        if name.endswith("bias_E"):
            buffer.zero_()
    return model


NOT_MUON = ("embed.weight", "lm_head.weight")


def muon_heads(model: Transformer) -> dict[str, int]:
    """Parameter name -> number of equal row blocks that Muon orthogonalises apart; absent names go to AdamW.

    Projections to q, k and v are split by head (K3 report); kv_b holds k and v rows of each head, so it has two
    blocks a head where both are equally wide. Three-dimensional parameters are one matrix an expert, 1 block each.
    """
    kda, mla = model.config.kda, model.config.mla
    kv_blocks = 2 if mla.qk_nope_head_dim == mla.v_head_dim else 1
    per_head = {
        "q_b_proj": mla.num_heads,
        "kv_b_proj": mla.num_heads * kv_blocks,
        "k_proj": kda.num_heads,
        "v_proj": kda.num_heads,
    }
    heads: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name in NOT_MUON or name.endswith(("conv_CW", "dt_bias_HK")):
            continue
        module = name.split(".")[-2]
        if module == "q_proj":
            layer = int(name.split(".")[1])
            heads[name] = mla.num_heads if model.config.is_mla(layer) else kda.num_heads
        else:
            heads[name] = per_head.get(module, 1)
    return heads
