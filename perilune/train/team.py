"""What the processes of one training run do together; a run of one process is a team of one.

Every rank reads the whole stream of batches and computes its share, so a step is the same micro-batches on any number
of ranks; ranks of one cp or tp group share a micro-batch. What a rank holds of a parameter is told by `Layout`; the
gradient of what is here is complete after `add_gradients`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.errors import Error
from perilune.model import Stats, Transformer, muon_heads
from perilune.model.parts import DEFAULT
from perilune.parallel.beside import Beside
from perilune.parallel.checkpoint import Part
from perilune.parallel.collectives import local
from perilune.parallel.context import context_parts
from perilune.parallel.expert import Collective, ExpertParallel, Policy, Symmetric, exact, off, tolerant
from perilune.parallel.expert.model import Mixture, cut_experts, is_stacked, summary
from perilune.parallel.fill import Values, fill, give_memory
from perilune.parallel.layout import Layout, left_whole
from perilune.parallel.muon import Spread
from perilune.parallel.slices import cut_stream, take_slice
from perilune.parallel.stages import check_micro_batches
from perilune.parallel.tensor_model import CUT, cut_model, sharded_cross_entropy
from perilune.parallel.whole import whole_model
from perilune.train.config import ParallelConfig
from perilune.train.data import Batch
from perilune.train.loss import cross_entropy
from perilune.train.pieces import pieces
from perilune.train.ranks import Ranks

if TYPE_CHECKING:
    from perilune.parallel.pipeline import Pipeline

Item = TypeVar("Item")


class Team(Ranks):
    """The parts of a step that its ranks do together. Every rank makes the same calls."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.zero = config.zero if self.mesh.parts is not None else 0
        self.mixture: Mixture | None = None
        self.pipeline: Pipeline | None = None
        self.layout: Layout | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of the items that this rank computes. Raises Error when they do not divide."""
        place, count = self.mesh.data
        if len(items) % count:
            what = f"{count} processes of the run"
            if count < self.mesh.ranks:
                what = f"{count} groups of processes with tokens of their own"
            raise Error(f"accumulate is {len(items)}; must be a multiple of the {what}")
        if self.mesh.stages is not None:
            check_micro_batches(len(items) // count, self.mesh.sizes[0], self.config.schedule)
        return items[place::count]

    # -- the model on this rank ---------------------------------------------------------------------------------------

    def spread(
        self,
        model: Transformer,
        batch_tokens: int,
        dtype: torch.dtype | None = None,
        values: Values | None = None,
    ) -> Transformer:
        """The model with this rank's part of the parameters, and the parts that reach the others, in place.

        dtype: of the computation; the head's by default. values: the numbers of a model that is an outline (on "meta"),
        of which this rank then never holds more than its part and one box of them. Raises Error for sizes that do not
        divide.
        """
        dtype = model.lm_head.weight.dtype if dtype is None else dtype
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.dtypes = {name: value.dtype for name, value in model.state_dict().items()}
        self.layout = Layout(model.config, self.mesh, CUT)
        if self.mesh.cp is not None:
            model.parts = context_parts(model.parts, self.mesh.cp)
        if self.mesh.tp is not None:
            cut_model(model, self.mesh.tp)
        if self.mesh.shards > 1:
            cut_experts(model, self.mesh.shard, self.mesh.shards)
            self.mixture = self._mixture(model, self.mesh.rows(batch_tokens), dtype)
            model.parts = dataclasses.replace(model.parts, mixture=self.mixture, beside=Beside())
        if self.mesh.stages is not None:
            from perilune.parallel.pipeline import Pipeline

            stages, schedule, virtual = self.mesh.stages, self.config.schedule, self.config.virtual
            self.pipeline = Pipeline(model, stages, schedule, virtual, self.device, dtype)
        if self.zero:
            from perilune.parallel.shard import shard_model

            roots, whole = self._roots(model), lambda name: left_whole(name, self.mesh)
            sharded = shard_model(model, roots, self.mesh, self.zero, dtype, whole, self.device)
            self.layout = dataclasses.replace(self.layout, sharded=sharded)
        if values is not None:
            give_memory(self._roots(model), self.device)
        if self.pipeline is not None:
            self.pipeline.share(model)
        if values is not None:
            fill(model, self.layout, self.shapes, values)
        return model

    def _roots(self, model: Transformer) -> Sequence[torch.nn.Module]:
        """The modules that are called: stages, or the model."""
        return [model] if self.pipeline is None else self.pipeline.modules

    def _mixture(self, model: Transformer, tokens: int, dtype: torch.dtype) -> Mixture:
        moe, config = model.config.moe, self.config
        policies: dict[str, Policy] = {
            "exact": exact(),
            "off": off(),
            "tolerant": tolerant(config.eps, config.min_rows),
        }
        policy = policies[config.policy]
        if config.transport == "symmetric":
            from perilune.parallel.expert import DirectParallel

            return Mixture(
                DirectParallel(
                    Symmetric(self.mesh.experts, config.timeout),
                    moe.num_experts,
                    moe.top_k,
                    tokens,
                    moe.latent_size or model.config.hidden_size,
                    moe.expert_size,
                    dtype,
                    policy,
                )
            )
        transport = Collective(self.mesh.experts)
        return Mixture(ExpertParallel(transport, moe.num_experts, moe.top_k, tokens, policy))

    def whole(self, model: Transformer, weights: Mapping[str, Tensor]) -> Transformer:
        """All parameters on this rank again, and no other rank needed to run it; `must_be_cut` is an Error after."""
        if self.mesh.ranks > 1 and not self.joined:
            assert self.layout is not None
            self.joined = True
            params = {name: local(weight) for name, weight in weights.items()}
            model = whole_model(model, params, self.layout, self.shapes, self.dtypes)
            model.parts = DEFAULT
            self.mixture = self.layout = self.pipeline = None
        return model

    def must_be_cut(self, what: str) -> None:
        """Raise Error when `whole` has been called: masters and optimizer states still hold this rank's part alone."""
        if self.joined:
            raise Error(f"{what}: the parts of {self.mesh.ranks} ranks have been joined; go on with a new Trainer")

    def matrices(self, model: Transformer, params: Mapping[str, Tensor]) -> tuple[dict[str, int], Spread | None]:
        """(row blocks of the matrices that Muon takes, as this rank holds them; those that lie on several ranks)."""
        heads = muon_heads(model)
        if self.mesh.ranks == 1:
            return heads, None
        assert self.layout is not None
        spread = Spread(self.layout, self.shapes, heads, self.mesh.block)
        here = {
            name: count
            if spread.takes(name) or len(self.shapes[name]) == 3
            else count * params[name].shape[0] // self.shapes[name][0]
            for name, count in heads.items()
        }
        return here, spread

    # -- micro-batches ------------------------------------------------------------------------------------------------

    def passes(
        self, model: Transformer, batches: Sequence[Batch], counted: int, chunk: int, observe: Callable[[Stats], None]
    ) -> Tensor:
        """Forward and backward of this rank's micro-batches, of a step in which `counted` tokens count; their summed
        loss, as this rank's term of the sum over all. observe: gets the statistics of every forward pass."""
        losses: list[Tensor] = []
        parts = [self.part_of(batch) for batch in batches]

        def loss(x_TD: Tensor, micro: int) -> Tensor:
            value = self._loss(x_TD, model.lm_head.weight, parts[micro], chunk)
            losses.append(value.detach() / self.mesh.sizes[4])
            return value / max(1, counted)

        if self.pipeline is not None:
            if len({part.sequences.total for part in parts}) > 1:
                raise Error("parallel.pp > 1 needs micro-batches of one length")
            from perilune.parallel.pipeline import MicroBatch

            micros = [MicroBatch(part.tokens_T, part.sequences) for part in parts]
            self.pipeline.step(micros, self._rows(parts[0]), loss, observe)
        else:
            for i, part in enumerate(parts):
                stats = Stats()
                self.begin(model, last=i + 1 == len(parts))
                loss(model.hidden(part.tokens_T, part.sequences, stats=stats).x_TD, i).backward()
                observe(stats)
        return sum(losses, torch.zeros((), dtype=torch.float64, device=batches[0].tokens_T.device))

    def whole_loss(
        self, model: Transformer, batch: Batch, chunk: int, gradients: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(summed loss, number of counted tokens) of a whole micro-batch, on every rank; no gradient.

        gradients: build the graph of a step's forward pass, for whoever watches.
        """
        part = self.part_of(batch)
        if self.pipeline is None:
            x_TD = model.hidden(part.tokens_T, part.sequences).x_TD
            loss = self._loss(x_TD, model.lm_head.weight, part, chunk)
        else:
            from perilune.parallel.pipeline import MicroBatch

            loss = self.pipeline.forward(
                MicroBatch(part.tokens_T, part.sequences),
                self._rows(part),
                lambda x_TD, _: self._loss(x_TD, model.lm_head.weight, part, chunk),
                gradients,
            )
        return self.add_context(loss), self.add_context(part.mask_T.sum())

    def _loss(self, x_TD: Tensor, weight_VD: Tensor, part: Batch, chunk: int) -> Tensor:
        """Summed over the tokens of a slice made by `part_of`; the same on all ranks of a tp group."""
        if self.mesh.tp is None or self.joined:
            return cross_entropy(x_TD, weight_VD, part.targets_T, part.mask_T, chunk)[0]
        return sharded_cross_entropy(x_TD, weight_VD, part.targets_T, part.mask_T, self.mesh.tp, chunk)

    def _rows(self, part: Batch) -> int:
        """Of this rank in the residual stream."""
        tokens, (place, ranks) = part.sequences.total, (self.mesh.places[4], self.mesh.sizes[4])
        most = -(-tokens // ranks)
        return max(0, min(most, tokens - place * most))

    def part_of(self, batch: Batch) -> Batch:
        """This rank's slice of a micro-batch."""
        if self.mesh.cp is None or self.joined:
            return batch
        spans = cut_stream(batch.sequences, self.mesh.sizes[3], self.config.order)
        cut = take_slice(spans, (self.mesh.places[3],), batch.sequences.device)
        rows_T = cut.rows_T.to(batch.tokens_T.device)
        tokens_T, targets_T, mask_T = (x[rows_T] for x in (batch.tokens_T, batch.targets_T, batch.mask_T))
        return Batch(tokens_T, targets_T, mask_T, cut, batch.bytes)

    def begin(self, model: Transformer, last: bool) -> None:
        """Say before a micro-batch whether it is the last one of the step."""
        if self.zero:
            from perilune.parallel.shard import begin_micro_batch

            begin_micro_batch(model, self.zero, last)

    def end_evaluation(self, model: Transformer) -> None:
        """Free the weights that were gathered for it."""
        if self.zero and not self.joined:
            from perilune.parallel.shard import free_gathered

            free_gathered(self._roots(model))

    # -- tensors by name: as they stand in checkpoints (whole) and on this rank (part) --------------------------------

    def part(self, name: str, value: Tensor) -> Tensor:
        """A tensor like parameter `name` with its place in the whole, for `save_checkpoint` and `load_checkpoint`."""
        if self.layout is None or name not in self.shapes or self.layout.whole_here(name) or value.dim() == 0:
            return value
        return Part.of(value, self.layout.boxes(name, self.shapes[name]), self.shapes[name])

    @torch.no_grad()
    def scale_rows(self, name: str, value: Tensor, factor_R: Tensor) -> None:
        """Multiply the rows of this rank's part of a matrix by those of the whole."""
        assert self.layout is not None
        for box in self.layout.boxes(name, self.shapes[name]):
            box.of_part(value).mul_(factor_R[box.begin[0] : box.begin[0] + box.size[0], None].to(value.dtype))

    # -- collectives of a step ----------------------------------------------------------------------------------------

    def add_gradients(self, params: Mapping[str, Tensor]) -> None:
        """Sum the gradients in their own dtype (fp32 for bf16 weights): experts over replicas, the rest over all.

        What FSDP has cut it has added up already. A parameter that no rank has used keeps no gradient, as on one
        rank; one that some have used has it on all.
        """
        if self.mesh.ranks == 1:
            return
        used = torch.tensor([p.grad is not None for p in params.values()], dtype=torch.int32)
        used = used.to(next(iter(params.values())).device)
        self.largest_in_stage([used])
        by_group: dict[dist.ProcessGroup | None, list[Tensor]] = {}
        for (name, p), seen in zip(params.items(), used.tolist(), strict=True):
            if seen:
                by_group.setdefault(self._others(name), []).append(p)
        for group, params_of in by_group.items():
            if group is not None and dist.get_world_size(group) > 1:
                for piece in pieces(params_of):
                    flat = torch.cat([_gradient(p).reshape(-1) for p in piece])
                    dist.all_reduce(flat, group=group)
                    for p, summed in zip(piece, flat.split([p.numel() for p in piece]), strict=True):
                        p.grad = summed.view_as(p)

    def copies(self, names: Iterable[str]) -> list[int]:
        """On how many ranks the numbers of each parameter are."""
        return [1 if self.layout is None else self.layout.copies(name) for name in names]

    def _others(self, name: str) -> dist.ProcessGroup | None:
        """The ranks whose gradients of a parameter are still to be added up."""
        mesh = self.mesh
        if mesh.shards > 1 and is_stacked(name):
            return mesh.twins
        if self.layout is None:
            return mesh.everyone
        if name in self.layout.sharded:
            return None if self.layout.is_cut(name) else mesh.tp
        return mesh.streams if self.layout.is_cut(name) else mesh.stage

    def expert_stats(self) -> Mapping[str, float] | None:
        """What balancing did since the last call, of this rank's set; None for experts that are all here."""
        if self.mixture is None:
            return None
        return summary([stats for drained in self.of_stages(self.mixture.drain()) for stats in drained])

    def hop_bytes(self) -> list[int] | None:
        """Bytes that went into each stage but the first in the last micro-batch; None without stages."""
        if self.pipeline is None:
            return None
        sent = {stage: size for told in self.of_stages(self.pipeline.sent_bytes()) for stage, size in told.items()}
        return [sent[stage] for stage in sorted(sent)]


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


__all__ = ["Team"]
