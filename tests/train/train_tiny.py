"""The tiny model and the invented text of the train room's tests."""

from __future__ import annotations

import random
from typing import Any

from perilune.config import ModelConfig

VOCAB = 320


def invented_text(seed: int, words: int = 400) -> str:
    """Sentences of a small language: learnable, the same on every machine."""
    rng = random.Random(seed)
    nouns, verbs = ["moon", "tide", "crater", "signal", "orbit"], ["pulls", "marks", "hides", "follows"]
    return ". ".join(f"the {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)}" for _ in range(words // 5))


def tiny_model() -> dict[str, Any]:
    """The Hugging Face config of the tiny model: 4 layers (KDA, KDA, KDA, MLA), 8 experts, AttnRes blocks of 2."""
    hf = ModelConfig.from_pretrained("nano").to_hf()
    hf["text_config"] |= {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "routed_expert_hidden_size": 16,
        "attn_res_block_size": 2,
    }
    hf["text_config"]["linear_attn_config"] |= {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 16,
        "num_heads": 2,
    }
    return hf
