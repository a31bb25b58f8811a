"""One stage of the pipeline as a module, and the blocks that its rank keeps for its later stages.

Legend: T tokens of a micro-batch on this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from perilune.model import Stats, Transformer
from perilune.model.moe import SparseMoe
from perilune.model.residual import Site, Stream
from perilune.ops.names import layer as name_layer
from perilune.ops.names import region
from perilune.ops.sequences import Sequences
from perilune.parallel.stages import Place, blocks_before, hop_blocks


@dataclass(frozen=True)
class MicroBatch:
    """What a rank has of one micro-batch."""

    tokens_T: torch.Tensor
    sequences: Sequences


# (hidden x_TD, number of the micro-batch) -> the loss that is differentiated.
Loss = Callable[[torch.Tensor, int], torch.Tensor]


class Kept:
    """Blocks of the micro-batches under way that a later stage of this rank needs again, and their gradients."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[torch.Tensor]] = {}
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}

    def put(self, micro: int, number: int, block: torch.Tensor) -> torch.Tensor:
        """The block, for use in this stage; what later stages add to its gradient arrives in the backward pass."""
        held: torch.Tensor = _Join.apply(block, self, (micro, number))  # type: ignore[no-untyped-call]
        self.blocks.setdefault(micro, []).append(held)
        return held

    def get(self, micro: int, count: int) -> list[torch.Tensor]:
        """The first `count` blocks as leaves whose gradients are taken to where the block was put."""
        leaves = []
        for number, block in enumerate(self.blocks[micro][:count]):
            leaf = block.detach()
            if block.requires_grad and torch.is_grad_enabled():
                leaf.requires_grad_()
                leaf.register_post_accumulate_grad_hook(lambda x, key=(micro, number): self._add(key, x))
            leaves.append(leaf)
        return leaves

    def _add(self, key: tuple[int, int], leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        self.gradients[key] = self.gradients[key] + leaf.grad if key in self.gradients else leaf.grad
        leaf.grad = None

    def clear(self) -> None:
        """Forget everything; at the end of a step."""
        self.blocks.clear()
        self.gradients.clear()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, kept: Kept, key: tuple[int, int]) -> torch.Tensor:
        ctx.kept, ctx.key = kept, key
        return block.view_as(block)

    @staticmethod
    def backward(ctx: Any, d_block: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        more = ctx.kept.gradients.pop(ctx.key, None)
        ctx.kept.blocks.pop(ctx.key[0], None)
        return (d_block if more is None else d_block + more), None, None


class StageModule(nn.Module):
    """The layers of one stage: (sum, blocks that were sent ...) -> the same for the next stage, or the loss [1]."""

    model: Transformer

    def __init__(self, model: Transformer, places: Sequence[Place], place: Place, kept: Kept, loss: Loss) -> None:
        super().__init__()
        # The model is not a submodule, but what of it is used here is: schedules ask for the stage's parameters.
        self.__dict__["model"] = model
        self.layers = nn.ModuleList(model.layers[place.first : place.last])
        if place.index == 0:
            self.embed = model.embed
        if place.is_last:
            self.norm_D, self.lm_head = model.norm_D, model.lm_head
            self.output_res = getattr(model, "output_res", None)
        self.place, self.kept, self.loss = place, kept, loss
        following = places[place.index + 1 : place.index + 2]
        self.sends = hop_blocks(model.config, following[0]) if following else 0
        self.batches: Sequence[MicroBatch] = ()
        self.sent_bytes = 0
        self.observe: Callable[[Stats], None] = lambda stats: None

    def forward(self, *carry: torch.Tensor, index: torch.Tensor) -> Any:
        """index: int64 [1], the number of the micro-batch; the first stage takes nothing else."""
        micro, place, model = int(index), self.place, self.model
        batch, stats = self.batches[micro], Stats()
        if place.index == 0:
            live, bank = model.embed(batch.tokens_T), []
        else:
            bank = self.kept.get(micro, place.keeps) if place.keeps else []
            live, *sent = carry
            bank += [self.kept.put(micro, place.keeps + i, block) for i, block in enumerate(sent)]
        stream = Stream(live, self._sites(), False)
        stream.bank = bank
        for layer in range(place.first, place.last):
            module: Any = model.layers[layer]
            name_layer(layer)
            x_TD = stream.enter()
            if module.starts_block:
                block = self.kept.put(micro, len(stream.bank) - 1, stream.bank[-1])
                stream.bank = [*stream.bank[:-1], block]
            y_TD, _, *rest = region(
                "attn", lambda x_TD, attn=module.attn: attn(x_TD, batch.sequences, model.parts), x_TD
            )
            if rest:
                stats.max_logit[layer] = rest[0]
            stream.leave(y_TD)
            x_TD = stream.enter()
            if isinstance(module.ffn, SparseMoe):
                y_TD, stats.routing[layer] = region("ffn", module.ffn, x_TD, model.parts)
            else:
                y_TD = region("ffn", module.ffn, x_TD, model.parts)
            stream.leave(y_TD)
        name_layer(None)
        self.observe(stats)
        if place.is_last:
            return self.loss(stream.enter(), micro).reshape(1)
        *bank, live = stream.finish()
        # The schedules detach what they are given in place, which views do not allow; nor may an input come out again.
        carried = tuple(x.clone() for x in (live, *bank[len(bank) - self.sends :]))
        self.sent_bytes = sum(x.nbytes for x in carried)
        return carried

    def _sites(self) -> list[Site]:
        model, sites = self.model, []
        blocks = blocks_before(model.config, self.place.first)
        for index in range(self.place.first, self.place.last):
            layer: Any = model.layers[index]
            sites.append(Site(layer.attn_res if blocks else None, layer.attn_norm_D, layer.eps, layer.starts_block))
            blocks += layer.starts_block
            sites.append(Site(layer.ffn_res if blocks else None, layer.ffn_norm_D, layer.eps))
        if self.place.is_last:
            # The stage's own, which are gathered when it runs where they are cut over ranks.
            sites.append(Site(self.output_res if blocks else None, self.norm_D, model.config.rms_norm_eps))
        return sites


__all__ = ["Kept", "Loss", "MicroBatch", "StageModule"]
