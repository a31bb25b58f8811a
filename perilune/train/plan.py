"""What a run would need on so many GPUs: memory of a rank, bytes of every collective, idle time of the pipeline.

Parameters, gradients and optimizer states are counted from the layout itself (`perilune.parallel.layout`), so they are
exact. Activations are those that the GPU kernels keep for the backward pass, without recomputation, counted tensor by
tensor. Bytes of collectives are what one rank receives in one step.

Legend: T tokens of a rank in one micro-batch, M micro-batches of a rank in one step, D model width, J experts a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass, field
from math import ceil

import torch

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.memory.lending import Loan, after, even_out
from perilune.model import muon_heads, outline
from perilune.ops.conv import WIDTH
from perilune.ops.sequences import Sequences
from perilune.parallel.expert.model import is_stacked
from perilune.parallel.fragments import exchange_bytes
from perilune.parallel.layout import KEPT, Layout, left_whole
from perilune.parallel.mesh import Axes, Mesh, without_groups
from perilune.parallel.pipeline import Place, check_micro_batches, hop_blocks, places_of, rank_of
from perilune.parallel.slices import cut_stream
from perilune.parallel.tensor import check_ranks
from perilune.parallel.tensor_model import CUT
from perilune.train.config import TrainConfig
from perilune.train.flops import count_flops


@dataclass(frozen=True)
class Rank:
    """Bytes on a rank of pipeline place `stage`; parameters: numbers it holds. activations: at the fullest moment.

    gathered: weights that FSDP brings together beside the rank's part. stream: the part of `activations` that remains
    when every layer is computed again in the backward pass from the residual stream, and one layer's at a time.
    """

    stage: int
    layers: int
    parameters: int
    weights: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    stream: int

    @property
    def states(self) -> int:
        """All bytes but activations."""
        return self.weights + self.gathered + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All bytes, nothing computed again."""
        return self.states + self.activations

    @property
    def least(self) -> int:
        """All bytes, every layer computed again."""
        return self.states + self.stream


@dataclass(frozen=True)
class Plan:
    """ranks: one for each pipeline place. collectives: name -> bytes received by a rank of the fullest place in a step.

    tokens: of a step over all ranks. bubble: share of a step in which a pipeline rank waits. flops: of a step, a rank.
    hops: bytes of one micro-batch into each stage but the first. loans: of memory between stages (not ranks), for a
    memory plan with `peer`, which make the ranks' totals alike: `levelled`.
    """

    gpus: int
    sizes: tuple[int, int, int, int, int]
    ep: int
    parameters: int
    tokens: int
    micro_batches: int
    ranks: tuple[Rank, ...]
    collectives: dict[str, int] = field(default_factory=dict)
    hops: tuple[int, ...] = ()
    bubble: float = 0.0
    flops: float = 0.0
    loans: tuple[Loan, ...] = ()

    @property
    def fullest(self) -> Rank:
        """The rank with most bytes."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def levelled(self) -> list[int]:
        """Bytes of a rank of each stage when the loans are used in full."""
        return after([rank.total for rank in self.ranks], self.loans)


def plan(config: TrainConfig, shape: ModelConfig, gpus: int) -> Plan:
    """The plan of a run of `shape` with the settings of `config`. Raises Error for sizes that do not divide.

    Documents are taken to be `data.sequence_tokens` long, the load of experts to be even.
    """
    parallel = config.parallel
    axes = Axes(parallel.pp, parallel.shard, parallel.cp, parallel.tp, parallel.ep)
    first = without_groups(gpus, axes, 0)
    check(config, shape, first)
    model = outline(shape)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    muon = muon_heads(model).keys()
    places = places_of(shape, parallel.pp, parallel.schedule, parallel.virtual)
    micro = config.accumulate // first.data[1]
    ranks = []
    for stage in range(parallel.pp):
        mesh = without_groups(gpus, axes, stage * (gpus // parallel.pp))
        mine = _of_rank(places, stage, config)
        ranks.append(_rank(config, shape, mesh, mine, shapes, muon, micro))
    busiest = ranks.index(max(ranks, key=lambda rank: rank.total))
    mesh = without_groups(gpus, axes, busiest * (gpus // parallel.pp))
    mine = _of_rank(places, busiest, config)
    rows = _rows(config, first)
    size = _itemsize(config)
    counts = count_flops(shape)
    whole = Sequences.from_lengths(_documents(config))
    return Plan(
        gpus=gpus,
        sizes=first.sizes,
        ep=first.shards,
        parameters=sum(_numel(s) for s in shapes.values()),
        tokens=config.data.batch_tokens * config.accumulate,
        micro_batches=micro,
        ranks=tuple(ranks),
        collectives=_collectives(config, shape, mesh, mine, shapes, muon, micro),
        hops=tuple((1 + hop_blocks(shape, p)) * rows * shape.hidden_size * size for p in places[1:]),
        bubble=_bubble(config, micro),
        flops=counts.train(whole) * config.accumulate / gpus,
        loans=tuple(even_out([rank.total for rank in ranks], [_waiting(config, rank, micro) for rank in ranks])),
    )


def check(config: TrainConfig, shape: ModelConfig, mesh: Mesh) -> None:
    """Raise Error, naming the field, for what a run would refuse."""
    check_ranks(shape, mesh.sizes[4], CUT)
    if shape.moe.num_experts % mesh.shards:
        raise Error(f"parallel.ep is {mesh.shards}; must divide the {shape.moe.num_experts} experts of the model")
    if config.accumulate % mesh.data[1]:
        raise Error(
            f"accumulate is {config.accumulate}; must be a multiple of the {mesh.data[1]} groups of processes with "
            "tokens of their own"
        )
    if config.parallel.pp > 1:
        check_micro_batches(config.accumulate // mesh.data[1], config.parallel.pp, config.parallel.schedule)


def _rank(
    config: TrainConfig,
    shape: ModelConfig,
    mesh: Mesh,
    places: list[Place],
    shapes: dict[str, tuple[int, ...]],
    muon: Container[str],
    micro: int,
) -> Rank:
    zero, low = config.parallel.zero if mesh.part[1] > 1 else 0, config.dtype == "bfloat16"
    size = _itemsize(config)
    sharded = frozenset(n for n in shapes if not left_whole(n, mesh)) if zero else frozenset()
    layout = Layout(shape, mesh, CUT, sharded)
    unsharded = Layout(shape, mesh, CUT)
    # Stages reduce gradients after a step's last micro-batch, and free weights gathered for a backward pass then.
    staged = config.parallel.pp > 1
    once = zero == 1 or staged
    numbers = weights = gradients = optimizer = 0
    gathered = {"root": 0}
    for name, whole in shapes.items():
        if not _is_here(name, places):
            continue
        held = sum(box.numel for box in layout.boxes(name, whole))
        full = sum(box.numel for box in unsharded.boxes(name, whole))
        kept = name.endswith(KEPT)
        numbers += held
        wide = max(size, 4)
        if name in sharded:
            weights += held * wide
            gradients += (full if once else held) * wide
            parts = name.split(".")
            module = ".".join(parts[:3]) if parts[0] == "layers" and parts[2] in ("attn", "ffn") else "root"
            gathered[module] = gathered.get(module, 0) + full * size
        else:
            # Short weights have a float32 copy; their gradients become float32 one after the other.
            weights += held * (size + 4 if low and not kept else wide)
            gradients += held * wide
        optimizer += held * (wide if name in muon else 2 * wide)
    root = gathered.pop("root")
    # Two modules at a time: the one that computes and the next one on its way.
    layers = sum(sorted(gathered.values())[-2:]) if zero == 3 and not staged else sum(gathered.values())
    stage = mesh.places[0]
    live = live_micro_batches(config, stage, micro)
    layers_of = [dataclasses.replace(p, first=i, last=i + 1) for p in places for i in range(p.first, p.last)]
    kept_by = [activation_bytes(config, shape, mesh, dataclasses.replace(one, index=1, count=3)) for one in layers_of]
    activations = sum(activation_bytes(config, shape, mesh, place) for place in places) * live
    stream = 2 * len(layers_of) * _rows(config, mesh) * shape.hidden_size * size * live + max(kept_by)
    return Rank(
        stage=stage,
        layers=sum(place.last - place.first for place in places),
        parameters=numbers,
        weights=weights,
        gathered=(root + layers) if zero else 0,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        stream=stream,
    )


def activation_bytes(config: TrainConfig, shape: ModelConfig, mesh: Mesh, place: Place) -> int:
    """What one micro-batch keeps for the backward pass of a stage: tensors of the kernels' autograd functions."""
    b, cp, tp = _itemsize(config), mesh.sizes[3], mesh.sizes[4]
    tokens = ceil(config.data.batch_tokens / cp)
    rows = ceil(tokens / tp)
    D, kda, mla, moe = shape.hidden_size, shape.kda, shape.mla, shape.moe
    total = 0
    for layer in range(place.first, place.last):
        # The stream: the sum after each sublayer, and the normed input of each.
        total += rows * 4 * D * b
        if shape.is_mla(layer):
            H = mla.num_heads // tp
            keys = tokens * (2 * cp + 1) // (2 * cp) * cp if cp > 1 else tokens
            queries = (2 * mla.q_lora_rank if mla.q_lora_rank else 0) + H * mla.qk_head_dim
            latent = 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
            gate = 2 * H * mla.v_head_dim if mla.output_gate else 0
            total += tokens * (queries + latent + gate + 2 * H * mla.v_head_dim) * b + tokens * H * 4
            total += keys * (H * (mla.qk_head_dim + mla.v_head_dim) + mla.kv_lora_rank) * b
        else:
            HK = kda.num_heads // tp * kda.head_dim
            # Before the convolution, after it, gate, output, output gate, gated output.
            total += tokens * (3 + 3 + 1 + 1 + 1 + 1) * HK * b + tokens * (kda.head_dim + kda.num_heads // tp) * b
        if tp > 1:
            total += tokens * D * b
        if shape.is_sparse(layer):
            L = moe.latent_size or D
            shared = 3 * moe.shared_size
            total += rows * (3 * L + shared) * b + rows * (moe.num_experts * 8 + moe.top_k * 24)
        else:
            total += tokens * 3 * shape.intermediate_size // tp * b
    if place.index == 0:
        total += rows * (D * b + 8)
    if place.is_last:
        total += rows * D * b * 2
    return total


def _collectives(
    config: TrainConfig,
    shape: ModelConfig,
    mesh: Mesh,
    places: list[Place],
    shapes: dict[str, tuple[int, ...]],
    muon: Container[str],
    micro: int,
) -> dict[str, int]:
    b, wide = _itemsize(config), max(4, _itemsize(config))
    _, _, _, cp, tp = mesh.sizes
    zero = config.parallel.zero if mesh.part[1] > 1 else 0
    unsharded = Layout(shape, mesh, CUT)
    full = {
        name: sum(box.numel for box in unsharded.boxes(name, whole))
        for name, whole in shapes.items()
        if _is_here(name, places)
    }
    experts = sum(n for name, n in full.items() if is_stacked(name) and mesh.shards > 1)
    rest = sum(full.values()) - experts
    stage = mesh.ranks // mesh.sizes[0]
    out: dict[str, int] = {}
    if zero:
        F = mesh.part[1]
        gathers = 1 if zero < 3 else 2 * micro
        reductions = 1 if zero == 1 or config.parallel.pp > 1 else micro
        out["gather weights"] = rest * b * (F - 1) // F * gathers
        out["reduce gradients"] = rest * wide * (F - 1) // F * reductions
    elif stage > 1:
        out["add gradients"] = 2 * rest * wide * (stage - 1) // stage
    twins = stage // mesh.shards
    if experts and twins > 1:
        out["add experts' gradients"] = 2 * experts * wide * (twins - 1) // twins
    layers = [layer for place in places for layer in range(place.first, place.last)]
    tokens = ceil(config.data.batch_tokens / cp)
    rows = ceil(tokens / tp)
    if mesh.shards > 1:
        ep, J = mesh.shards, shape.moe.top_k
        reached = ep * (1 - (1 - 1 / ep) ** J)
        width = (shape.moe.latent_size or shape.hidden_size) * b
        sparse = sum(shape.is_sparse(layer) for layer in layers)
        # Inputs to each rank that is reached, results a choice; backward the same again and the gradients' inputs.
        moves = 3 * reached + 2 * J
        out["rows to experts and back"] = int(rows * width * moves * (ep - 1) / ep) * sparse * micro
    linear = sum(not shape.is_mla(layer) for layer in layers)
    if cp > 1:
        whole = Sequences.from_lengths([config.data.batch_tokens])
        spans = cut_stream(whole, cp, config.parallel.order)
        H = shape.kda.num_heads // tp
        states = exchange_bytes(spans, H, shape.kda.head_dim, shape.kda.head_dim, wide)
        out["KDA states"] = (states["forward"] + states["backward"]) * linear * micro
        each = spans.count // cp
        channels = 3 * H * shape.kda.head_dim
        out["convolution"] = 2 * (cp - 1) * each * (WIDTH - 1) * channels * b * linear * micro
        latent = shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim
        out["latent rows"] = 2 * tokens * (cp - 1) * latent * b * (len(layers) - linear) * micro
    if tp > 1:
        gathered = rows * (tp - 1) * shape.hidden_size * b
        modules = len(layers) + sum(not shape.is_sparse(layer) for layer in layers)
        out["tokens to heads and back"] = 4 * gathered * modules * micro
    if mesh.sizes[0] > 1:
        into = sum(1 + hop_blocks(shape, place) for place in places if place.index)
        back = sum(1 + hop_blocks(shape, place) for place in _following(shape, config, places))
        out["pipeline hops"] = (into + back) * rows * shape.hidden_size * b * micro
    spread = sum(n for name, n in full.items() if name in muon and not is_stacked(name))
    if zero:
        out["Muon"] = 2 * spread * wide // mesh.part[1]
    return out


def _of_rank(places: list[Place], rank: int, config: TrainConfig) -> list[Place]:
    return [p for p in places if rank_of(p.index, config.parallel.pp, config.parallel.schedule) == rank]


def _following(shape: ModelConfig, config: TrainConfig, places: list[Place]) -> list[Place]:
    every = places_of(shape, config.parallel.pp, config.parallel.schedule, config.parallel.virtual)
    return [every[place.index + 1] for place in places if not place.is_last]


def _is_here(name: str, places: list[Place]) -> bool:
    parts = name.split(".")
    if parts[0] == "layers":
        return any(place.first <= int(parts[1]) < place.last for place in places)
    if parts[0] == "embed":
        return any(place.index == 0 for place in places)
    return any(place.is_last for place in places)


def _waiting(config: TrainConfig, rank: Rank, micro: int) -> int:
    """Of its activations, those of the micro-batches that another one's backward pass goes before."""
    live = live_micro_batches(config, rank.stage, micro)
    return rank.activations * (live - 1) // live


def live_micro_batches(config: TrainConfig, stage: int, micro: int) -> int:
    """Micro-batches whose activations a pipeline rank holds at once."""
    pp, virtual = config.parallel.pp, config.parallel.virtual
    if pp == 1:
        return 1
    if virtual == 1:
        return min(micro, pp - stage)
    # Warm-up of the interleaved schedule, in stages of 1 / virtual of a rank's layers.
    chunks = (pp - stage - 1) * 2 + (virtual - 1) * pp + 1
    return min(micro, ceil(chunks / virtual))


def _bubble(config: TrainConfig, micro: int) -> float:
    pp = config.parallel.pp
    if pp == 1:
        return 0.0
    if config.parallel.schedule == "ZBVZeroBubble":
        # One third of a micro-batch's time a rank at most (forward, input gradient, weight gradient of equal length).
        return (pp - 1) / 3 / ((pp - 1) / 3 + micro)
    return (pp - 1) / (pp - 1 + config.parallel.virtual * micro)


def _documents(config: TrainConfig) -> list[int]:
    """Of one micro-batch."""
    total, longest = config.data.batch_tokens, config.data.sequence_tokens
    lengths = [longest] * (total // longest)
    return [*lengths, total % longest] if total % longest else lengths


def _rows(config: TrainConfig, mesh: Mesh) -> int:
    """Of a rank in the residual stream."""
    return ceil(ceil(config.data.batch_tokens / mesh.sizes[3]) / mesh.sizes[4])


def _itemsize(config: TrainConfig) -> int:
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype.itemsize


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


__all__ = ["Plan", "Rank", "activation_bytes", "check", "live_micro_batches", "plan"]
