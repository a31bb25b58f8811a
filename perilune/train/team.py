"""What the processes of one training run do together; a run of one process is a team of one.

Every rank reads the whole stream of batches and computes its share, so a step is the same micro-batches on any number
of ranks. Experts live on one rank of each set and see the tokens of all of it: their gradients are complete except
over replicas. Everything else is held by every rank, and its gradients are added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.errors import Error
from perilune.model import Transformer
from perilune.model.parts import in_turn, mixture
from perilune.parallel import mesh as meshes
from perilune.parallel.beside import Beside
from perilune.parallel.expert import Collective, ExpertParallel, Policy, Symmetric, exact, off, tolerant
from perilune.parallel.expert.model import Mixture, cut, cut_experts, is_stacked, join, join_experts, summary
from perilune.train.config import ParallelConfig

Item = TypeVar("Item")
# Gradients are added in pieces of at most so many numbers.
_PIECE = 1 << 26


class Team:
    """The run's mesh and the collectives of a step. Every rank makes the same calls."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self.config = config
        self.mesh = meshes.start(device, config.ep, config.timeout)
        self.mixture: Mixture | None = None
        self.joined = False

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.mesh.rank == 0

    def agree(self, problem: BaseException | None) -> None:
        """Raise the problem of the first rank that has one, on all of them."""
        if self.mesh.ranks == 1:
            if problem is not None:
                raise problem
            return
        told: list[str | None] = [None] * self.mesh.ranks
        dist.all_gather_object(told, None if problem is None else f"{problem}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(told):
            if text is not None:
                raise Error(f"rank {rank}: {text}")

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of the items that this rank computes. Raises Error when they do not divide."""
        if len(items) % self.mesh.ranks:
            raise Error(f"accumulate is {len(items)}; must be a multiple of the {self.mesh.ranks} processes of the run")
        return items[self.mesh.rank :: self.mesh.ranks]

    def spread(self, model: Transformer, batch_tokens: int) -> Transformer:
        """The model with this rank's experts only, and the mixture that reaches the others."""
        if self.mesh.shards == 1:
            return model
        cut_experts(model, self.mesh.shard, self.mesh.shards)
        moe, config = model.config.moe, self.config
        policies: dict[str, Policy] = {
            "exact": exact(),
            "off": off(),
            "tolerant": tolerant(config.eps, config.min_rows),
        }
        policy = policies[config.policy]
        if config.transport == "symmetric":
            from perilune.parallel.expert import DirectParallel

            width = moe.latent_size or model.config.hidden_size
            self.mixture = Mixture(
                DirectParallel(
                    Symmetric(self.mesh.experts, config.timeout),
                    moe.num_experts,
                    moe.top_k,
                    batch_tokens,
                    width,
                    moe.expert_size,
                    model.lm_head.weight.dtype,
                    policy,
                )
            )
        else:
            parallel = ExpertParallel(Collective(self.mesh.experts), moe.num_experts, moe.top_k, batch_tokens, policy)
            self.mixture = Mixture(parallel)
        model.parts = dataclasses.replace(model.parts, mixture=self.mixture, beside=Beside())
        return model

    def whole(self, model: Transformer) -> Transformer:
        """All experts on this rank again, and no other rank needed to run it; `must_be_cut` is an Error after that."""
        if self.mixture is not None:
            self.joined = True
            join_experts(model, self.mesh.experts)
            model.parts = dataclasses.replace(model.parts, mixture=mixture, beside=in_turn)
            self.mixture = None
        return model

    def must_be_cut(self, what: str) -> None:
        """Raise Error when `whole` has been called: masters and optimizer states still hold this rank's part alone."""
        if self.joined:
            raise Error(f"{what}: the experts of {self.mesh.ranks} ranks have been joined; go on with a new Trainer")

    # -- tensors by name: as they stand in checkpoints (whole) and on this rank (cut) ---------------------------------

    def join(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a stacked tensor -> the whole one; others as they are."""
        if self.mesh.shards == 1 or not _cut_by_rank(name, value):
            return value
        return join(value, self.mesh.experts)

    def cut(self, name: str, value: Tensor) -> Tensor:
        """The whole of a stacked tensor -> this rank's part; others as they are."""
        if self.mesh.shards == 1 or not _cut_by_rank(name, value):
            return value
        return cut(value, self.mesh.shard, self.mesh.shards)

    # -- collectives of a step ----------------------------------------------------------------------------------------

    def add(self, values: Iterable[Tensor]) -> None:
        """Sum over all ranks, in place."""
        if self.mesh.ranks > 1:
            for value in values:
                dist.all_reduce(value)

    def largest(self, values: Iterable[Tensor]) -> None:
        """Maximum over all ranks, in place."""
        if self.mesh.ranks > 1:
            for value in values:
                dist.all_reduce(value, op=dist.ReduceOp.MAX)

    def add_gradients(self, params: Mapping[str, Tensor]) -> None:
        """Sum the gradients in their own dtype (fp32 for bf16 weights): experts over replicas, the rest over all."""
        if self.mesh.ranks == 1:
            return
        for params_of, group in (
            ([p for name, p in params.items() if not self.has_part(name)], self.mesh.everyone),
            ([p for name, p in params.items() if self.has_part(name)], self.mesh.twins),
        ):
            if group is not None and dist.get_world_size(group) > 1:
                for piece in _pieces(params_of):
                    flat = torch.cat([_gradient(p).reshape(-1) for p in piece])
                    dist.all_reduce(flat, group=group)
                    for p, summed in zip(piece, flat.split([p.numel() for p in piece]), strict=True):
                        p.grad = summed.view_as(p)

    def add_squares(self, squares: Tensor) -> Tensor:
        """The sum of squares of what is cut over the ranks of one set."""
        if self.mesh.shards > 1:
            dist.all_reduce(squares, group=self.mesh.experts)
        return squares

    def has_part(self, name: str) -> bool:
        """Whether this rank holds only a part of the parameter."""
        return self.mesh.shards > 1 and is_stacked(name)

    def expert_stats(self) -> Mapping[str, float] | None:
        """What balancing did since the last call, of this rank's set; None for experts that are all here."""
        return None if self.mixture is None else summary(self.mixture.drain())


def _cut_by_rank(name: str, value: Tensor) -> bool:
    """model/ and master/ names end in the parameter's, optim/ names in its and a key's."""
    if name.startswith("optim/"):
        name = name.rpartition("/")[0]
    return is_stacked(name) and value.dim() > 0


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _pieces(params: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """In order, neighbours of one dtype together."""
    piece: list[Tensor] = []
    for param in params:
        full = sum(p.numel() for p in piece) + param.numel() > _PIECE
        if piece and (full or piece[0].dtype != param.dtype):
            yield piece
            piece = []
        piece.append(param)
    if piece:
        yield piece


__all__ = ["Team"]
