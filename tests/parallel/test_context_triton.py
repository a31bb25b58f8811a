"""KDA on slices by the Triton kernels against the reference on all tokens: in Triton's interpreter, and on a GPU.

Limits as for the kernels themselves: float32 in the interpreter 2e-5 (outputs) and 5e-5 (gradients), bfloat16 on a GPU
7e-3 and 2e-2, relative Frobenius.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from test_expert_training import spawn
from triton_cpu import CUDA, DEVICE

from perilune.config import Gate
from perilune.ops import kda as kda_ops
from perilune.ops.sequences import Sequences
from perilune.parallel import context_triton, mesh
from perilune.parallel import kcp as cut_kda
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


def in_turn(call: Any, device: torch.device) -> Any:
    """Exchanges before what could run beside them; `Beside` without a GPU has them after it."""
    out = call()
    return lambda: out


def bits(rank: int = 0, group: Any = None) -> dict[str, list[Any]]:
    """Outputs and gradients of this rank's slice (of all, without a group), exchanging beside other work and not."""
    dtype = torch.bfloat16 if CUDA else torch.float32
    whole = Sequences.from_lengths([37, 51, 40], device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    raw = [draw(whole.total, H, K).to(dtype) for _ in range(4)] + [draw(whole.total, H).to(dtype), draw(H), draw(H, K)]
    spans = cut_stream(whole, 2)
    cut = take_slice(spans, (rank,) if group is not None else range(2), DEVICE)
    rows = cut.rows_T.to(DEVICE)
    d_o, found = draw(whole.total, H, K).to(dtype)[rows], {}
    for kind, beside in {"beside": cut_kda.Beside(), "in turn": in_turn}.items():
        with mock.patch.object(cut_kda, "_beside", beside):
            leaves = [x[rows].clone().requires_grad_() for x in raw[:5]] + [x.clone().requires_grad_() for x in raw[5:]]
            o, _ = cut_kda.kcp(*leaves, GATE, None, cut, group=group)
            found[kind] = [x.float().cpu().numpy() for x in (o.detach(), *torch.autograd.grad(o, leaves, d_o))]
    return found


def work(rank: int) -> dict[str, list[Any]]:
    made = mesh.start(torch.device("cpu"), timeout=60.0)
    with mock.patch.object(kda_ops, "implementation", return_value="triton"):
        return bits(rank, made.everyone)


def test_exchanges_beside_other_work_change_no_bit_on_two_ranks() -> None:
    """Rank 1 has a document that continues and one that begins, which runs while states are under way."""
    if CUDA:
        pytest.skip("the other kind of device")
    for result in spawn(work, 2):
        assert not isinstance(result, str), result
        assert all((a == b).all() for a, b in zip(result["beside"], result["in turn"], strict=True))


@pytest.mark.gpu
def test_exchanges_beside_other_work_change_no_bit_on_a_gpu() -> None:
    for _ in range(5):
        result = bits()
        assert all((a == b).all() for a, b in zip(result["beside"], result["in turn"], strict=True))


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
        call = cut_kda.kcp if kcp else kda_ops.kda
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
