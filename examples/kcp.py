"""KDA over a stream of tokens that is cut over ranks, in plain torch: the same numbers as in one place.

A small layer (projections, convolution, KDA, output) trains on packed documents. Each rank has a slice of the stream;
documents go across cuts. What travels is a fixed number of bytes a layer, however long the documents are.

    python examples/kcp.py                                   # four slices in one process
    torchrun --nproc-per-node 2 examples/kcp.py              # one slice a process

Legend: T tokens, H heads, K key and value dim, D model width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from perilune import Sequences
from perilune.config import Gate
from perilune.ops.conv import short_conv
from perilune.ops.kda import kda
from perilune.parallel import mesh
from perilune.parallel.context import context_conv, kcp
from perilune.parallel.fragments import exchange_bytes
from perilune.parallel.slices import cut_stream, take_slice

H, K, D = 4, 16, 32
LENGTHS = (37, 700, 51, 1, 235)


class Layer(nn.Module):
    """group: the ranks that share the stream; `sequences` says what this one has of it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, 4 * H * K + H, bias=False)
        self.conv_CW = nn.Parameter(torch.randn(3 * H * K, 4) / 2)
        self.A_log_H = nn.Parameter(torch.zeros(H))
        self.dt_bias_HK = nn.Parameter(torch.full((H, K), -3.0))
        self.out = nn.Linear(H * K, D, bias=False)

    def forward(self, x_TD: torch.Tensor, sequences: Sequences, group: dist.ProcessGroup | None) -> torch.Tensor:
        qkv_TC, g_TC, beta_TH = self.project(x_TD).split([3 * H * K, H * K, H], dim=1)
        cut = hasattr(sequences, "spans")
        conv, attend = (context_conv, kcp) if cut else (short_conv, kda)
        options = {"group": group} if cut else {}
        q, k, v = (s.unflatten(1, (H, K)) for s in conv(qkv_TC, self.conv_CW, sequences, **options)[0].chunk(3, dim=1))
        raw = (q, k, v, g_TC.unflatten(1, (H, K)), beta_TH, self.A_log_H, self.dt_bias_HK)
        o_THK = attend(*raw, Gate("safe", -5.0), None, sequences, **options)[0]
        return x_TD + self.out(o_THK.flatten(1))


def gradients(
    layer: Layer, x_TD: torch.Tensor, d_y_TD: torch.Tensor, sequences: Sequences, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y and the gradients of the weights, added up over the ranks of the group."""
    layer.zero_grad()
    y_TD = layer(x_TD, sequences, group)
    y_TD.backward(d_y_TD)
    grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    if group is not None:
        for grad in grads:
            dist.all_reduce(grad, group=group)
    return y_TD.detach(), grads


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    made = mesh.start(torch.device("cpu"), timeout=60.0)
    group, ranks = made.everyone, max(made.ranks, 1)
    layer, T = Layer(), sum(LENGTHS)
    x_TD, d_y_TD = torch.randn(T, D), torch.randn(T, D)
    whole = Sequences.from_lengths(LENGTHS)
    want_TD, wanted = gradients(layer, x_TD, d_y_TD, whole)

    # Without torchrun this process stands for four ranks and communicates with nobody.
    slices = ranks if ranks > 1 else 4
    spans = cut_stream(whole, slices, "zigzag")
    mine = take_slice(spans, (made.rank,) if ranks > 1 else range(slices))
    rows_T = mine.rows_T
    y_TD, grads = gradients(layer, x_TD[rows_T], d_y_TD[rows_T], mine, group)
    far = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads, wanted, strict=True))
    near = float((y_TD - want_TD[rows_T]).abs().max() / want_TD.abs().max())
    assert near < 1e-14, near
    assert far < 1e-13, far
    if made.rank == 0:
        moved = exchange_bytes(spans, H, K, K, size=8)
        print(f"{T} tokens in {slices} slices; this process has {len(rows_T)} of them: {mine.lengths} tokens of each")
        print(f"outputs differ by {near:.1e}, gradients by {far:.1e} of the largest value")
        print(f"a rank receives {moved['forward']:,} + {moved['backward']:,} bytes a layer, forward and backward")
    mesh.stop()


if __name__ == "__main__":
    main()
