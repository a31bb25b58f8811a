"""Small random models that use every mechanism, for tests of the model room."""

import dataclasses
from pathlib import Path

import torch

from perilune import ModelConfig, Transformer
from perilune.model import initialize

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


def tiny_config(family: str = "kimi_k3") -> ModelConfig:
    """6 layers: KDA and MLA, dense and sparse, two AttnRes blocks (K3) or none (Kimi-Linear)."""
    if family == "kimi_k3":
        config = ModelConfig.from_pretrained(GOLDENS / "k3-eps")
        return dataclasses.replace(config, quant=None, rms_norm_eps=1e-5)
    linear = ModelConfig.from_pretrained("kimi-linear-48b-a3b")
    return dataclasses.replace(
        linear,
        vocab_size=257,
        hidden_size=48,
        num_layers=6,
        intermediate_size=96,
        kda=dataclasses.replace(linear.kda, layers=(0, 1, 3, 4), num_heads=3, head_dim=16),
        mla=dataclasses.replace(
            linear.mla,
            layers=(2, 5),
            num_heads=3,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
        moe=dataclasses.replace(linear.moe, num_experts=8, top_k=3, expert_size=32),
        hf_present=None,
        hf_extra={},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def tiny_model(family: str = "kimi_k3", dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    """Everything random (norm weights, router bias, AttnRes queries), at scales where every part matters."""
    model = initialize(Transformer(tiny_config(family)), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm_D", "o_norm_K", "_norm")):
                parameter.add_(0.1 * noise)
            elif name.endswith("query_D"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("A_log_H"):
                parameter.add_(0.3 * noise)
            elif parameter.dim() >= 2 and not name.endswith(("conv_CW", "dt_bias_HK")):
                parameter.mul_(2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("bias_E"):
                buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype)


def random_tokens(count: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """int64 [count]."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))
