"""The public `kda`: what it refuses, in one line that names the argument, and which implementation it runs."""

from __future__ import annotations

import pytest
import torch
from kda_oracle import NAMES, draw

from perilune import Error, Sequences
from perilune.config import Gate
from perilune.ops.kda import implementation, kda

SAFE = Gate("safe", -5.0)


def call(changes: dict[str, torch.Tensor], lengths: tuple[int, ...] = (70, 3), **options: object) -> None:
    inputs = dict(zip(NAMES, (x.float() for x in draw([70, 3])), strict=True)) | changes
    args = [inputs[name] for name in NAMES]
    kda(*args[:7], SAFE, args[7], Sequences.from_lengths(lengths), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"q": torch.zeros(73, 2)}, {}, "q has shape"),
        ({"q": torch.zeros(72, 2, 16)}, {}, "72 tokens"),
        ({"k": torch.zeros(73, 2, 17)}, {}, "k has shape"),
        ({"k": torch.zeros(73, 1, 16)}, {}, "k has shape"),
        ({"v": torch.zeros(73, 4, 24)}, {}, "v has shape"),
        ({"g_raw": torch.zeros(73, 2, 24)}, {}, "g_raw has shape"),
        ({"beta_logit": torch.zeros(73, 2, 1)}, {}, "beta_logit has shape"),
        ({"A_log": torch.zeros(128)}, {}, "A_log has shape"),
        ({"dt_bias": torch.zeros(32)}, {}, "dt_bias has shape"),
        ({"state": torch.zeros(2, 2, 24, 16)}, {}, "initial_state has shape"),
        ({"state": torch.zeros(1, 2, 16, 24)}, {}, "initial_state has shape"),
        ({"q": torch.zeros(73, 2, 16, dtype=torch.int64)}, {}, "q, k, v are torch.int64"),
        ({"v": torch.zeros(73, 2, 24, dtype=torch.bfloat16)}, {}, "q, k, v are"),
        ({"g_raw": torch.zeros(73, 2, 16, dtype=torch.int32)}, {}, "g_raw is torch.int32"),
        ({"k": torch.zeros(73, 2, 16, device="meta")}, {}, "k is on meta"),
        ({}, {"scan": "parallel"}, "scan is 'parallel'"),
        ({}, {"save": "nothing"}, "save is 'nothing'"),
        ({}, {"checkpoints": ((64,),)}, "checkpoints has 1 entries"),
        ({}, {"checkpoints": ((60,), ())}, r"checkpoints\[0\] has 60"),
        ({}, {"checkpoints": ((0,), ())}, r"checkpoints\[0\] has 0"),
        ({}, {"checkpoints": ((64, 64), ())}, "each position once"),
        ({}, {"checkpoints": ((64,), (64,))}, r"checkpoints\[1\] has 64"),
        ({}, {"checkpoints": ((128,), ()), "scan": "segmented"}, r"checkpoints\[0\] has 128"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, torch.Tensor], options: dict[str, object], named: str) -> None:
    with pytest.raises(Error, match=named) as caught:
        call(changes, **options)
    assert "\n" not in str(caught.value)


def test_the_gate_mode_is_never_guessed() -> None:
    with pytest.raises(Error, match=r"gate\.lower_bound"):
        Gate("safe")
    with pytest.raises(Error, match=r"gate\.lower_bound"):
        Gate("softplus", -5.0)


def test_cpu_tensors_run_the_reference() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        q, v = torch.zeros(5, 2, 128, dtype=dtype), torch.zeros(5, 2, 128, dtype=dtype)
        assert implementation(q, v) == "reference"


def test_no_tokens_and_no_sequences() -> None:
    for lengths in ([0, 0], []):
        for scan in ("serial", "segmented"):
            inputs = [x.float().requires_grad_() for x in draw(lengths)]
            args = (*inputs[:7], SAFE, inputs[7], Sequences.from_lengths(lengths))
            o, final = kda(*args, scan=scan)  # type: ignore[arg-type]
            assert o.shape == (0, 2, 24)
            assert torch.equal(final, inputs[7])
            (o.sum() + final.sum()).backward()
            assert kda(*args, checkpoints=((),) * len(lengths), scan=scan)[2].shape == (0, 2, 16, 24)  # type: ignore[arg-type]
