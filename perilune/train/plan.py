"""What a run would need on so many GPUs: memory of a rank, bytes of every collective, idle time of the pipeline.

Parameters, gradients and optimizer states are counted from the layout itself (`perilune.parallel.layout`), so they are
exact. Activations are those that the GPU kernels keep for the backward pass, without recomputation, counted tensor by
tensor. Bytes of collectives are what one rank receives in one step.

Legend: T tokens of a rank in one micro-batch, M micro-batches of a rank in one step, D model width, J experts a token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import ceil

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.memory.lending import Loan, after, even_out
from perilune.model import muon_heads, outline
from perilune.ops.sequences import Sequences
from perilune.parallel.layout import KEPT, Layout, left_whole
from perilune.parallel.mesh import Axes, Mesh, without_groups
from perilune.parallel.stages import Place, check_micro_batches, hop_blocks, places_of
from perilune.parallel.tensor import check_ranks
from perilune.parallel.tensor_model import CUT
from perilune.train.config import TrainConfig
from perilune.train.flops import count_flops
from perilune.train.plan_ranks import Part, bubble, documents, is_here, itemsize, live_micro_batches, numel, of_rank
from perilune.train.plan_traffic import collective_bytes


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
    parts = []
    for stage in range(parallel.pp):
        mesh = without_groups(gpus, axes, stage * (gpus // parallel.pp))
        parts.append(Part(config, shape, mesh, of_rank(places, stage, config), shapes, muon, micro))
    ranks = [_rank(part) for part in parts]
    busiest = ranks.index(max(ranks, key=lambda rank: rank.total))
    rows = first.rows(config.data.batch_tokens)
    size = itemsize(config)
    counts = count_flops(shape)
    whole = Sequences.from_lengths(documents(config))
    return Plan(
        gpus=gpus,
        sizes=first.sizes,
        ep=first.shards,
        parameters=sum(numel(s) for s in shapes.values()),
        tokens=config.data.batch_tokens * config.accumulate,
        micro_batches=micro,
        ranks=tuple(ranks),
        collectives=collective_bytes(parts[busiest]),
        hops=tuple((1 + hop_blocks(shape, p)) * rows * shape.hidden_size * size for p in places[1:]),
        bubble=bubble(config, micro),
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


def _rank(part: Part) -> Rank:
    config, shape, mesh, places = part.config, part.shape, part.mesh, part.places
    zero, low = config.parallel.zero if mesh.part[1] > 1 else 0, config.dtype == "bfloat16"
    size = itemsize(config)
    sharded = frozenset(n for n in part.shapes if not left_whole(n, mesh)) if zero else frozenset()
    layout = Layout(shape, mesh, CUT, sharded)
    unsharded = Layout(shape, mesh, CUT)
    # Stages reduce gradients after a step's last micro-batch, and free weights gathered for a backward pass then.
    staged = config.parallel.pp > 1
    once = zero == 1 or staged
    numbers = weights = gradients = optimizer = 0
    gathered = {"root": 0}
    for name, whole in part.shapes.items():
        if not is_here(name, places):
            continue
        held = sum(box.numel for box in layout.boxes(name, whole))
        full = sum(box.numel for box in unsharded.boxes(name, whole))
        kept = name.endswith(KEPT)
        numbers += held
        wide = max(size, 4)
        if name in sharded:
            weights += held * wide
            gradients += (full if once else held) * wide
            words = name.split(".")
            module = ".".join(words[:3]) if words[0] == "layers" and words[2] in ("attn", "ffn") else "root"
            gathered[module] = gathered.get(module, 0) + full * size
        else:
            # Short weights have a float32 copy; their gradients become float32 one after the other.
            weights += held * (size + 4 if low and not kept else wide)
            gradients += held * wide
        optimizer += held * (wide if name in part.muon else 2 * wide)
    root = gathered.pop("root")
    # Two modules at a time: the one that computes and the next one on its way.
    layers = sum(sorted(gathered.values())[-2:]) if zero == 3 and not staged else sum(gathered.values())
    stage = mesh.places[0]
    live = live_micro_batches(config, stage, part.micro)
    layers_of = [dataclasses.replace(p, first=i, last=i + 1) for p in places for i in range(p.first, p.last)]
    kept_by = [activation_bytes(config, shape, mesh, dataclasses.replace(one, index=1, count=3)) for one in layers_of]
    activations = sum(activation_bytes(config, shape, mesh, place) for place in places) * live
    stream = 2 * len(layers_of) * mesh.rows(config.data.batch_tokens) * shape.hidden_size * size * live + max(kept_by)
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
    b, cp, tp = itemsize(config), mesh.sizes[3], mesh.sizes[4]
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


def _waiting(config: TrainConfig, rank: Rank, micro: int) -> int:
    """Of its activations, those of the micro-batches that another one's backward pass goes before."""
    live = live_micro_batches(config, rank.stage, micro)
    return rank.activations * (live - 1) // live


__all__ = ["Plan", "Rank", "activation_bytes", "check", "plan"]
