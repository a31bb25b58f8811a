"""The K3-shaped slice of the memory benches, and a step of it under a plan."""

import dataclasses
import time
from statistics import median
from typing import Any

import torch
from memory_device import CUDA, DEVICE, allocated, peak, wait
from memory_selective import Selective

from perilune import ModelConfig, Transformer
from perilune.memory import Memory, MemoryStore, Plan, Store
from perilune.memory.fit import working_set
from perilune.memory.manager import AHEAD
from perilune.memory.pinned import PinnedStore
from perilune.memory.profile import Profile, profile
from perilune.memory.waits import Waits
from perilune.ops.sequences import Sequences

# Width, heads, the experts' latent and own width, width of the dense MLP. `tiny` is to try the scripts on a CPU.
SIZES = {
    "full": (7168, 96, 3584, 3072, 33792),
    "reduced": (2048, 28, 1024, 896, 8192),
    "tiny": (64, 1, 32, 32, 96),
}
QKV = ("q_proj", "k_proj", "v_proj", "conv_CW", "q_b_proj", "kv_b_proj")
FP32 = ("A_log_H", "dt_bias_HK")


def slice_config(size: str, layers: int, experts: int) -> ModelConfig:
    k3 = ModelConfig.from_pretrained("kimi-k3")
    d, heads, latent, width, dense = SIZES[size]
    return dataclasses.replace(
        k3,
        vocab_size=8192,
        hidden_size=d,
        num_layers=layers,
        intermediate_size=dense,
        kda=dataclasses.replace(k3.kda, layers=tuple(i for i in range(layers) if i % 4 != 3), num_heads=heads),
        mla=dataclasses.replace(k3.mla, layers=tuple(range(3, layers, 4)), num_heads=heads),
        moe=dataclasses.replace(k3.moe, num_experts=experts, latent_size=latent, expert_size=width),
        attn_res=dataclasses.replace(k3.attn_res, block_size=2),
        quant=None,
    )


def build(config: ModelConfig) -> Transformer:
    """Random weights and zero gradients, made on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = Transformer(config)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name.endswith(FP32) else torch.bfloat16)
        if parameter.dim() > 1:
            parameter.data.normal_(0, config.initializer_range)
        else:
            parameter.data.fill_(0.0 if name.endswith("A_log_H") else 1.0)
        parameter.grad = torch.zeros_like(parameter)
    for name, buffer in model.named_buffers():
        assert name.endswith("bias_E")
        buffer.data = torch.zeros_like(buffer, dtype=torch.float32)
    return model


class Bench:
    """The model with one batch; `step` runs it under a plan and notes time and memory."""

    def __init__(self, model: Transformer, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model, self.device = model, DEVICE
        self.tokens = torch.randint(0, 8192, (tokens,), generator=generator).to(self.device)
        lengths = [tokens // 2, tokens - tokens // 2]
        self.sequences = Sequences.from_lengths(lengths, device=self.device)
        self.weights = [*model.parameters(), *model.buffers(), self.tokens, self.sequences.cu_seqlens]
        self.host: Store = PinnedStore(DEVICE) if CUDA else MemoryStore()
        self.ahead = AHEAD

    def loss(self) -> torch.Tensor:
        x_TD = self.model.hidden(self.tokens, self.sequences).x_TD
        # Weighted, as the norm's own mean square has no gradient.
        return (x_TD.float() * torch.linspace(-1, 1, x_TD.shape[1], device=self.device)).square().mean()

    def profile(self) -> Profile:
        return profile(self.loss, self.weights, self.device)

    def manager(self, plan: Plan | Selective) -> Any:
        if isinstance(plan, Selective):
            return plan
        memory = Memory(plan, self.weights, host=self.host)
        memory.ahead = self.ahead
        return memory

    def step(
        self, plan: Plan | Selective, scale: float = 1.0, waits: Waits | None = None
    ) -> tuple[dict[str, float], torch.Tensor, Any]:
        """({"ms", "peak", "kept"}, loss, the manager); scale: of the loss in the backward pass."""
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        memory = self.manager(plan)
        memory.waits = waits
        wait()
        base = allocated()
        peak(forget=True)
        begin = time.perf_counter()
        with memory.step():
            value = self.loss()
            # Tensors whose copy out is under way are still allocated here.
            kept = allocated() - base
            (scale * value).backward()
        wait()
        ms = 1e3 * (time.perf_counter() - begin)
        return {"ms": ms, "peak": peak() - base, "kept": kept}, value.detach(), memory

    def working(self, noted: Profile) -> int:
        """As `perilune.memory.fit.working_set`."""
        return working_set(self.loss, self.weights, noted, self.device) if CUDA else 0

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies; of the experts', which are most of the bytes, sums over their bits."""
        found = {}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            if parameter.dim() > 2:
                found[name] = parameter.grad.view(torch.int16).sum(dtype=torch.int64)
            else:
                found[name] = parameter.grad.clone()
        return found


def compare(got: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, Any]:
    """How many gradients differ in a bit, and the worst relative error (Frobenius) with its weight."""
    different = sum(not torch.equal(g, reference[n]) for n, g in got.items())
    errors = {}
    for n, g in got.items():
        if g.is_floating_point():
            exact = reference[n].float()
            errors[n] = float((g.float() - exact).norm() / (exact.norm() + 1e-30))
    worst = dict(sorted(errors.items(), key=lambda e: -e[1])[:3])
    for kind, parts in (("qkv", QKV), ("o", ("o_proj",))):
        worst |= {kind: max(e for n, e in errors.items() if any(part in n for part in parts))}
    return {"gradients_different": different, "worst_gradients": worst, "median_gradient": median(errors.values())}
