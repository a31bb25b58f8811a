"""A rank's part of a model: attention by heads, MLPs by rows, the head by vocabulary, experts whole and spread.

What a rank holds is a `Transformer` with smaller weights. Products whose weights are cut along their columns give a
term of a sum, so their outputs are added over the ranks; the experts of other ranks are added in the same way where
tokens are few, and change places by the balanced plan of `perilune.parallel.expert` where they are many.

Legend: T tokens, E experts, M experts of a rank, J choices a token, R rows, L width of the experts, X, Y any widths.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from perilune.config import Activation, ModelConfig
from perilune.errors import Error
from perilune.model import Transformer, checkpoint
from perilune.model.names import Entry, entries
from perilune.model.parts import Parts
from perilune.ops import moe
from perilune.ops.linear import linear
from perilune.parallel.expert import Collective, ExpertParallel, balanced_experts
from perilune.parallel.tensor import Cut, Group, check_ranks, cut_tensor, find_cut
from perilune.serve.loading import Loaded

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
    """How the parameters of a model are cut for `place`. Raises Error where the ranks do not divide what is cut."""

    def __init__(self, config: ModelConfig, place: Place) -> None:
        self.config, self.place = config, place
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

    def shape(self, name: str, whole: torch.Size) -> list[int]:
        """Of `part`."""
        cut, shape = self.of(name), list(whole)
        if cut is not None:
            shape[cut.dim] //= self.place.ranks
        return shape


def load_part(
    folder: str | Path, place: Place, device: torch.device, dtype: torch.dtype | None, packed: bool = False
) -> tuple[Transformer, Cuts, Loaded]:
    """This rank's part of a checkpoint, of which it reads nothing else. packed, errors: as in `perilune.model.load`."""
    folder, begin, size = Path(folder), time.perf_counter(), 0
    if not folder.is_dir():
        raise Error(f"checkpoint {str(folder)!r} is not a folder")
    config = ModelConfig.from_pretrained(folder)
    packed = packed and config.quant is not None
    cuts = Cuts(config, place)
    table = {stored: entry for entry in entries(config) for stored in entry.stored()}
    with torch.device("meta"):
        model = Transformer(config, packed=packed)
    whole = {name: value.shape for name, value in [*model.named_parameters(), *model.named_buffers()]}
    with ExitStack() as stack, torch.no_grad():
        tensors = checkpoint._open(folder, stack)
        checkpoint._compare(folder, table, tensors)
        dtypes = checkpoint._dtypes(table, tensors, dtype)
        narrow_inplace(model, cuts, dtypes, device)
        places = dict(model.named_parameters()) | dict(model.named_buffers())
        for entry in dict.fromkeys(table.values()):
            for target, value in _values(entry, places, tensors, folder, cuts, whole):
                size += value.nbytes
                target.copy_(value.reshape(target.shape))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return model, cuts, Loaded(size, time.perf_counter() - begin)


def _values(
    entry: Entry,
    places: dict[str, torch.Tensor],
    tensors: dict[str, checkpoint._Stored],
    folder: Path,
    cuts: Cuts,
    whole: dict[str, torch.Size],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank has of a tensor of the checkpoint, and where it goes."""
    if entry.index is None:
        target = places[entry.param]
        if entry.rows is not None and cuts.of(entry.param) is not None:
            target = target[entry.rows[0] // cuts.place.ranks : entry.rows[1] // cuts.place.ranks]
        yield target, _read(entry, tensors, folder, cuts, whole[entry.param])
        return
    here = dataclasses.replace(entry, index=entry.index - cuts.first)
    if not 0 <= entry.index - cuts.first < cuts.experts:
        return
    if entry.param in places:
        yield checkpoint._place(places[entry.param], here), checkpoint._read(entry, tensors, folder)
    else:
        targets = checkpoint._code_places(places, here)
        yield from ((target, tensors[name].read()) for target, name in zip(targets, entry.stored(), strict=True))


def _read(
    entry: Entry, tensors: dict[str, checkpoint._Stored], folder: Path, cuts: Cuts, whole: torch.Size
) -> torch.Tensor:
    """This rank's part of a tensor that is no expert's."""
    cut, place = cuts.of(entry.param), cuts.place
    if cut is None:
        return checkpoint._read(entry, tensors, folder)
    stored, rows = tensors[entry.name], whole[0] if entry.rows is None else entry.rows[1] - entry.rows[0]
    # A tensor that fills rows of a parameter is one of its blocks.
    cut = dataclasses.replace(cut, blocks=1)
    if entry.valid is not None or len(stored.shape) < 1 + cut.dim or stored.shape[0] % place.ranks:
        value = checkpoint._read(entry, tensors, folder)
        return cut_tensor(value.reshape(rows, *whole[1:]), cut, place.rank, place.ranks)
    width = stored.shape[cut.dim] // place.ranks
    mine = slice(place.rank * width, (place.rank + 1) * width)
    read: torch.Tensor = stored.file.get_slice(stored.name)[mine if cut.dim == 0 else (slice(None), mine)]
    return read


def narrow_inplace(model: Transformer, cuts: Cuts, dtypes: dict[str, torch.dtype], device: torch.device) -> None:
    """Give a model this rank's shapes, heads and parts; its weights are unset afterwards."""
    for prefix, module in model.named_modules():
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            path = f"{prefix}.{name}" if prefix else name
            kind = value.dtype if value.dtype == torch.uint8 else dtypes[path]
            new = torch.empty(cuts.shape(path, value.shape), dtype=kind, device=device)
            setattr(module, name, nn.Parameter(new) if isinstance(value, nn.Parameter) else new)
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
        if id(w_YX) in sums:
            dist.all_reduce(y_TY)
        return y_TY

    return Parts(linear=product, mixture=Mixture(cuts))


def _is_term(cut: Cut | None) -> bool:
    return cut is not None and cut.group != "experts" and cut.dim == 1


class Mixture:
    """`perilune.model.parts.mixture` with experts on all ranks and the same tokens on each."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts
        self._balanced: ExpertParallel | None = None

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
        count, top_k = self.cuts.experts, routing.ids_TJ.shape[1]
        ids_TJ = routing.ids_TJ - self.cuts.first
        # Choices of other ranks come last; past the last offset rows are zero.
        ids_TJ = torch.where((ids_TJ < 0) | (ids_TJ >= count), count, ids_TJ)
        order_R, offs_E = moe.permute(ids_TJ, count + 1)
        rows_RL = moe.dispatch(z_TL, order_R, top_k)
        row_weights_R = routing.weights_TJ.reshape(-1).index_select(0, order_R)
        rows_RL = experts(rows_RL, weights, offs_E[:count], activation, row_weights_R=row_weights_R)
        y_TL = moe.combine(rows_RL, order_R, None, top_k)
        dist.all_reduce(y_TL)
        return y_TL

    def _exchange(
        self, z_TL: torch.Tensor, routing: moe.Routing, weights: moe.Dense | moe.Packed, activation: Activation
    ) -> torch.Tensor:
        """Each rank's share of the tokens by the balanced plan, then everybody's outputs to everybody."""
        rank, ranks, tokens = self.cuts.place.rank, self.cuts.place.ranks, z_TL.shape[0]
        share = -(-tokens // ranks)
        if self._balanced is None or self._balanced.tokens < share:
            room = 1 << (share - 1).bit_length()
            self._balanced = ExpertParallel(
                Collective(), self.cuts.config.moe.num_experts, routing.ids_TJ.shape[1], room
            )
        mine = slice(min(rank * share, tokens), min((rank + 1) * share, tokens))
        planned = self._balanced.plan([routing.ids_TJ[mine].long()])
        y_TL = balanced_experts(self._balanced, z_TL[mine], routing.weights_TJ[mine], weights, planned, activation)
        y_TL = nn.functional.pad(y_TL, (0, 0, 0, share - y_TL.shape[0]))
        return gather(y_TL, ranks)[:tokens]


def gather(rows_RX: torch.Tensor, ranks: int) -> torch.Tensor:
    """[ranks * R, X]: the rows of all ranks, in order."""
    all_RX = rows_RX.new_empty(ranks * rows_RX.shape[0], rows_RX.shape[1])
    # torch 2.13 has a new name for it.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(all_RX, rows_RX.contiguous())
    return all_RX


__all__ = ["BALANCED", "Cuts", "Mixture", "Place", "gather", "load_part", "narrow_inplace", "parts_of"]
