"""Graphs captured at one routing, replayed at others: the layer, a decoder layer, a decode step; one symmetric rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from balanced import ACT, poisoned
from triton_cpu import DEVICE

from perilune.config import ModelConfig
from perilune.model import Transformer, initialize
from perilune.ops.moe import Dense
from perilune.ops.norm import rms_norm
from perilune.ops.sequences import Sequences
from perilune.parallel import expert
from perilune.parallel.beside import Beside
from perilune.parallel.expert import DirectParallel, Symmetric, Virtual, direct_rows
from perilune.parallel.expert.model import Mixture

NAN = float("nan")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poison_local_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = direct_rows._beside
    monkeypatch.setattr(direct_rows, "_beside", lambda like, slots: fresh(like, slots).fill_(NAN))


class Stepped:
    """One layer's forward and backward pass on static inputs, as a graph would capture it."""

    def __init__(self, parallel: DirectParallel, tokens: int, experts: int, top_k: int, width: int, inner: int) -> None:
        new = {"device": DEVICE, "dtype": torch.bfloat16}
        self.parallel, self.size = parallel, tokens // parallel.transport.ranks
        self.x = torch.randn(tokens, width, **new).requires_grad_()
        self.w = torch.rand(tokens, top_k, device=DEVICE).requires_grad_()
        self.up = (torch.randn(experts, 2 * inner, width, **new) / width**0.5).requires_grad_()
        self.down = (torch.randn(experts, width, inner, **new) / inner**0.5).requires_grad_()
        self.d_y = torch.randn(tokens, width, **new)
        self.ids = torch.zeros(tokens, top_k, dtype=torch.int64, device=DEVICE)

    def __call__(self) -> list[torch.Tensor]:
        planned = self.parallel.plan(self.ids.split(self.size))
        y = expert.balanced_experts(self.parallel, self.x, self.w, Dense(self.up, self.down), planned, ACT)
        return [y.detach(), *torch.autograd.grad(y, (self.x, self.w, self.up, self.down), self.d_y)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_graph_captured_at_one_routing_is_right_at_others(ranks: int) -> None:
    experts, top_k, width, inner, tokens = 32, 4, 512, 256, 1024
    torch.manual_seed(0)
    parallel = poisoned(DirectParallel(Virtual(ranks, DEVICE), experts, top_k, tokens // ranks, width, inner))
    step = Stepped(parallel, tokens, experts, top_k, width, inner)
    routings = [torch.randn(tokens, experts, device=DEVICE) for _ in range(4)]
    for i, logits in enumerate(routings):
        logits[:, : 8 * (i % 2 + 1)] += 2.0 * i
    routings = [logits.topk(top_k).indices for logits in routings]
    routings.append(torch.zeros_like(routings[0]))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step.ids.copy_(routings[0])
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for ids in routings:
        step.ids.copy_(ids)
        graph.replay()
        got = [t.clone() for t in captured]
        for name, a, b in zip(("y", "dx", "dw", "d up", "d down"), got, step(), strict=True):
            assert torch.equal(a, b), name
            assert not a.isnan().any(), name


def test_a_decoder_layer_in_a_graph_equals_eager() -> None:
    """KDA, norms, router, latent projections, shared expert, experts of 4 virtual ranks; forward and backward."""
    hf = ModelConfig.from_pretrained("nano").to_hf()
    hf["text_config"] |= {"hidden_size": 256, "num_hidden_layers": 3, "num_experts": 32, "num_experts_per_token": 4}
    hf["text_config"] |= {"routed_expert_hidden_size": 128, "moe_intermediate_size": 64}
    kda = {"kda_layers": [1, 2], "full_attn_layers": [3], "head_dim": 128, "num_heads": 2}
    hf["text_config"]["linear_attn_config"] |= kda
    config = ModelConfig.from_hf(hf)
    model = initialize(Transformer(config), seed=0).cuda()
    for name, param in model.named_parameters():
        if not name.endswith(("conv_CW", "A_log_H", "dt_bias_HK", "o_norm_K")):
            param.data = param.data.bfloat16()
    index = config.sparse_layers[0]
    layer, moe_config = model.layers[index], config.moe
    width = moe_config.latent_size or config.hidden_size
    parallel = DirectParallel(
        Virtual(4, DEVICE), moe_config.num_experts, moe_config.top_k, 64, width, moe_config.expert_size
    )
    mixture_of = Mixture(poisoned(parallel))
    parts = dataclasses.replace(model.parts, mixture=mixture_of, beside=Beside())
    x = torch.zeros(256, config.hidden_size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    sequences = Sequences.from_lengths([100, 156], device=x.device)
    d_y = torch.randn(256, config.hidden_size, device=DEVICE).bfloat16()
    params = [p for name, p in layer.named_parameters() if "_res" not in name]

    def step() -> list[torch.Tensor]:
        h = x + layer.attn(rms_norm(x, layer.attn_norm_D, layer.eps), sequences, parts, None)[0]
        y = h + layer.ffn(rms_norm(h, layer.ffn_norm_D, layer.eps), parts)[0]
        return [y.detach(), *torch.autograd.grad(y, (x, *params), d_y)]

    inputs = [torch.randn_like(x) * scale for scale in (1.0, 3.0, 0.3)]
    inputs.append(inputs[0][:1].detach().expand_as(x).contiguous())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            x.data.copy_(inputs[0])
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    mixture_of.planned.clear()
    before = []
    for value in inputs:
        x.data.copy_(value)
        graph.replay()
        got = [t.clone() for t in captured]
        for i, (a, b) in enumerate(zip(got, step(), strict=True)):
            assert torch.equal(a, b), i
            assert not a.isnan().any(), i
        before += [stats.before for stats in mixture_of.drain()]
    assert max(before) > 1.5 > min(before)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_symmetric_memory_of_one_rank_equals_a_virtual_one() -> None:
    experts, top_k, width, inner, tokens = 16, 4, 512, 256, 300
    torch.manual_seed(0)
    results = []
    for transport in (Symmetric(), Virtual(1, DEVICE)):
        parallel = poisoned(DirectParallel(transport, experts, top_k, tokens, width, inner))
        torch.manual_seed(1)
        step = Stepped(parallel, tokens, experts, top_k, width, inner)
        step.ids.copy_(torch.randn(tokens, experts, device=DEVICE).topk(top_k).indices)
        results.append(step())
        results.append(step())
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert torch.equal(a, b)
            assert not a.isnan().any()


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_a_decode_graph_with_padded_tokens(tokens: int) -> None:
    """Forward only: tokens of id -1 give zero whatever they hold, and the graph has the bits of eager calls."""
    experts, top_k, width, inner, ranks = 32, 4, 512, 256, 4
    torch.manual_seed(0)
    shape = (experts, top_k, tokens, width, inner)
    parallel = poisoned(DirectParallel(Virtual(ranks, DEVICE), *shape, training=False))
    new = {"device": DEVICE, "dtype": torch.bfloat16}
    weights = Dense(torch.randn(experts, 2 * inner, width, **new) / 20, torch.randn(experts, width, inner, **new) / 16)
    x, w = torch.randn(ranks * tokens, width, **new), torch.rand(ranks * tokens, top_k, device=DEVICE)
    ids = torch.zeros(ranks * tokens, top_k, dtype=torch.int64, device=DEVICE)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return expert.balanced_experts(parallel, x, w, weights, parallel.plan(ids.split(tokens)), ACT)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(4):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        ids.copy_(torch.randn(ranks * tokens, experts, device=DEVICE, generator=generator).topk(top_k).indices)
        padded = torch.rand(ranks * tokens, device=DEVICE, generator=generator) < 0.3 * seed
        ids.masked_fill_(padded.unsqueeze(1), -1)
        x.normal_(generator=generator).masked_fill_(padded.unsqueeze(1), float("nan"))
        graph.replay()
        got = captured.clone()
        assert torch.equal(got, step())
        assert torch.equal(got[padded], torch.zeros_like(got[padded]))
        assert not got.isnan().any()
