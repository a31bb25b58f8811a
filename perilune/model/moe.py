"""Feed-forward layers: the dense MLP and the (latent) mixture of experts of Kimi K3 and Kimi Linear.

Legend: T tokens, E experts, J experts a token, L width the experts work on (latent or model), F expert width,
R = T * J rows, D model width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from perilune.config import Activation, ModelConfig
from perilune.model.parts import Parts
from perilune.ops import few
from perilune.ops import moe as moe_ops
from perilune.ops.activation import glu
from perilune.ops.mx import BLOCK, fake_quantize
from perilune.ops.names import keep
from perilune.ops.norm import rms_norm


class DenseMlp(nn.Module):
    """down(glu(gate(x), up(x)))."""

    def __init__(self, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: torch.Tensor, parts: Parts) -> torch.Tensor:
        """x_TD -> y_TD."""
        if few.fits(x_TD, self.gate_proj.weight):
            a_TF = few.glu(x_TD, self.gate_proj.weight, self.up_proj.weight, self.activation)
            return parts.linear(a_TF, self.down_proj.weight)
        gate_TF, up_TF = parts.linear(x_TD, self.gate_proj.weight), parts.linear(x_TD, self.up_proj.weight)
        inputs = (keep("mlp.gate", gate_TF), keep("mlp.up", up_TF), self.activation)
        return parts.linear(keep("mlp.a", glu(*inputs), glu, *inputs), self.down_proj.weight)


class Router(nn.Module):
    """Sigmoid scores in float32; the bias only chooses, and only Quantile Balancing changes it."""

    bias_E: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.moe = config.moe
        self.weight = nn.Parameter(torch.empty(config.moe.num_experts, config.hidden_size))
        self.register_buffer("bias_E", torch.zeros(config.moe.num_experts))

    def forward(self, x_TD: torch.Tensor, parts: Parts) -> moe_ops.Routing:
        """x_TD -> the experts of each token and their weights."""
        logits_TE, _ = moe_ops.project(x_TD, self.weight, None, parts.linear)
        return moe_ops.route(
            logits_TE, self.bias_E, self.moe.top_k, self.moe.scaling_factor, renormalize=self.moe.renormalize
        )


class SparseMoe(nn.Module):
    """Routed experts, in a latent space where configured, plus the shared MLP.

    packed: the experts' weights are buffers of MXFP4 codes (`perilune.ops.moe.Packed`) and get no gradient.
    """

    gate_up_E2FL: torch.Tensor
    down_ELF: torch.Tensor

    def __init__(self, config: ModelConfig, packed: bool = False) -> None:
        super().__init__()
        moe, d = config.moe, config.hidden_size
        self.quant, self.packed = config.quant, packed
        self.activation, self.eps = config.activation, config.rms_norm_eps
        width = moe.latent_size or d
        self.router = Router(config)
        if moe.latent_size is not None:
            self.latent_down = nn.Linear(d, width, bias=False)
            self.latent_up = nn.Linear(width, d, bias=False)
        if moe.latent_norm:
            self.latent_norm = nn.Parameter(torch.empty(width))
        shapes = {
            "gate_up_E2FL": (moe.num_experts, 2 * moe.expert_size, width),
            "down_ELF": (moe.num_experts, width, moe.expert_size),
        }
        for name, (*rows, columns) in shapes.items():
            if packed:
                self.register_buffer(f"{name}_codes", torch.zeros(*rows, columns // 2, dtype=torch.uint8))
                self.register_buffer(f"{name}_scales", torch.zeros(*rows, columns // BLOCK, dtype=torch.uint8))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(*rows, columns)))
        self.shared = DenseMlp(d, moe.shared_size, config.activation)

    def forward(self, x_TD: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, moe_ops.Routing]:
        """x_TD -> (y_TD, the routing that was used)."""
        shared = parts.beside(lambda: self.shared(x_TD, parts), x_TD.device)
        routing = self.router(x_TD, parts)
        z_TL = parts.linear(x_TD, self.latent_down.weight) if hasattr(self, "latent_down") else x_TD
        experts = parts.experts
        if self.quant is not None and self.quant.activations != "none":
            z_TL = fake_quantize(z_TL, "mxfp8", self.quant.scale_rule)
            if self.quant.activations == "all":
                experts = partial(experts, inner_rule=self.quant.scale_rule)
        if z_TL is not x_TD:
            keep("moe.z", z_TL)
        y_TL = keep("moe.y", parts.mixture(z_TL, routing, self.weights(), self.activation, experts))
        if hasattr(self, "latent_norm"):
            of_y = (y_TL, self.latent_norm, self.eps)
            y_TL = keep("moe.normed", rms_norm(*of_y), rms_norm, *of_y)
        y_TD = parts.linear(y_TL, self.latent_up.weight) if hasattr(self, "latent_up") else y_TL
        return y_TD + shared(), routing

    def weights(self) -> moe_ops.Dense | moe_ops.Packed:
        """The experts' weights, as they are kept."""
        if self.packed:
            names = ("gate_up_E2FL_codes", "gate_up_E2FL_scales", "down_ELF_codes", "down_ELF_scales")
            return moe_ops.Packed(*(self.get_buffer(name) for name in names))
        return moe_ops.Dense(self.gate_up_E2FL, self.down_ELF)
