"""Time KDA with Kimi-Linear's softplus gate, which has no bound, beside the bounded gate, the Triton kernels, and fla.

    python bench/kda_softplus.py --out bench/results/kda_softplus.json [--fla]

One Hopper GPU; K = V = 128, bfloat16, gate, norms and sigmoid inside. What a gate costs depends on how steep it is:
`mild` is an untrained model's, `1 %` has a token of 300 nats in 1 % of the chunks and heads, `all` in every one; `n
windows` are gates as large everywhere as need so many further products (`triton_decay_hopper`). Milliseconds: median,
least and most of --rounds calls, which queue behind a sleeping kernel. --fla: with fla-core's own search, minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from perilune.config import Gate
from perilune.ops.kda import Raw, gradients_cuda, kda, triton_backward
from perilune.ops.kda import triton as kernels
from perilune.ops.kda.triton_forward import EPS, Inputs, Prepared, prepare, room
from perilune.ops.kda.triton_prepare import prepare_kernel
from perilune.ops.sequences import Sequences

os.environ.setdefault("FLA_FLASH_KDA", "0")  # fla's own kernels; it would call FlashKDA where that is installed
SAFE, SOFTPLUS = Gate("safe", -5.0), Gate("softplus")
DIM = 128
CASES = ((SAFE, "mild"), (SOFTPLUS, "mild"), (SOFTPLUS, "1 %"), (SOFTPLUS, "all"))
EVERYWHERE = {"1 window": 7.0, "11 windows": 50.0, "19 windows": 1e4}  # raw gates


def timed(call: Callable[[], object], rounds: int) -> list[float]:
    call()
    call()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # about 2 ms: launches queue up behind it
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return [round(x, 4) for x in (median(times), min(times), max(times))]


def make(T: int, H: int, kind: str = "mild") -> list[torch.Tensor]:
    random = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, g = (torch.randn(T, H, DIM, generator=random, device="cuda").bfloat16() for _ in range(4))
    beta = torch.randn(T, H, generator=random, device="cuda").bfloat16()
    chunks = torch.rand(T // 64, H, generator=random, device="cuda")
    if kind in EVERYWHERE:
        g.fill_(EVERYWHERE[kind])
    elif kind != "mild":
        g.view(T // 64, 64, H, DIM)[:, 20][chunks < {"1 %": 0.01, "all": 1.0}[kind]] = 300.0
    return [q, k, v, g, beta, torch.zeros(H, device="cuda"), torch.zeros(H, DIM, device="cuda")]


def inputs(x: list[torch.Tensor], gate: Gate) -> Inputs:
    return kernels.inputs(Raw(*x), gate, Sequences.from_lengths([x[0].shape[0]], device="cuda"))


def plain_prepare(x: Inputs, out: Prepared) -> None:
    """K1 as other GPUs run it."""
    results = (out.w, out.q, out.k, out.A, out.P, out.decay, out.norms)
    strides = (*x.q.stride(), *x.k.stride(), *x.g.stride(), *x.beta.stride())
    tensors = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.layout.table, *results)
    _, X, _, H, K, _ = x.sizes
    safe = x.gate.mode == "safe"
    prepare_kernel[(X * H,)](
        *tensors, *strides, K**-0.5, x.lower_bound, EPS, H, K=K, B=32, SAFE=safe, num_warps=4
    )  # fmt: skip


def prepare_row(T: int, kind: str, rounds: int) -> dict[str, Any]:
    """K1: everything before the scan."""
    raw = make(T, 32, kind)
    x, bounded = inputs(raw, SOFTPLUS), inputs(raw, SAFE)
    out = room(x, x.sizes[1])
    return {
        **{"T": T, "H": 32, "kind": kind},
        "ms": timed(lambda: prepare(x, out), rounds),
        "bounded_ms": timed(lambda: prepare(bounded, out), rounds),
        "triton_ms": timed(lambda: plain_prepare(x, out), 5),
    }


def gradient_row(H: int, gate: Gate, kind: str, rounds: int) -> dict[str, Any]:
    """B3: everything after the scans."""
    x = inputs(make(8192, H, kind), gate)
    d_o = torch.randn(x.v.shape, device="cuda").bfloat16()
    p = prepare(x)
    S, U = triton_backward.entry_states(x, p, None)
    _, dS, dU = triton_backward.reverse_scan(x, p, d_o, None, None, None)
    return {
        **{"T": 8192, "H": H, "gate": gate.mode, "kind": kind},
        "ms": timed(lambda: gradients_cuda.gradients(x, p.A, p.norms, S, U, dS, dU, d_o), rounds),
        # Last, as it uses `p` up.
        "triton_ms": timed(lambda: triton_backward.gradients(x, p, S, U, dS, dU, d_o), 5),
    }


def whole_row(H: int, gate: Gate, kind: str, rounds: int) -> dict[str, Any]:
    """Forward and backward of a call."""
    leaves = [t.requires_grad_() for t in make(8192, H, kind)]
    sequences = Sequences.from_lengths([8192], device="cuda")
    d_o = torch.randn(leaves[2].shape, device="cuda").bfloat16()

    def call(save: Literal["inputs", "all"]) -> object:
        return torch.autograd.grad(kda(*leaves, gate, None, sequences, save=save)[0], leaves, d_o)

    row = {"T": 8192, "H": H, "gate": gate.mode, "kind": kind}
    return row | {"ms": timed(lambda: call("inputs"), rounds), "save_all_ms": timed(lambda: call("all"), rounds)}


def fla(H: int, rounds: int) -> dict[str, Any]:
    from fla.ops.kda import chunk_kda

    leaves = [t.requires_grad_() for t in make(8192, H)]
    d_o = torch.randn(leaves[2].shape, device="cuda").bfloat16()
    inside = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}

    def forward() -> torch.Tensor:
        *raw, A_log, dt_bias = leaves
        o, _ = chunk_kda(*(t[None] for t in raw), A_log=A_log, dt_bias=dt_bias.flatten(), **inside)
        return o  # type: ignore[no-any-return]

    both = timed(lambda: torch.autograd.grad(forward(), leaves, d_o[None]), rounds)
    with torch.no_grad():
        return {"T": 8192, "H": H, "forward_ms": timed(forward, rounds), "both_ms": both}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fla", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rounds, steep = options.rounds, ("1 %", *EVERYWHERE)
    kinds = [(T, kind) for T in (2048, 8192, 16384, 65536) for kind in ("mild", *(steep if T == 16384 else ()))]
    cases = [(H, *case) for H in (32, 96) for case in CASES]
    parts: dict[str, tuple[Callable[..., dict[str, Any]], list[tuple[Any, ...]]]] = {
        "prepare": (prepare_row, kinds),
        "gradients": (gradient_row, cases),
        "forward + backward": (whole_row, cases),
        "fla": (fla, [(32,), (96,)] if options.fla else []),
    }
    for part, (row, rows) in parts.items():
        for case in rows:
            found.setdefault(part, []).append(row(*case, rounds))
            print(part, json.dumps(found[part][-1]), flush=True)
            if options.out:
                # Whenever something is measured: the search may be ended.
                options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
