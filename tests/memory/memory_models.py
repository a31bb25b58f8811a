"""A small K3-shaped model with its batch, and what a step under a plan gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from perilune import ModelConfig, Transformer
from perilune.memory import Memory
from perilune.model import initialize
from perilune.ops.sequences import Sequences

CPU = torch.device("cpu")
# The gradients of these weights are made of q, k and v, and of the attention outputs.
QKV = ("q_proj", "k_proj", "v_proj", "conv_CW", "q_b_proj", "kv_b_proj")


def small_config(layers: int = 4) -> ModelConfig:
    """Every fourth layer MLA, the others KDA; AttnRes blocks of two, the first MLP dense, mixtures behind it."""
    k3 = ModelConfig.from_pretrained("kimi-k3")
    mla = dataclasses.replace(
        k3.mla,
        layers=tuple(range(3, layers, 4)),
        num_heads=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    return dataclasses.replace(
        k3,
        vocab_size=64,
        hidden_size=32,
        num_layers=layers,
        intermediate_size=48,
        kda=dataclasses.replace(k3.kda, layers=tuple(i for i in range(layers) if i % 4 != 3), num_heads=2, head_dim=16),
        mla=mla,
        moe=dataclasses.replace(k3.moe, num_experts=8, top_k=2, expert_size=16, latent_size=16),
        attn_res=dataclasses.replace(k3.attn_res, block_size=2),
        quant=None,
    )


class World:
    """The model, 75 tokens in three documents, and its loss."""

    def __init__(self, dtype: torch.dtype = torch.float32, layers: int = 4) -> None:
        self.model = initialize(Transformer(small_config(layers)), 0).to(dtype)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                # Everything random, queries and norms too, so that every path has a gradient.
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(dtype))
        self.tokens = torch.randint(0, 64, (75,), generator=generator)
        self.sequences = Sequences.from_lengths([20, 0, 55])
        self.weights = [
            *self.model.parameters(), *self.model.buffers(), self.tokens, self.sequences.cu_seqlens
        ]  # fmt: skip

    def forward(self) -> torch.Tensor:
        logits = self.model(self.tokens, self.sequences)
        return (logits.float().logsumexp(-1) - logits[:, 5].float()).mean()

    def step(self, memory: Memory | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, gradients); with memory None outside of any plan."""
        self.model.zero_grad(set_to_none=True)
        if memory is None:
            loss = self.forward()
            loss.backward()
        else:
            with memory.step():
                loss = self.forward()
                loss.backward()
        return loss.detach(), {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def chain(memory: Memory, body: Callable[[], torch.Tensor]) -> torch.Tensor:
    """body() forward and backward under `memory`."""
    with memory.step():
        loss = body()
        loss.backward()
    return loss.detach()
