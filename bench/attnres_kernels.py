"""Time the kernels of attention residuals, norms, convolution and gated unit alone, at the configurations that ship.

    python bench/attnres_kernels.py --out bench/results/attnres_kernels.json

One Hopper GPU, bfloat16, 8192 tokens, Kimi-K3 widths. No autograd and no allocation of gradients' sums: what
bench/modules.py times with everything around it. A floor is every input read once and every output written once.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from modules_timing import rounds

from perilune.config import Activation
from perilune.ops import activation_triton
from perilune.ops.attnres import cuda
from perilune.ops.attnres.partial import Partial

COPY = 4.3e12  # bytes a second, read and written, of a large device copy on an H200
T, D, F = 8192, 7168, 12288
EPS = 1e-5
SITU = Activation("situ", beta=4.0, linear_beta=25.0)
Cases = dict[str, tuple[Callable[[], Any], int]]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def mixtures() -> Cases:
    """Forward, and backward with a later gradient of every source."""
    cases: Cases = {}
    sources, later = [draw(T, D) for _ in range(9)], [draw(T, D) for _ in range(9)]
    w = (draw(D), 0.02 * draw(D), draw(D))
    d_y, row = draw(T, D), 2 * T * D
    for n in (2, 3, 4, 5, 7, 9):
        s_TN, r_TN = torch.empty(2, T, n, device="cuda")
        kept = (s_TN, r_TN, torch.empty(T, device="cuda"))
        forward = partial(cuda.forward, sources[:n], *w, EPS, EPS, *kept)
        cases[f"mix_norm forward, {n} sources"] = (forward, (n + 1) * row)
        backward = partial(cuda.backward, sources[:n], *w, d_y, *kept, later[:n])
        cases[f"mix_norm backward, {n} sources"] = (backward, (3 * n + 1) * row)
    return cases


def two_passes() -> Cases:
    """Eight mixers over finished blocks, and one merge."""
    cases: Cases = {}
    sources, w = [draw(T, D) for _ in range(8)], (draw(D), 0.02 * draw(D), draw(D))
    for n in (2, 3, 4, 8):
        run = partial(cuda.mix_completed, sources[:n], [w[0]] * 8, [w[1]] * 8, EPS)
        cases[f"mix_completed, {n} sources, 8 mixers"] = (run, 2 * (n + 8) * T * D)
    partial_sum = Partial(draw(T, D), torch.randn(T, device="cuda"))
    merge = partial(cuda.merge_norm, partial_sum, sources[0], w[0], w[1], EPS, w[2], EPS)
    return cases | {"merge_norm": (merge, 3 * 2 * T * D)}


def units() -> Cases:
    gate, up, d = draw(T, F), draw(T, F), draw(T, F)
    return {
        "glu forward": (partial(activation_triton.glu_forward, gate, up, SITU), 3 * 2 * T * F),
        "glu backward": (partial(activation_triton.glu_backward, d, gate, up, SITU), 5 * 2 * T * F),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = []
    for family in (mixtures, two_passes, units):
        cases = family()
        for name, time in rounds({name: call for name, (call, _) in cases.items()}, 7).items():
            row = {"case": name, **time, "floor_ms": cases[name][1] / COPY * 1e3}
            table.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_second": COPY}
        options.out.write_text(json.dumps(facts | {"rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
