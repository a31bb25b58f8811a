"""Matrices cut over four ranks and experts spread over the same, with fewer tokens than ranks: one process's numbers.

Between attention layers a rank has ceil(T / 4) tokens or what is left, so with few tokens some have none. float64: what
differs is the order of sums, below 1e-12 of the largest gradient.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from test_expert_training import spawn
from train_tiny import VOCAB, tiny_model

from perilune.config import ModelConfig
from perilune.model import Transformer, initialize
from perilune.ops.sequences import Sequences
from perilune.parallel import mesh
from perilune.parallel.expert import Collective, ExpertParallel, exact
from perilune.parallel.expert.model import Mixture, cut, cut_experts, is_stacked
from perilune.parallel.tensor import cut_tensor, find_cut
from perilune.parallel.tensor_model import CUT, cut_model, sharded_cross_entropy
from perilune.train.loss import cross_entropy

RANKS = 4
TOKENS = {1: [1, 0, 0, 0], 3: [1, 1, 1, 0], 5: [2, 2, 1, 0], 9: [3, 3, 3, 0]}


def model() -> Transformer:
    hf = tiny_model()
    hf["text_config"] |= {"num_attention_heads": RANKS, "num_key_value_heads": RANKS}
    hf["text_config"]["linear_attn_config"] |= {"num_heads": RANKS}
    net = Transformer(ModelConfig.from_hf(hf)).double()
    initialize(net, 0)
    return net


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sequences]:
    ids = torch.randint(VOCAB, (tokens + 1,), generator=torch.Generator().manual_seed(tokens))
    return ids[:-1], ids[1:], torch.ones(tokens, dtype=torch.bool), Sequences.from_lengths([tokens])


def gradients(net: Transformer) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters()}


def is_cut(net: Transformer, name: str) -> bool:
    found = find_cut(net.config, name)
    return found is not None and found.group in CUT


def work(rank: int) -> dict[int, Any]:
    """Of each number of tokens: the loss, this rank's rows, and its gradients, those of whole parameters added up."""
    here = mesh.start(torch.device("cpu"), timeout=100.0, axes=mesh.Axes(tp=RANKS))
    assert here.tp is not None
    found = {}
    for tokens in TOKENS:
        net = model()
        moe = net.config.moe
        cut_model(net, here.tp)
        cut_experts(net, here.shard, here.shards)
        parallel = ExpertParallel(Collective(here.experts), moe.num_experts, moe.top_k, tokens, exact())
        net.parts = dataclasses.replace(net.parts, mixture=Mixture(parallel))
        tokens_T, targets_T, mask_T, sequences = batch(tokens)
        x_SD = net.hidden(tokens_T, sequences).x_TD
        loss = sharded_cross_entropy(x_SD, net.lm_head.weight, targets_T, mask_T, here.tp)
        loss.backward()
        grads = gradients(net)
        for name, grad in grads.items():
            if not is_stacked(name) and not is_cut(net, name):
                dist.all_reduce(grad)
        found[tokens] = (loss.item(), x_SD.shape[0], {n: g.numpy() for n, g in grads.items()})
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fewer_tokens_than_ranks() -> None:
    results = spawn(work, RANKS, limit=350)
    assert not [result for result in results if isinstance(result, str)], results
    for tokens, rows in TOKENS.items():
        net = model()
        tokens_T, targets_T, mask_T, sequences = batch(tokens)
        x_TD = net.hidden(tokens_T, sequences).x_TD
        loss = cross_entropy(x_TD, net.lm_head.weight, targets_T, mask_T)[0]
        loss.backward()
        assert [result[tokens][1] for result in results] == rows
        for rank, result in enumerate(results):
            got_loss, _, got = result[tokens]
            assert got_loss == pytest.approx(loss.item(), rel=1e-12)
            for name, want in gradients(net).items():
                size = max(float(want.abs().max()), 1e-3)
                if is_stacked(name):
                    want = cut(want, rank, RANKS)
                elif is_cut(net, name):
                    found = find_cut(net.config, name)
                    assert found is not None
                    want = cut_tensor(want, found, rank, RANKS)
                assert float((torch.from_numpy(got[name]) - want).abs().max()) <= 1e-12 * size, (tokens, rank, name)
