"""What a model is: frozen dataclasses, read from and written to a Hugging Face config.json.

Fields that Perilune does not use are kept verbatim in `hf_extra`, so that reading and writing a config gives the
same JSON back. Source of the fields: the released config.json of Kimi-K3 (`kimi_k3` with `text_config`) and
Kimi-Linear (`kimi_linear`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perilune.errors import Error


@dataclass(frozen=True)
class Gate:
    """How KDA's raw gate becomes a log decay g (nats, <= 0).

    mode "safe": g = lower_bound * sigmoid(exp(A) * (x + dt_bias)), in (lower_bound, 0).
    mode "softplus": g = -exp(A) * softplus(x + dt_bias), unbounded below; lower_bound is None.
    """

    mode: Literal["safe", "softplus"]
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("safe", "softplus"):
            raise Error(f"gate.mode is {self.mode!r}; allowed: 'safe', 'softplus'")
        bound = self.lower_bound
        if self.mode == "safe" and not (isinstance(bound, int | float) and -5 <= bound < 0):
            raise Error(f"gate.lower_bound is {bound!r}; mode 'safe' needs a number in [-5, 0)")
        if self.mode == "softplus" and bound is not None:
            raise Error(f"gate.lower_bound is {bound!r}; mode 'softplus' has none")


@dataclass(frozen=True)
class Activation:
    """The gated unit of every MLP: "silu" (SwiGLU) or "situ" (SiTU-GLU with its two saturation levels)."""

    kind: Literal["silu", "situ"]
    beta: float = 4.0
    linear_beta: float = 25.0

    def __post_init__(self) -> None:
        if self.kind not in ("silu", "situ"):
            raise Error(f"activation.kind is {self.kind!r}; allowed: 'silu', 'situ'")
        _require_numbers({f"activation.{name}": getattr(self, name) for name in ("beta", "linear_beta")})


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention. layers are 0-based; key and value widths are both head_dim."""

    layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    gate: Gate
    conv_size: int = 4
    full_rank_gate: bool = True


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention without rotary embedding. layers are 0-based.

    norm_eps belongs to the two latent norms alone: the released code builds them with 1e-6, not rms_norm_eps.
    """

    layers: tuple[int, ...]
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    output_gate: bool = False
    norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: the nope part and the part that other models rotate."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoeConfig:
    """Sparse feed-forward. latent_size None means experts work on hidden_size (no down/up projection, no norm)."""

    num_experts: int
    top_k: int
    expert_size: int
    num_shared_experts: int
    latent_size: int | None = None
    latent_norm: bool = False
    scaling_factor: float = 1.0
    renormalize: bool = True

    @property
    def shared_size(self) -> int:
        """Width of the one MLP that holds all shared experts."""
        return self.expert_size * self.num_shared_experts


@dataclass(frozen=True)
class AttnResConfig:
    """Block attention residuals: a new block starts at every block_size-th layer."""

    block_size: int


# Of sizes and counts: ids of tokens, slots and pages are int32.
LARGEST = 2**31 - 1
SCALE_RULES = ("even", "floor", "rceil", "ceil")
QUANTIZED_ACTIVATIONS = ("none", "inputs", "all")


@dataclass(frozen=True)
class QuantConfig:
    """The numbers of routed experts: stored, served and, with `train.qat`, trained in.

    scale_rule: how a block's scale is chosen (`perilune.ops.mx`), for weights and activations.
    activations: what is MXFP8 besides: "none", the "inputs" of the experts, or "all": inputs and what stands between
    the two products. Their weights are MXFP4 in any case.
    hf: the checkpoint's quantization_config without our own keys.
    """

    format: Literal["mxfp4-pack-quantized"] = "mxfp4-pack-quantized"
    group_size: int = 32
    scale_rule: Literal["even", "floor", "rceil", "ceil"] = "even"
    activations: Literal["none", "inputs", "all"] = "none"
    hf: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """One Kimi-K3-shaped or Kimi-Linear-shaped language model.

    family: "kimi_k3" (fields under text_config, tensors prefixed `language_model.`) or "kimi_linear".
    dense_layers: the first so many layers have a dense MLP of intermediate_size, the others are sparse.
    hf_extra: unused Hugging Face fields of the three levels ("top", "text", "linear_attn"), kept verbatim.
    hf_present: which of the fields we do use the source file had; None for a config made in Python.

    Raises Error where sizes contradict each other.
    """

    family: Literal["kimi_k3", "kimi_linear"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    activation: Activation
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    attn_res: AttnResConfig | None = None
    quant: QuantConfig | None = None
    dense_layers: int = 1
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    bos_token_id: int = 0
    eos_token_id: int = 0
    pad_token_id: int = 0
    hf_extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hf_present: frozenset[str] | None = None

    def __post_init__(self) -> None:
        _check(self)

    def is_mla(self, layer: int) -> bool:
        """Whether 0-based `layer` is full attention (MLA); the others are KDA."""
        return layer in self.mla.layers

    def is_sparse(self, layer: int) -> bool:
        """Whether 0-based `layer` has a mixture of experts."""
        return layer >= self.dense_layers

    @property
    def sparse_layers(self) -> range:
        """0-based indices of the layers with experts."""
        return range(self.dense_layers, self.num_layers)

    def starts_block(self, layer: int) -> bool:
        """Whether an AttnRes block begins at 0-based `layer`."""
        return self.attn_res is not None and layer % self.attn_res.block_size == 0

    @property
    def vision(self) -> Mapping[str, Any] | None:
        """The vision_config of a multimodal checkpoint, verbatim; Perilune skips its tensors."""
        vision: Mapping[str, Any] | None = self.hf_extra.get("top", {}).get("vision_config")
        return vision

    @classmethod
    def from_pretrained(cls, source: str | Path) -> ModelConfig:
        """Read a preset by name ("kimi-k3", "kimi-linear-48b-a3b", "mini", "nano"), a checkpoint folder or a file.

        Raises Error for a missing or malformed file, a model_type or option that is not supported, an unknown
        `perilune_*` key, or sizes that contradict each other.
        """
        path = _locate(source)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise Error(f"config {str(path)!r} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise Error(f"config {str(path)!r} is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise Error(f"config {str(path)!r} holds a {type(data).__name__}; must be a JSON object")
        return cls.from_hf(data)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Build from the contents of a Hugging Face config.json. Raises Error as `from_pretrained`."""
        from perilune.config_hf import parse

        return parse(data)

    def to_hf(self) -> dict[str, Any]:
        """The contents of a Hugging Face config.json; equal to what `from_hf` was given."""
        from perilune.config_hf import render

        return render(self)


PRESETS = ("kimi-k3", "kimi-linear-48b-a3b", "mini", "nano")


def _locate(source: str | Path) -> Path:
    if str(source) in PRESETS:
        return Path(__file__).parent / "presets" / f"{source}.json"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise Error(f"config {str(source)!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with config.json")
    return path


def _check(config: ModelConfig) -> None:
    kda, mla, moe = config.kda, config.mla, config.moe
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "kda.num_heads": kda.num_heads,
        "kda.head_dim": kda.head_dim,
        "mla.num_heads": mla.num_heads,
        "mla.kv_lora_rank": mla.kv_lora_rank,
        "mla.qk_nope_head_dim": mla.qk_nope_head_dim,
        "mla.qk_rope_head_dim": mla.qk_rope_head_dim,
        "mla.v_head_dim": mla.v_head_dim,
        "moe.num_experts": moe.num_experts,
        "moe.top_k": moe.top_k,
        "moe.expert_size": moe.expert_size,
        "moe.num_shared_experts": moe.num_shared_experts,
        "max_position_embeddings": config.max_position_embeddings,
    }
    if mla.q_lora_rank is not None:
        sizes["mla.q_lora_rank"] = mla.q_lora_rank
    if moe.latent_size is not None:
        sizes["moe.latent_size"] = moe.latent_size
    if config.attn_res is not None:
        sizes["attn_res.block_size"] = config.attn_res.block_size
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise Error(f"{name} is {value!r}; must be an integer >= 1")
        if value > LARGEST:
            raise Error(f"{name} is {value}; must be at most {LARGEST}")
    numbers = {
        "rms_norm_eps": config.rms_norm_eps,
        "mla.norm_eps": mla.norm_eps,
        "initializer_range": config.initializer_range,
        "moe.scaling_factor": moe.scaling_factor,
    }
    _require_numbers(numbers)
    for name, flag in (
        ("kda.full_rank_gate", kda.full_rank_gate),
        ("mla.output_gate", mla.output_gate),
        ("moe.latent_norm", moe.latent_norm),
        ("moe.renormalize", moe.renormalize),
    ):
        if not isinstance(flag, bool):
            raise Error(f"{name} is {flag!r}; must be true or false")
    layers = kda.layers + mla.layers
    if len(layers) != config.num_layers or sorted(layers) != list(range(config.num_layers)):
        raise Error(
            f"kda.layers and mla.layers (0-based {list(kda.layers)} and {list(mla.layers)}) must cover each of "
            f"num_layers = {config.num_layers} layers exactly once"
        )
    if not 1 <= moe.top_k <= moe.num_experts:
        raise Error(f"moe.top_k is {moe.top_k}; must be between 1 and moe.num_experts = {moe.num_experts}")
    if type(config.dense_layers) is not int or not 0 <= config.dense_layers <= config.num_layers:
        raise Error(f"dense_layers is {config.dense_layers!r}; must be between 0 and num_layers = {config.num_layers}")
    if kda.conv_size != 4:
        raise Error(f"kda.conv_size is {kda.conv_size}; only 4 is supported")
    if moe.latent_norm and moe.latent_size is None:
        raise Error("moe.latent_norm is true but moe.latent_size is None; the norm acts on the latent width")
    if config.quant is not None:
        _check_quant(config.quant)
        wide = ("hidden_size", config.hidden_size) if moe.latent_size is None else ("moe.latent_size", moe.latent_size)
        for name, size in (("moe.expert_size", moe.expert_size), wide):
            if size % config.quant.group_size:
                raise Error(f"{name} is {size}; must be a multiple of quant.group_size = {config.quant.group_size}")


def _check_quant(quant: QuantConfig) -> None:
    for key, allowed in (
        ("format", ("mxfp4-pack-quantized",)),
        ("group_size", (32,)),
        ("scale_rule", SCALE_RULES),
        ("activations", QUANTIZED_ACTIVATIONS),
    ):
        if getattr(quant, key) not in allowed:
            raise Error(f"quant.{key} is {getattr(quant, key)!r}; allowed: {', '.join(map(str, allowed))}")


def _require_numbers(numbers: Mapping[str, Any]) -> None:
    """Raise Error for what is no finite number > 0."""
    for name, number in numbers.items():
        # An int may be larger than any float.
        if type(number) not in (int, float) or not 0 < number <= sys.float_info.max:
            raise Error(f"{name} is {number!r}; must be a finite number > 0")


__all__ = [
    "PRESETS",
    "QUANTIZED_ACTIVATIONS",
    "SCALE_RULES",
    "Activation",
    "AttnResConfig",
    "Gate",
    "KdaConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "QuantConfig",
]
