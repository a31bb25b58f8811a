"""KDA on slices by the Triton kernels against the reference on all tokens: in Triton's interpreter, and on a GPU.

Limits as for the kernels themselves: float32 in the interpreter 2e-5 (outputs) and 5e-5 (gradients), bfloat16 on a GPU
7e-3 and 2e-2, relative Frobenius.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from triton_cpu import CUDA, DEVICE

from perilune.config import Gate
from perilune.ops import kda as kda_ops
from perilune.ops.sequences import Sequences
from perilune.parallel import context, context_triton
from perilune.parallel.slices import cut_stream, take_slice

H, K = (2, 128) if CUDA else (1, 16)
GATE = Gate("safe", -5.0)
CASES = {
    "one document": ((150,), 2, "contiguous"),
    "three documents": ((37, 51, 40), 2, "zigzag"),
    "short documents stay": ((10, 9, 8, 12, 30, 11), 2, "contiguous"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("initial", [False, True])
def test_kernels_on_slices(name: str, initial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, initial, monkeypatch, torch.float32, 2e-5, 5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_slices_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, True, monkeypatch, torch.bfloat16, 7e-3, 2e-2)


def run(name: str, initial: bool, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, near: float, far: float) -> None:
    if (dtype == torch.float32) == CUDA:
        pytest.skip("the other kind of device")
    lengths, ranks, order = CASES[name]
    whole = Sequences.from_lengths(lengths, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    T, N = whole.total, whole.count
    raw = [draw(T, H, K).to(dtype) for _ in range(4)] + [draw(T, H).to(dtype), draw(H) / 3, draw(H, K)]
    d_o, d_final, start = draw(T, H, K).to(dtype), draw(N, H, K, K), draw(N, H, K, K)
    cut = take_slice(cut_stream(whole, ranks, order), range(ranks), DEVICE)  # type: ignore[arg-type]
    documents = [f.document for f in cut.fragments]
    last = torch.tensor([not f.goes_on for f in cut.fragments], device=DEVICE)

    def gradients(kcp: bool) -> list[torch.Tensor]:
        wide = raw if kcp else [x.double() for x in raw]
        leaves = [x.detach().clone().requires_grad_() for x in wide]
        state = (start[documents] if kcp else start.double()).clone().requires_grad_()
        call = context.kcp if kcp else kda_ops.kda
        o, final = call(*leaves, GATE, state if initial else None, cut if kcp else whole)
        final = final[last] if kcp else final
        loss = (o * d_o).sum() + ((final * d_final).sum() if initial else 0)
        loss.backward()
        grads = [x.grad for x in leaves]
        if initial:
            first = [i for i, f in enumerate(cut.fragments) if not f.continues] if kcp else slice(None)
            grads.append(state.grad[first])  # type: ignore[index]
        return [o.detach(), *grads]  # type: ignore[list-item]

    want = gradients(False)
    calls = []
    if not CUDA:
        monkeypatch.setattr(kda_ops, "implementation", lambda q, v: "triton")
    keep = context_triton.prepared
    monkeypatch.setattr(context_triton, "prepared", lambda *a: calls.append(keep(*a)) or calls[-1])
    got = gradients(True)
    assert len(calls) >= 1
    # Where most of the slice stays, only what moves is prepared.
    assert all(c is None for c in calls) == (name == "short documents stay")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error = (a.double() - b).norm() / b.norm()
        # d A_log is one number a head, a sum over all tokens that cancels.
        assert error <= (near if i == 0 else 10 * far if i == 6 else far), (name, i, float(error))
