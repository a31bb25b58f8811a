"""A model whose matrices are cut over ranks (`tensor`), with the tokens between them cut as well (sequence parallel).

Between attention layers every rank has its run of the stream's tokens: norms, attention residuals, routing and experts
are done once for each token. A layer of attention, and a dense MLP, gathers the tokens, uses this rank's heads or
columns, and adds the ranks' terms up while cutting the tokens again. Embedding and head are cut by vocabulary; the loss
takes the largest logit and the sum of exponentials over all ranks and never has a whole row of logits.

Legend: T tokens of the stream, S tokens of one rank (ceil(T / ranks), zeros after the last one), D model width,
V words of one rank, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from perilune.model import Transformer
from perilune.model.moe import DenseMlp
from perilune.parallel.collectives import gather_rows, rank_in, ranks_of, scatter_rows
from perilune.parallel.tensor import Group, check_ranks, cut_tensor, find_cut

# Experts are spread by ep, and each rank has tokens of its own for what stands beside them.
CUT: tuple[Group, ...] = ("attention", "mlp", "vocabulary")


def cut_model(model: Transformer, group: dist.ProcessGroup) -> None:
    """Keep this rank's part of the parameters and let the modules talk to the group's other ranks, in place.

    `model.hidden` then takes all tokens and returns this rank's S; `sharded_cross_entropy` continues from there.
    Raises Error when a size is not a multiple of the group's.
    """
    rank, ranks = rank_in(group), ranks_of(group)
    check_ranks(model.config, ranks, CUT)
    for prefix, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            cut = find_cut(model.config, f"{prefix}.{name}" if prefix else name)
            if cut is not None and cut.group in CUT:
                part = cut_tensor(param.detach(), cut, rank, ranks)
                setattr(module, name, nn.Parameter(part, param.requires_grad))
    tokens = _Tokens(group)
    embed: Any = VocabularyEmbedding(model.embed.weight, tokens)
    model.embed = embed
    for layer in model.layers:
        layer.attn.heads //= ranks  # type: ignore[union-attr, operator]
        layer.attn.register_forward_pre_hook(tokens.gather_for_attention)  # type: ignore[union-attr]
        layer.attn.register_forward_hook(tokens.scatter_after)  # type: ignore[union-attr]
        if isinstance(layer.ffn, DenseMlp):
            layer.ffn.register_forward_pre_hook(tokens.gather_for_mlp)
            layer.ffn.register_forward_hook(tokens.scatter_after)


class _Tokens:
    """Which tokens of the pass under way are where. total: T, known from the attention before it is needed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.total = group, 0
        self.rank, self.ranks = rank_in(group), ranks_of(group)

    @property
    def most(self) -> int:
        """S."""
        return -(-self.total // self.ranks)

    def gather(self, x_SD: torch.Tensor) -> torch.Tensor:
        """This rank's tokens -> all of them."""
        return gather_rows(_pad(x_SD, self.most), self.group)[: self.total]

    def scatter(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Terms of all tokens -> the sum, of this rank's tokens."""
        mine = scatter_rows(_pad(y_TD, self.most * self.ranks), self.group)
        return mine[: max(0, min(self.most, self.total - self.rank * self.most))]

    def gather_for_attention(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.total = args[1].total
        return (self.gather(args[0]), *args[1:])

    def gather_for_mlp(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.gather(args[0]), *args[1:])

    def scatter_after(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        if isinstance(result, tuple):
            return (self.scatter(result[0]), *result[1:])
        return self.scatter(result)


class VocabularyEmbedding(nn.Module):
    """tokens_T -> this rank's rows of the embedding, from the words of all ranks."""

    def __init__(self, weight: torch.Tensor, tokens: _Tokens) -> None:
        super().__init__()
        self.weight, self.tokens = nn.Parameter(weight.detach(), weight.requires_grad), tokens

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        self.tokens.total = tokens_T.shape[0]
        words = self.weight.shape[0]
        own_T = tokens_T - self.tokens.rank * words
        mine_T1 = ((own_T >= 0) & (own_T < words))[:, None]
        rows_TD = nn.functional.embedding(own_T.clamp(0, words - 1), self.weight)
        return self.tokens.scatter(torch.where(mine_T1, rows_TD, 0))


def sharded_cross_entropy(
    x_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    mask_T: torch.Tensor,
    group: dist.ProcessGroup,
    max_logits: int = 4096 * 2048,
) -> torch.Tensor:
    """`train.loss.cross_entropy` over a head that is cut by vocabulary: the summed loss of all T tokens, on every rank.

    x_SD: this rank's tokens, weight_VD: its words; targets_T, mask_T: of all tokens. max_logits: most logits of one
    rank that exist at a time. Every rank must call the backward pass, with the same gradient.
    """
    tokens = _Tokens(group)
    tokens.total = targets_T.shape[0]
    chunk = max(1, max_logits // weight_VD.shape[0])
    loss: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        tokens.gather(x_SD), weight_VD, targets_T, mask_T, chunk, group
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        mask_T: torch.Tensor,
        chunk: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        d_x_TD, d_weight_VD = torch.empty_like(x_TD), torch.zeros_like(weight_VD, dtype=wide)
        loss = torch.zeros((), dtype=torch.float64, device=x_TD.device)
        words = weight_VD.shape[0]
        for begin in range(0, x_TD.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            x_CD, mask_C = x_TD[rows], mask_T[rows]
            own_C = torch.where(mask_C, targets_T[rows], 0) - rank_in(group) * words
            mine_C1 = ((own_C >= 0) & (own_C < words))[:, None]
            own_C1 = own_C.clamp(0, words - 1)[:, None]
            logits_CV = (x_CD @ weight_VD.T).to(wide)
            top_C1 = logits_CV.amax(1, keepdim=True)
            dist.all_reduce(top_C1, op=dist.ReduceOp.MAX, group=group)
            logits_CV -= top_C1
            target_C1 = torch.where(mine_C1, logits_CV.gather(1, own_C1), 0)
            weights_CV = logits_CV.exp_()
            sums_C2 = torch.cat((weights_CV.sum(1, keepdim=True), target_C1), dim=1)
            dist.all_reduce(sums_C2, group=group)
            nats_C = sums_C2[:, 0].log() - sums_C2[:, 1]
            loss += torch.where(mask_C, nats_C, 0).sum(dtype=torch.float64)
            weights_CV /= sums_C2[:, :1]
            weights_CV.scatter_add_(1, own_C1, -mine_C1.to(wide))
            d_logits_CV = weights_CV.masked_fill_(~mask_C[:, None], 0).to(x_TD.dtype)
            d_x_TD[rows] = d_logits_CV @ weight_VD
            d_weight_VD += d_logits_CV.T @ x_CD
        ctx.save_for_backward(d_x_TD, d_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_x_TD, d_weight_VD = ctx.saved_tensors
        d_weight = (d_weight_VD * scale.to(d_weight_VD.dtype)).to(ctx.weight_dtype)
        return d_x_TD * scale.to(d_x_TD.dtype), d_weight, None, None, None, None


def _pad(x_TD: torch.Tensor, rows: int) -> torch.Tensor:
    """Zeros after the last row, up to so many rows."""
    return nn.functional.pad(x_TD, (0, 0, 0, rows - x_TD.shape[0]))


__all__ = ["CUT", "VocabularyEmbedding", "cut_model", "sharded_cross_entropy"]
