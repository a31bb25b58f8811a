"""How a parameter is cut over the ranks of a tensor-parallel group; training and serving read this one table.

A rank holds whole heads of attention and equal runs of rows or columns elsewhere, so a cut commutes with everything
that is done head by head or channel by channel. A product with weights cut along their rows (dim 0) gives the rank's
columns of the output; one with weights cut along their columns (dim 1) gives a term of the output's sum over ranks.

Legend of sizes: H heads, K head dim, F inner width, L width the experts work on, V vocabulary, D model width.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from perilune.config import ModelConfig
from perilune.errors import Error

# Modules that are cut or left whole together.
Group = Literal["attention", "mlp", "shared", "latent", "experts", "vocabulary"]
GROUPS: tuple[Group, ...] = ("attention", "mlp", "shared", "latent", "experts", "vocabulary")


@dataclass(frozen=True)
class Cut:
    """group: with whose others it is cut. dim: which dim; it holds `blocks` equal blocks one after the other, each of
    `unit` indivisible pieces (the name of a size of `ModelConfig`), and a rank holds its run of pieces of every block.
    """

    group: Group
    dim: int
    unit: str
    blocks: int = 1

    def pieces(self, config: ModelConfig) -> int:
        """How many pieces a block has."""
        count: int = operator.attrgetter(self.unit)(config)
        return count


# Module kind -> end of the parameter's name -> its cut; None: whole on every rank.
TABLE: dict[str, dict[str, Cut | None]] = {
    "model": {
        "embed.weight": Cut("vocabulary", 0, "vocab_size"),  # [V, D]
        "lm_head.weight": Cut("vocabulary", 0, "vocab_size"),
        "norm_D": None,
        "output_res.norm_D": None,
        "output_res.query_D": None,
    },
    "layer": {
        "attn_norm_D": None,
        "ffn_norm_D": None,
        "attn_res.norm_D": None,
        "attn_res.query_D": None,
        "ffn_res.norm_D": None,
        "ffn_res.query_D": None,
    },
    "kda": {
        "q_proj.weight": Cut("attention", 0, "kda.num_heads"),  # [H K, D]
        "k_proj.weight": Cut("attention", 0, "kda.num_heads"),
        "v_proj.weight": Cut("attention", 0, "kda.num_heads"),
        "conv_CW": Cut("attention", 0, "kda.num_heads", blocks=3),  # q, k, v
        "f_a_proj.weight": None,
        "f_b_proj.weight": Cut("attention", 0, "kda.num_heads"),
        "b_proj.weight": Cut("attention", 0, "kda.num_heads"),  # [H, D]
        "A_log_H": Cut("attention", 0, "kda.num_heads"),
        "dt_bias_HK": Cut("attention", 0, "kda.num_heads"),
        "g_proj.weight": Cut("attention", 0, "kda.num_heads"),
        "g_a_proj.weight": None,
        "g_b_proj.weight": Cut("attention", 0, "kda.num_heads"),
        "o_norm_K": None,  # shared by all heads
        "o_proj.weight": Cut("attention", 1, "kda.num_heads"),  # [D, H K]
    },
    "mla": {
        "q_proj.weight": Cut("attention", 0, "mla.num_heads"),
        "q_a_proj.weight": None,
        "q_a_norm": None,
        "q_b_proj.weight": Cut("attention", 0, "mla.num_heads"),
        "kv_a_proj.weight": None,
        "kv_a_norm": None,
        "kv_b_proj.weight": Cut("attention", 0, "mla.num_heads"),  # [H (P + V), R], a head's key rows, then value rows
        "g_proj.weight": Cut("attention", 0, "mla.num_heads"),
        "o_proj.weight": Cut("attention", 1, "mla.num_heads"),
    },
    "dense": {
        "gate_proj.weight": Cut("mlp", 0, "intermediate_size"),  # [F, D]
        "up_proj.weight": Cut("mlp", 0, "intermediate_size"),
        "down_proj.weight": Cut("mlp", 1, "intermediate_size"),  # [D, F]
    },
    "sparse": {
        "router.weight": None,
        "router.bias_E": None,
        "latent_down.weight": Cut("latent", 0, "moe.latent_size"),  # [L, D]; its output is gathered
        "latent_norm": None,
        "latent_up.weight": Cut("latent", 1, "moe.latent_size"),  # [D, L]
        "gate_up_E2FL": Cut("experts", 1, "moe.expert_size", blocks=2),  # gate rows, then up rows
        "down_ELF": Cut("experts", 2, "moe.expert_size"),
        "shared.gate_proj.weight": Cut("shared", 0, "moe.shared_size"),
        "shared.up_proj.weight": Cut("shared", 0, "moe.shared_size"),
        "shared.down_proj.weight": Cut("shared", 1, "moe.shared_size"),
    },
}


def find_cut(config: ModelConfig, name: str) -> Cut | None:
    """The cut of a parameter or buffer of `Transformer(config)`; None where every rank has it whole.

    Raises Error for a name that the table does not hold.
    """
    parts = name.split(".")
    kinds, rest = ["model"], name
    if parts[0] == "layers" and len(parts) > 2 and parts[1].isdigit():
        layer = int(parts[1])
        kinds, rest = ["layer"], ".".join(parts[2:])
        if parts[2] == "attn":
            kinds, rest = ["mla" if config.is_mla(layer) else "kda"], ".".join(parts[3:])
        elif parts[2] == "ffn":
            kinds, rest = ["sparse" if config.is_sparse(layer) else "dense"], ".".join(parts[3:])
    (kind,) = kinds
    if rest not in TABLE[kind]:
        raise Error(f"parallel.tp: {name} is not in the table of cuts (perilune/parallel/tensor.py)")
    return TABLE[kind][rest]


def check_ranks(config: ModelConfig, ranks: int, groups: Sequence[Group] = GROUPS) -> None:
    """Raise Error when `ranks` does not divide every size that `groups` cut; names the first that is odd."""
    if ranks < 1:
        raise Error(f"parallel.tp is {ranks}; must be >= 1")
    for cuts in TABLE.values():
        for cut in cuts.values():
            if cut is None or cut.group not in groups or (cut.group == "latent" and config.moe.latent_size is None):
                continue
            if cut.pieces(config) % ranks:
                raise Error(f"parallel.tp is {ranks}; must divide {cut.unit} = {cut.pieces(config)}")


def cut_tensor(whole: torch.Tensor, cut: Cut, rank: int, ranks: int) -> torch.Tensor:
    """The part of rank `rank` of `ranks`, with memory of its own."""
    blocks: torch.Tensor = whole.unflatten(cut.dim, (cut.blocks, ranks, -1))
    return blocks.select(cut.dim + 1, rank).flatten(cut.dim, cut.dim + 1).clone()


def join_tensors(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """The opposite of `cut_tensor`: the parts of all ranks, in order -> the whole."""
    blocks = [part.unflatten(cut.dim, (cut.blocks, -1)) for part in parts]
    return torch.cat(blocks, cut.dim + 1).flatten(cut.dim, cut.dim + 1)


__all__ = ["GROUPS", "TABLE", "Cut", "Group", "check_ranks", "cut_tensor", "find_cut", "join_tensors"]
