"""A rank's part of a model: attention by heads, MLPs by rows, the head by vocabulary, experts whole and spread.

What a rank holds is a `Transformer` with smaller weights. Products whose weights are cut along their columns give a
term of a sum, so their outputs are added over the ranks; the experts of other ranks are added in the same way where
tokens are few, and change places by the balanced plan of `perilune.parallel.expert` where they are many.

Legend: T tokens, E experts, M experts of a rank, J choices a token, R rows, L width of the experts, X, Y any widths.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from perilune.config import Activation, ModelConfig
from perilune.errors import Error
from perilune.model import Piece, Reader, Share, Transformer, give_memory_inplace, open_checkpoint, outline, places_of
from perilune.model.names import Entry
from perilune.model.parts import Parts
from perilune.ops import moe
from perilune.ops.linear import linear
from perilune.parallel.expert import Collective, ExpertParallel, balanced_experts
from perilune.parallel.tensor import Cut, Group, check_ranks, cut_tensor, find_cut
from perilune.serve.loading import Loaded
from perilune.serve.ranks.link import Link

if TYPE_CHECKING:
    from perilune.parallel.expert import DirectParallel

# A smaller shared MLP is read on every rank sooner than its sum arrives.
SHARED_BYTES = 64_000_000
# Tokens of a step from which experts are balanced over the ranks: its plan is read by the host in every layer.
BALANCED = 16384


@dataclass(frozen=True)
class Place:
    """rank of ranks, which are all of torch's default process group. balanced: see `BALANCED`; the same on all."""

    rank: int
    ranks: int
    balanced: int = BALANCED


class Cuts:
    """How the parameters of a model are cut for `place`, and the link to who has the other parts.

    Raises Error where the ranks do not divide what is cut.
    """

    def __init__(self, config: ModelConfig, place: Place, link: Link) -> None:
        self.config, self.place, self.link = config, place, link
        groups: list[Group] = ["attention", "mlp", "vocabulary"]
        if 6 * config.hidden_size * config.moe.shared_size > SHARED_BYTES:
            groups.append("shared")
        self.groups = groups
        check_ranks(config, place.ranks, groups)
        if config.moe.num_experts % place.ranks:
            raise Error(f"ranks is {place.ranks}; must divide moe.num_experts = {config.moe.num_experts}")
        self.experts = config.moe.num_experts // place.ranks
        self.first = self.experts * place.rank

    def of(self, name: str) -> Cut | None:
        """The cut of a parameter; experts are cut as whole experts. None: every rank has it whole."""
        cut = find_cut(self.config, name.removesuffix("_codes").removesuffix("_scales"))
        if cut is not None and cut.group == "experts":
            return Cut("experts", 0, "moe.num_experts")
        if cut is None or cut.group not in self.groups or name == "embed.weight":
            return None
        return cut

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole parameter."""
        cut = self.of(name)
        return whole if cut is None else cut_tensor(whole, cut, self.place.rank, self.place.ranks)

    def piece(self, entry: Entry, tensors: Mapping[str, torch.Tensor]) -> Piece | None:
        """This rank's share of a tensor of the checkpoint, and where it goes in the rank's own `tensors`; None: the
        tensor is an expert of another rank."""
        if entry.index is not None:
            here = dataclasses.replace(entry, index=entry.index - self.first)
            return Piece(here, places_of(tensors, here)) if 0 <= entry.index - self.first < self.experts else None
        cut, ranks = self.of(entry.param), self.place.ranks
        if cut is None:
            return Piece(entry, places_of(tensors, entry))
        rows = None if entry.rows is None else (entry.rows[0] // ranks, entry.rows[1] // ranks)
        here = dataclasses.replace(entry, rows=rows)
        # A tensor that fills rows of a parameter is one of its blocks.
        return Piece(here, places_of(tensors, here), Share(cut.dim, self.place.rank, ranks))

    def shape(self, name: str, whole: torch.Size) -> list[int]:
        """Of `part`."""
        cut, shape = self.of(name), list(whole)
        if cut is not None:
            shape[cut.dim] //= self.place.ranks
        return shape


def load_part(
    folder: str | Path,
    place: Place,
    device: torch.device,
    dtype: torch.dtype | None,
    packed: bool = False,
    reader: Reader = "safetensors",
    link: Link | None = None,
) -> tuple[Transformer, Cuts, Loaded]:
    """This rank's part of a checkpoint; nothing else is read, but of a tensor that is cut: `Checkpoint.fill`. packed,
    reader, errors: as in `perilune.model.load`."""
    begin = time.perf_counter()
    with open_checkpoint(folder, reader) as stored:
        cuts = Cuts(stored.config, place, link or Link())
        model = outline(stored.config, packed=packed and stored.config.quant is not None)
        give_memory_inplace(model, stored.dtypes(dtype), device, cuts.shape)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        size = stored.fill(piece for entry in stored.entries if (piece := cuts.piece(entry, tensors)) is not None)
    narrow_inplace(model, cuts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return model, cuts, Loaded(size, time.perf_counter() - begin, reader)


def narrow_inplace(model: Transformer, cuts: Cuts) -> None:
    """Give a model that has this rank's weights the rank's heads and parts."""
    config, ranks = model.config, cuts.place.ranks
    for layer in model.layers:
        layer.attn.heads //= ranks  # type: ignore[operator, union-attr]
    kda = dataclasses.replace(config.kda, num_heads=config.kda.num_heads // ranks)
    mla = dataclasses.replace(config.mla, num_heads=config.mla.num_heads // ranks)
    model.config = dataclasses.replace(config, kda=kda, mla=mla)
    model.parts = parts_of(model, cuts)


def parts_of(model: Transformer, cuts: Cuts) -> Parts:
    """The callables of a rank's model, which talk to the other ranks."""
    sums = {id(weight) for name, weight in model.named_parameters() if _is_term(cuts.of(name))}

    def product(x_TX: torch.Tensor, w_YX: torch.Tensor) -> torch.Tensor:
        y_TY = linear(x_TX, w_YX)
        return cuts.link.add(y_TY) if id(w_YX) in sums else y_TY

    return Parts(linear=product, mixture=Mixture(cuts))


def _is_term(cut: Cut | None) -> bool:
    return cut is not None and cut.group != "experts" and cut.dim == 1


class Mixture:
    """`perilune.model.parts.mixture` with experts on all ranks and the same tokens on each."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts
        self._balanced: ExpertParallel | DirectParallel | None = None

    def __call__(
        self,
        z_TL: torch.Tensor,
        routing: moe.Routing,
        weights: moe.Dense | moe.Packed,
        activation: Activation,
        experts: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """y_TL, the same on every rank."""
        if (
            z_TL.shape[0] < self.cuts.place.balanced or experts is not moe.experts
        ):  # the balanced layer has experts of its own
            return self._term(z_TL, routing, weights, activation, experts)
        return self._exchange(z_TL, routing, weights, activation)

    def _term(
        self,
        z_TL: torch.Tensor,
        routing: moe.Routing,
        weights: moe.Dense | moe.Packed,
        activation: Activation,
        experts: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Own experts for all tokens, added over the ranks: nothing is read back, so it can be part of a graph."""
        count, top_k, every = self.cuts.experts, routing.ids_TJ.shape[1], self.cuts.config.moe.num_experts
        # Experts are counted from the first one here, so that choices of other ranks come last; rows past the last
        # offset are zero.
        ids_TJ = (routing.ids_TJ - self.cuts.first) % every if self.cuts.first else routing.ids_TJ
        if z_TL.is_cuda and z_TL.dtype == torch.bfloat16:
            few = importlib.import_module("perilune.ops.moe.triton_few")
            if 0 < ids_TJ.numel() <= few.MOST:
                rows = few.arrange(z_TL, dataclasses.replace(routing, ids_TJ=ids_TJ))
                y_RL = experts(rows.rows_RL, weights, rows.offs_E[:count], activation, row_weights_R=rows.weights_R)
                return self.cuts.link.add(few.gather_sum(y_RL, rows.row_TJ, None))
        order_R, offs_E = moe.permute(ids_TJ, every)
        rows_RL = moe.dispatch(z_TL, order_R, top_k)
        row_weights_R = routing.weights_TJ.reshape(-1).index_select(0, order_R)
        rows_RL = experts(rows_RL, weights, offs_E[:count], activation, row_weights_R=row_weights_R)
        return self.cuts.link.add(moe.combine(rows_RL, order_R, None, top_k))

    def _exchange(
        self, z_TL: torch.Tensor, routing: moe.Routing, weights: moe.Dense | moe.Packed, activation: Activation
    ) -> torch.Tensor:
        """Each rank's share of the tokens by the balanced plan, then everybody's outputs to everybody."""
        rank, ranks, tokens = self.cuts.place.rank, self.cuts.place.ranks, z_TL.shape[0]
        share = -(-tokens // ranks)
        if self._balanced is None or self._balanced.tokens < share:
            room = 1 << (share - 1).bit_length()
            self._balanced = self._exchange_for(room, routing.ids_TJ.shape[1], z_TL, weights)
        mine = slice(min(rank * share, tokens), min((rank + 1) * share, tokens))
        planned = self._balanced.plan([routing.ids_TJ[mine].long()])
        y_TL = balanced_experts(self._balanced, z_TL[mine], routing.weights_TJ[mine], weights, planned, activation)
        y_TL = nn.functional.pad(y_TL, (0, 0, 0, share - y_TL.shape[0]))
        return gather(y_TL, ranks)[:tokens]

    def _exchange_for(
        self, room: int, top_k: int, z_TL: torch.Tensor, weights: moe.Dense | moe.Packed
    ) -> ExpertParallel | DirectParallel:
        """The balanced layer of at most `room` tokens a rank; all layers use it one after the other."""
        config, symmetric = self.cuts.config.moe, self.cuts.link.symmetric
        if symmetric is None or not isinstance(weights, moe.Dense):
            return ExpertParallel(Collective(), config.num_experts, top_k, room)
        # Only here: it needs triton.
        from perilune.parallel.expert import DirectParallel

        sizes = (room, z_TL.shape[1], config.expert_size)
        return DirectParallel(symmetric, config.num_experts, top_k, *sizes, z_TL.dtype, training=False)


def gather(rows_RX: torch.Tensor, ranks: int) -> torch.Tensor:
    """[ranks * R, X]: the rows of all ranks, in order."""
    all_RX = rows_RX.new_empty(ranks * rows_RX.shape[0], rows_RX.shape[1])
    # torch 2.13 has a new name for it.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(all_RX, rows_RX.contiguous())
    return all_RX


__all__ = ["BALANCED", "Cuts", "Mixture", "Place", "gather", "load_part", "narrow_inplace", "parts_of"]
