"""Planner, destination rows and the direct layer as kernels: in Triton's interpreter, and on a GPU where there is one.

Planner and rows are integers and equal to the bit. The layer is compared with the mixture in one place in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from balanced import ACT, EXPERTS, INNER, TOP_K, WIDTH, Case, dense, gradients, mixture
from loads import KINDS, counts
from triton_cpu import CUDA, DEVICE

from perilune import Error
from perilune.config import ModelConfig
from perilune.model import Transformer, initialize
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.ops.norm import rms_norm
from perilune.ops.sequences import Sequences
from perilune.parallel import expert
from perilune.parallel.beside import Beside
from perilune.parallel.expert import DirectParallel, Symmetric, Virtual, plan_reference, plan_triton
from perilune.parallel.expert import direct as direct_module
from perilune.parallel.expert.layout_triton import plan_and_lay_out
from perilune.parallel.expert.model import Mixture
from perilune.parallel.expert.plan import count, destinations, lay_out, slots_for
from perilune.parallel.expert.rows_triton import count_choices, destination_rows

NAN = float("nan")
POLICIES = {
    "exact": expert.exact(),
    "one donor": expert.one_donor(),
    "off": expert.off(),
    "tolerant": expert.tolerant(0.02),
    "min rows": expert.tolerant(0.02, 300),
    "budget": expert.budget(2),
}


def equal_plans(c_RE: torch.Tensor, policy: expert.Policy, domains: list[int] | None, align: int) -> expert.Plan:
    want = plan_reference(c_RE, policy, domains)
    got = plan_triton(c_RE.to(DEVICE), policy, domains)
    assert torch.equal(got.alloc_RE.cpu(), want.alloc_RE)
    assert torch.equal(got.rule.cpu(), want.rule)
    rows = lay_out(c_RE, want, slots_for(policy, *c_RE.shape), align)
    ours = plan_and_lay_out(c_RE.to(DEVICE), policy, domains, align)
    for name in ("alloc_RE", "rule", "slots_RB", "ends_RG", "rows_RG", "starts_RE"):
        a, b = getattr(ours, name), getattr(rows, name)
        assert a.dtype == b.dtype, name
        assert torch.equal(a.cpu(), b), name
    return rows


# The interpreter takes a tenth of a second a plan, so few loads reach everything; the GPU gets many.
@pytest.mark.parametrize("policy", POLICIES)
def test_the_planner_equals_the_reference_to_the_bit(policy: str) -> None:
    equal_plans(counts("idle rank", 8, 2, 999, seed=1), POLICIES[policy], None, align=8)


def test_every_rule_and_shape() -> None:
    seen = set()
    for kind, ranks, home in (("nothing", 3, 2), ("lognormal", 3, 5), ("one rank", 7, 1), ("idle rank", 8, 2)):
        seen.add(expert.RULES[int(equal_plans(counts(kind, ranks, home, 77, 1), expert.exact(), None, 1).rule)])
    equal_plans(counts("lognormal", 1, 3, 77, 1), expert.exact(), None, 4)
    # Homes of more experts than a warp has lanes.
    equal_plans(counts("idle rank", 3, 700, 77, 1), expert.budget(2), None, 1)
    assert seen == {"home", "multi-donor", "capped fan-in"}


@pytest.mark.parametrize("kind", ["lognormal", "idle rank"])
def test_domains_on_the_device(kind: str) -> None:
    equal_plans(counts(kind, 8, 2, 999, seed=1), expert.exact(), [r % 2 for r in range(8)], align=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_many_loads_on_the_device(kind: str) -> None:
    # The reference in loops takes most of the time.
    shapes = [(1, 5), (2, 112), (3, 7), (4, 48), (8, 2), (16, 3), (64, 14)]
    for seed, (ranks, home) in enumerate(shapes):
        for tokens in (1, 8192) if ranks < 64 else (999,):
            for policy in POLICIES.values():
                equal_plans(counts(kind, ranks, home, tokens, seed), policy, None, align=128)
        equal_plans(counts(kind, ranks, home, 999, seed), expert.exact(), [r % 3 for r in range(ranks)], align=8)


def draw_ids(ranks: int, home: int, top_k: int, tokens: int, seed: int) -> list[torch.Tensor]:
    """Ragged, one source empty, repeated ids in a token, some ids of -1."""
    generator = torch.Generator().manual_seed(seed)
    p_E = (2 * torch.randn(ranks * home, generator=generator)).exp()
    ids = []
    for rank in range(ranks):
        size = [tokens, 0, tokens // 3, 7][rank % 4] if ranks > 1 else tokens
        drawn = torch.zeros(0)
        if size:
            drawn = torch.multinomial(p_E, size * top_k, replacement=True, generator=generator)
        drawn = drawn.long().view(size, top_k)
        ids.append(drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < 0.1, -1))
    return ids


SHAPES = [(1, 4, 2, 40), (2, 4, 3, 180), (5, 7, 1, 300), (8, 2, 4, 70)]
LARGE = [(2, 112, 16, 8192), (8, 112, 16, 4096), (64, 14, 16, 1024), (3, 300, 8, 5000)]


@pytest.mark.parametrize("shape", SHAPES + [pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE], ids=str)
def test_destination_rows_equal_the_reference(shape: tuple[int, int, int, int]) -> None:
    ranks, home, _, tokens = shape
    experts, ids = ranks * home, draw_ids(*shape, seed=tokens)
    counts_RE = torch.stack([count(x, experts) for x in ids])
    plan = lay_out(counts_RE, plan_reference(counts_RE, expert.exact()), home if ranks > 1 else 0, align=8)
    there = plan_and_lay_out(counts_RE.to(DEVICE), expert.exact(), None, align=8)
    rows = int(plan.ends_RG.max()) + 5
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for rank, x in enumerate(ids):
        counts_E, earlier_CE = count_choices(x.to(DEVICE), experts, flag)
        assert torch.equal(counts_E.cpu(), counts_RE[rank])
        got = destination_rows(there, x.to(DEVICE), earlier_CE, rank, rows)
        where, row = destinations(plan, x, rank)
        assert torch.equal(got.long().cpu(), torch.where(where >= 0, where * rows + row, -1))
    assert not flag.item()


def poisoned(parallel: DirectParallel) -> DirectParallel:
    """Every buffer that others write starts as NaN."""
    space = parallel.workspace
    for shared in (*space.rows, space.weights, space.results, space.numbers, *space.slots, *space.grads):
        for tensor in shared.mine:
            tensor.fill_(NAN)
    return parallel


@pytest.fixture(autouse=True)
def poison_local_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = direct_module._beside
    monkeypatch.setattr(direct_module, "_beside", lambda like, slots: fresh(like, slots).fill_(NAN))


def run(case: Case, parallel: DirectParallel, sizes: list[int]) -> tuple[list[torch.Tensor], expert.Stats]:
    used: list[expert.DirectPlanned] = []

    def layer(x: torch.Tensor, routing: moe.Routing, weights: Dense) -> torch.Tensor:
        used.append(parallel.plan(routing.ids_TJ.split(sizes)))
        return expert.balanced_experts(parallel, x, routing.weights_TJ, weights, used[0], ACT)

    return gradients(case, layer, DEVICE), parallel.stats(used[0], WIDTH * 8, 1000)


@pytest.mark.parametrize(
    ("sizes", "align", "dtype"),
    [
        ([12], 1, torch.float32),
        ([9, 3], 4, torch.float64),
        ([6, 6], 1, torch.float32),
        ([5, 0, 4, 3], 4, torch.float32),
        ([5, 0, 4, 3], 1, torch.float64),
    ],
    ids=str,
)
def test_the_direct_layer_equals_the_dense_one(sizes: list[int], align: int, dtype: torch.dtype) -> None:
    ranks, case = len(sizes), Case(12, 4.0, dtype)
    transport = Virtual(ranks, DEVICE)
    parallel = poisoned(DirectParallel(transport, EXPERTS, TOP_K, 12, WIDTH, INNER, dtype, align=align))
    got, stats = run(case, parallel, sizes)
    # Sums of 24 to 72 products in another order.
    bound = 1e-12 if dtype == torch.float64 else 3e-6
    for a, b in zip(got, gradients(Case(12, 4.0, torch.float64), dense), strict=True):
        assert (a.double().cpu() - b).norm() <= bound * b.norm()
    assert stats.residual == 0
    if ranks > 1:
        assert stats.before > 1.1
        assert stats.copies > 0
    ids = moe.route(case.leaves()[1].detach(), case.bias, TOP_K, 1.0).ids_TJ.split(sizes)
    listed = expert.ExpertParallel(expert.Local(ranks), EXPERTS, TOP_K, 12, align=align)
    assert stats == listed.stats(listed.plan(ids), WIDTH * 8, 1000)
    assert parallel.rows == listed.rows


@pytest.mark.gpu
def test_the_direct_layer_in_bf16_at_width() -> None:
    """Against float64 on bf16 inputs: operands rounded to bf16 twice on the way (activation, output)."""
    experts, top_k, width, inner, tokens = 32, 8, 1024, 768, 512
    generator = torch.Generator().manual_seed(0)
    x, logits = (torch.randn(4 * tokens, n, generator=generator) for n in (width, experts))
    logits[:, :8] += 1.5
    up = torch.randn(experts, 2 * inner, width, generator=generator) / width**0.5
    down = torch.randn(experts, width, inner, generator=generator) / inner**0.5
    d_y = torch.randn(4 * tokens, width, generator=generator).bfloat16()
    routing = moe.route(logits, torch.zeros(experts), top_k, 1.0)
    results = []
    for ranks in (0, 1, 2, 4):
        dtype = torch.float64 if ranks == 0 else torch.bfloat16
        leaves = [t.bfloat16().to("cuda", dtype).requires_grad_() for t in (x, up, down)]
        w = routing.weights_TJ.detach().to("cuda", torch.float64 if ranks == 0 else torch.float32).requires_grad_()
        ids = routing.ids_TJ.to("cuda")
        if ranks == 0:
            y = mixture(leaves[0], ids, w, Dense(*leaves[1:]), experts, exact=False)
        else:
            size = 4 * tokens // ranks
            parallel = poisoned(DirectParallel(Virtual(ranks, "cuda"), experts, top_k, size, width, inner))
            planned = parallel.plan(ids.split(size))
            y = expert.balanced_experts(parallel, leaves[0], w, Dense(*leaves[1:]), planned, ACT)
            stats = parallel.stats(planned, 1, 1)
            assert ranks == 1 or (stats.before > 1.1 and stats.copies > 0)
        grads = torch.autograd.grad(y, (*leaves, w), d_y.to("cuda", dtype))
        results.append([t.detach().double().cpu() for t in (y, *grads)])
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert (a - b).norm() <= 1e-2 * b.norm()
    # Which rank computes a row does not change its bits as long as a product's bits depend on its group alone.
    assert (results[1][0] - results[3][0]).norm() <= 1e-3 * results[1][0].norm()


class Stepped:
    """One layer's forward and backward pass on static inputs, as a graph would capture it."""

    def __init__(self, parallel: DirectParallel, tokens: int, experts: int, top_k: int, width: int, inner: int) -> None:
        new = {"device": "cuda", "dtype": torch.bfloat16}
        self.parallel, self.size = parallel, tokens // parallel.transport.ranks
        self.x = torch.randn(tokens, width, **new).requires_grad_()
        self.w = torch.rand(tokens, top_k, device="cuda").requires_grad_()
        self.up = (torch.randn(experts, 2 * inner, width, **new) / width**0.5).requires_grad_()
        self.down = (torch.randn(experts, width, inner, **new) / inner**0.5).requires_grad_()
        self.d_y = torch.randn(tokens, width, **new)
        self.ids = torch.zeros(tokens, top_k, dtype=torch.int64, device="cuda")

    def __call__(self) -> list[torch.Tensor]:
        planned = self.parallel.plan(self.ids.split(self.size))
        y = expert.balanced_experts(self.parallel, self.x, self.w, Dense(self.up, self.down), planned, ACT)
        return [y.detach(), *torch.autograd.grad(y, (self.x, self.w, self.up, self.down), self.d_y)]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_graph_captured_at_one_routing_is_right_at_others(ranks: int) -> None:
    experts, top_k, width, inner, tokens = 32, 4, 512, 256, 1024
    torch.manual_seed(0)
    parallel = poisoned(DirectParallel(Virtual(ranks, "cuda"), experts, top_k, tokens // ranks, width, inner))
    step = Stepped(parallel, tokens, experts, top_k, width, inner)
    routings = [torch.randn(tokens, experts, device="cuda") for _ in range(4)]
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


@pytest.mark.gpu
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
        Virtual(4, "cuda"), moe_config.num_experts, moe_config.top_k, 64, width, moe_config.expert_size
    )
    mixture_of = Mixture(poisoned(parallel))
    parts = dataclasses.replace(model.parts, mixture=mixture_of, beside=Beside())
    x = torch.zeros(256, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sequences = Sequences.from_lengths([100, 156], device=x.device)
    d_y = torch.randn(256, config.hidden_size, device="cuda").bfloat16()
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


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_symmetric_memory_of_one_rank_equals_a_virtual_one() -> None:
    experts, top_k, width, inner, tokens = 16, 4, 512, 256, 300
    torch.manual_seed(0)
    results = []
    for transport in (Symmetric(), Virtual(1, "cuda")):
        parallel = poisoned(DirectParallel(transport, experts, top_k, tokens, width, inner))
        torch.manual_seed(1)
        step = Stepped(parallel, tokens, experts, top_k, width, inner)
        step.ids.copy_(torch.randn(tokens, experts, device="cuda").topk(top_k).indices)
        results.append(step())
        results.append(step())
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert torch.equal(a, b)
            assert not a.isnan().any()


def small(**changes: object) -> DirectParallel:
    arguments = {"experts": 4, "top_k": 2, "tokens": 3, "width": 8, "inner": 8, "dtype": torch.float32} | changes
    return DirectParallel(Virtual(2, DEVICE), **arguments)


def test_ids_out_of_range_are_left_out_and_told_late() -> None:
    parallel = small()
    ids = torch.tensor([[0, 3], [1, 9], [2, -1]], device=DEVICE)
    planned = parallel.plan([ids, ids[:0]])
    assert (planned.dst[0] >= 0).tolist() == [[True, True], [True, False], [True, False]]
    with pytest.raises(Error, match=r"ids were out of range; must be in -1\.\.3"):
        parallel.stats(planned, 1, 1)
    parallel.raise_if_refused()


def test_refusals_before_work() -> None:
    parallel = small()
    ids = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(Error, match=r"must be int64 \[tokens, 2\] of at most 3 tokens"):
        parallel.plan([ids, ids[:1]])
    with pytest.raises(Error, match="multiples of 16 bytes"):
        small(width=6)
    with pytest.raises(Error, match="the workspace is for"):
        small(tokens=5, workspace=parallel.workspace)
    with pytest.raises(Error, match="made with training=False"):
        small(training=False).begin_backward()
    with pytest.raises(Error, match="experts is 5"):
        small(experts=5)


def test_a_stale_copy_is_an_error() -> None:
    first = small()
    second = small(workspace=first.workspace)
    ids = torch.tensor([[0, 1]] * 3, device=DEVICE)
    own = [tuple(torch.randn(2, *shape, device=DEVICE) for shape in ((16, 8), (8, 8))) for _ in range(2)]
    planned = first.plan([ids, ids])
    generation = first.push_copies(own, planned)
    assert torch.equal(first.copies(1, generation)[0][0], own[0][0][int(planned.plan.slots_RB[1, 0])])
    second.push_copies(own, planned)
    with pytest.raises(Error, match=r"copies of generation \d+ are gone, the workspace holds \d+"):
        first.copies(1, generation)


if CUDA:
    torch.backends.cuda.matmul.allow_tf32 = False
