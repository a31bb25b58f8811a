"""Attention residuals, the norms, the short convolution and the gated unit for bench/modules.py; and a training step.

    python bench/modules.py --only attnres
    python bench/modules_attnres.py --out bench/results/attnres_training.json

bfloat16, 8192 tokens at Kimi-K3 widths. "eager" and "compile" are the formula in torch; fla-core is used when it can be
imported. The second command times forward and backward of a 12-layer model with and without attention residuals.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from modules_timing import figures, rounds
from torch.nn import functional as nnf

from perilune.config import Activation, AttnResConfig, ModelConfig
from perilune.model import Transformer
from perilune.ops.activation import glu
from perilune.ops.attnres import merge_norm, mix_completed, mix_norm
from perilune.ops.conv import short_conv
from perilune.ops.norm import add_rms_norm, gated_rms_norm, rms_norm
from perilune.ops.sequences import Sequences

T, D, H, V, C, F = 8192, 7168, 96, 128, 3 * 96 * 128, 12288
EPS = 1e-5
SITU = Activation("situ", beta=4.0, linear_beta=25.0)
COMPILED = ("mix_norm", "add_rms_norm", "glu")
Tensors = list[torch.Tensor]
Run = Callable[..., Any]


def rows(
    device: torch.device | str = "cuda", tokens: int = T, count: int = 9, compiled: Sequence[str] = COMPILED
) -> Iterator[dict[str, Any]]:
    """One row a case and implementation. compiled: the operations that torch.compile is tried on as well."""
    for name, shape, floors, inputs, outputs, runs in _operations(torch.device(device), tokens):
        if name in compiled:
            torch._dynamo.reset()
            runs["compile"] = torch.compile(runs["eager"], dynamic=False)
        slopes = [torch.randn_like(y) for y in outputs]
        calls = {who: partial(_forward, run, inputs) for who, run in runs.items()}
        times = rounds(calls, count, graph=tokens_of(inputs) <= 64)
        yield from figures("attnres", f"{name} {shape}, forward", times, bytes_=floors[0])
        if len(floors) > 1:
            calls = {who: partial(_both, run, inputs, slopes) for who, run in runs.items()}
            times = rounds(calls, count)
            yield from figures("attnres", f"{name} {shape}, forward+backward", times, bytes_=sum(floors))
        torch.cuda.empty_cache()


def tokens_of(inputs: Tensors) -> int:
    """T of a case: every operation has its tokens in the first dimension of its largest input."""
    return max(inputs, key=lambda x: x.numel()).shape[0]


def _forward(run: Run, inputs: Tensors) -> object:
    with torch.no_grad():
        return run(*inputs)


def _both(run: Run, inputs: Tensors, slopes: Tensors) -> object:
    outputs = run(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return torch.autograd.grad(outputs, inputs, slopes[: len(outputs)])


def _operations(device: torch.device, T: int) -> Any:
    """(name, shape, floors in bytes of forward and backward, inputs, outputs, implementations) of each operation."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    unit = T * D * 2
    fla = _fla()
    weights = [draw(D), (0.02 * draw(D)).detach().requires_grad_(), draw(D)]
    for n in (2, 5, 9):
        sources = [draw(T, D) for _ in range(n)]
        # Later uses of every source send a gradient each, as in a model.
        runs = {"perilune": _mix_ours, "eager": _mix_eager}
        yield (
            "mix_norm",
            f"n {n}, D {D}",
            ((n + 1) * unit, (3 * n + 1) * unit),
            [*weights, *sources],
            sources[:1] + sources,
            runs,
        )
        del sources
    yield from _inference(device, T)
    x, y, w = draw(T, D), draw(T, D), draw(D)
    runs = {"perilune": lambda x, w: rms_norm(x, w, EPS), "eager": lambda x, w: nnf.rms_norm(x, (D,), w, EPS)}
    if fla:
        runs["fla"] = lambda x, w: fla["rms_norm"](x, w, None, eps=EPS)
    yield "rms_norm", f"D {D}", (2 * unit, 3 * unit), [x, w], [x], runs
    runs = {"perilune": lambda x, y, w: add_rms_norm(x, y, w, EPS), "eager": _add_norm_eager}
    if fla:
        runs["fla"] = lambda x, y, w: fla["rms_norm"](x, w, None, residual=y, eps=EPS, prenorm=True)[::-1]
    yield "add_rms_norm", f"D {D}", (4 * unit, 4 * unit), [x, y, w], [x, x], runs
    x, gate, w, head = draw(T, H, V), draw(T, H, V), draw(V), T * H * V * 2
    runs = {"perilune": lambda x, w, g: gated_rms_norm(x, w, g, EPS), "eager": _gated_eager}
    if fla:
        runs["fla"] = lambda x, w, g: fla["rms_norm_gated"](x, g, w, None, activation="sigmoid", eps=EPS)
    yield "gated_rms_norm", f"H {H}, V {V}", (3 * head, 5 * head), [x, w, gate], [x], runs
    u, w = draw(T, C), torch.randn(C, 4, device=device, requires_grad=True)
    sequences = Sequences.from_lengths([T // 2, T // 4, T // 4], device=device)
    runs = {"perilune": lambda u, w: short_conv(u, w, sequences)[0], "eager": _conv_eager}
    if fla:
        cu = sequences.cu_seqlens
        runs["fla"] = lambda u, w: fla["causal_conv1d"](u[None], w, activation="silu", cu_seqlens=cu)[0][0]
    yield "short_conv", f"C {C}, 3 documents", (2 * T * C * 2, 3 * T * C * 2), [u, w], [u], runs
    gate, up, inner = draw(T, F), draw(T, F), T * F * 2
    runs = {"perilune": lambda g, u: glu(g, u, SITU), "eager": _glu_eager}
    yield "glu", f"situ, F {F}", (3 * inner, 5 * inner), [gate, up], [gate], runs


def _inference(device: torch.device, T: int) -> Any:
    """Eight mixers of a block: in two passes, and each by itself."""
    for n, tokens in ((4, T), (9, T), (9, 16), (9, 1)):
        sources = [torch.randn(tokens, D, device=device, dtype=torch.bfloat16) for _ in range(n)]
        w = [torch.rand(D, device=device, dtype=torch.bfloat16) for _ in range(16)]

        def two(*x: torch.Tensor, w: Tensors = w) -> Tensors:
            partials = mix_completed(x[:-1], w[:8], w[8:], EPS)
            return [merge_norm(p, x[-1], w[m], w[8 + m], EPS, w[0], EPS) for m, p in enumerate(partials)]

        def each(*x: torch.Tensor, w: Tensors = w) -> Tensors:
            return [mix_norm(x, w[m], w[8 + m], EPS, w[0], EPS)[0] for m in range(8)]

        floor = (n - 1 + 8 + 8 * 3) * tokens * D * 2
        runs = {"perilune": two, "perilune, each by itself": each}
        yield "two passes x8", f"n {n}, D {D}, T {tokens}", (floor,), sources, sources[:1], runs


def _mix_ours(w_n: torch.Tensor, w_q: torch.Tensor, w_o: torch.Tensor, *sources: torch.Tensor) -> Tensors:
    x, again = mix_norm(sources, w_n, w_q, EPS, w_o, EPS)
    return [x, *again]


def _mix_eager(w_n: torch.Tensor, w_q: torch.Tensor, w_o: torch.Tensor, *sources: torch.Tensor) -> Tensors:
    x = torch.stack(sources).float()
    r = torch.rsqrt(x.pow(2).mean(-1) + EPS)
    p = torch.softmax((x @ (w_n.float() * w_q.float())) * r, 0)
    h = (p[:, :, None] * x).sum(0).to(sources[0].dtype)
    return [nnf.rms_norm(h, (D,), w_o, EPS), *(s.view_as(s) for s in sources)]


def _add_norm_eager(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Tensors:
    s = x + y
    return [s, nnf.rms_norm(s, (D,), w, EPS)]


def _gated_eager(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * r * w.float() * torch.sigmoid(g.float())).to(x.dtype)


def _conv_eager(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One document: torch's convolution knows no packing."""
    return nnf.silu(nnf.conv1d(u.t()[None], w[:, None].to(u.dtype), padding=3, groups=C)[0, :, : len(u)].t())


def _glu_eager(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    g, wide = g.float(), u.float()
    left = SITU.beta * torch.tanh(g / SITU.beta) * torch.sigmoid(g)
    return (left * SITU.linear_beta * torch.tanh(wide / SITU.linear_beta)).to(u.dtype)


def _fla() -> dict[str, Run]:
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.modules.norm.layernorm import rms_norm as fla_rms_norm
    except ImportError:
        return {}
    return {"causal_conv1d": causal_conv1d, "rms_norm_gated": rms_norm_gated, "rms_norm": fla_rms_norm}


def training_rows(device: torch.device | str = "cuda", count: int = 5) -> list[dict[str, Any]]:
    """Forward and backward of 12 layers (KDA and a dense MLP of width 12288, 708 M parameters each), 8192 tokens.

    A K3 layer works with 1.15 G parameters a token, so the share of attention residuals is larger here than there.
    Blocks of 12 layers, as in K3, give two sources; blocks of 2 give up to seven, as deeper layers of K3 have.
    """
    calls = {
        name: _step(_model(torch.device(device), block), torch.device(device))
        for name, block in (("without", None), ("blocks of 12", 12), ("blocks of 2", 2))
    }
    times = rounds(calls, count)
    base = times["without"]
    return [
        {"case": f"12 layers, d {D}, T {T}, {name}", **time, "speed": float(base["ms"]) / float(time["ms"])}
        for name, time in times.items()
    ]


_SHARED: dict[str, torch.Tensor] = {}


def _model(device: torch.device, block: int | None) -> Transformer:
    """The models share one set of large weights, so that three of them fit."""
    k3 = ModelConfig.from_pretrained("kimi-k3")
    config = replace(
        k3,
        num_layers=12,
        dense_layers=12,
        vocab_size=8192,
        intermediate_size=F,
        kda=replace(k3.kda, layers=tuple(range(12))),
        mla=replace(k3.mla, layers=()),
        attn_res=None if block is None else AttnResConfig(block),
        quant=None,
    )
    with torch.device("meta"):
        model = Transformer(config).bfloat16()
    for path, parameter in list(model.named_parameters()):
        if path not in _SHARED:
            value = torch.randn(parameter.shape, device=device, dtype=parameter.dtype).mul_(0.02)
            _SHARED[path] = value + 1 if parameter.dim() == 1 and "query" not in path else value
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(_SHARED[path]))
    return model


def _step(model: Transformer, device: torch.device) -> Run:
    tokens = torch.randint(8192, (T,), device=device)
    sequences = Sequences.from_lengths([T // 2, T // 2], device=device)
    slope = torch.randn(T, D, device=device, dtype=torch.bfloat16)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("lm_head")]

    def step() -> None:
        torch.autograd.grad(model.hidden(tokens, sequences).x_TD, parameters, slope, allow_unused=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = training_rows()
    for row in table:
        print(f"{row['case']}: {row['ms']:.1f} ms, {row['speed']:.3f} of the speed without")
    if options.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.out.write_text(json.dumps(facts | {"rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
