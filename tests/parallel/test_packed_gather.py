"""FSDP gathers the experts' codes: the same losses and weights, bit for bit, for 4.25 bits a number on the wire.

Two ranks on gloo and zero 3: every layer's weights are gathered in both passes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from perilune.ops.mx import fake_quantize
from perilune.parallel.packed_gather import gather_packed
from perilune.train.config import from_dict

sys.path.insert(0, str(Path(__file__).parent))

from test_expert_training import prepare, settings, spawn

STEPS = 2
# The scale rule, the run's dtype, and its bits.
CASES = (("even", "bfloat16", 16), ("ceil", "float32", 32))
# Its name since torch 2.13, and before.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def train_all(rank: int, root: Path) -> list[dict[bool, dict[str, Any]]]:
    return [train(root, rule, dtype) for rule, dtype, _ in CASES]


def train(root: Path, rule: str, dtype: str) -> dict[bool, dict[str, Any]]:
    """{whether codes are gathered: losses, bytes of each gather, weights, names that were to be packed}."""
    from perilune.train import Trainer

    found = {}
    plain = getattr(dist, ALL_GATHER)
    for codes in (True, False):
        names: set[str] = set()
        gathered: list[int] = []

        def attach(*args: Any, codes: bool = codes, names: set[str] = names) -> None:
            if codes:
                names |= gather_packed(*args)

        def counted(output_tensor: Any, *args: Any, gathered: list[int] = gathered, **rest: Any) -> Any:
            gathered.append(output_tensor.nbytes)
            return plain(output_tensor, *args, **rest)

        values = settings(root, f"{rule}-{codes}", STEPS) | {
            "dtype": dtype,
            "qat": {"enabled": True, "scale_rule": rule, "activations": "inputs"},
            "parallel": {"policy": "exact", "timeout": 60.0, "ep": 1, "zero": 3},
            "eval_every": 0,
            "checkpoint_every": 0,
        }
        with (
            mock.patch("perilune.train.masters.gather_packed", attach),
            mock.patch(f"torch.distributed.{ALL_GATHER}", counted),
        ):
            trainer = Trainer(from_dict(values))
            rows = [trainer.train_step() for _ in range(STEPS)]
            nats = trainer.evaluate().nats
        whole = trainer.team.whole(trainer.model, trainer.masters.weights).state_dict()
        found[codes] = {
            "losses": [row["loss"] for row in rows] + [nats],
            "gathered": gathered,
            "weights": {name: w.detach().double().numpy() for name, w in whole.items()},
            "names": names,
        }
        trainer.close()
    return found


def test_codes_give_the_same_run_for_fewer_bytes(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["text_config"] |= {"moe_intermediate_size": 32, "routed_expert_hidden_size": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for rank in spawn(train_all, 2, tmp_path, limit=180):
        assert isinstance(rank, list), rank
        for (_, _, bits), result in zip(CASES, rank, strict=True):
            with_codes, without = result[True], result[False]
            assert with_codes["losses"] == without["losses"]
            weights = without["weights"]
            for name, weight in weights.items():
                assert (with_codes["weights"][name] == weight).all(), name
            names = {name for name in weights if name.endswith(("gate_up_E2FL", "down_ELF"))}
            assert with_codes["names"] == names
            assert not without["names"]
            # A layer's gather has 4.25 bits instead of `bits` for each number of its experts; the rest is as it was.
            layers = {name.rpartition(".")[0] for name in names}
            numbers = [sum(weights[n].size for n in names if n.startswith(layer)) for layer in layers]
            less = [b - a for a, b in zip(with_codes["gathered"], without["gathered"], strict=True)]
            assert set(less) == {0, *(n * (bits - 4.25) / 8 for n in numbers)}


class Product(torch.nn.Module):
    def __init__(self, w_EGK: torch.Tensor) -> None:
        super().__init__()
        self.w_EGK = torch.nn.Parameter(w_EGK)

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tk,egk->teg", x_TK, self.w_EGK)


def follow(rank: int, device: str) -> frozenset[str]:
    """The second gather decodes into the memory of the first, between the two uses of autograd's saved tensor."""
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(place)
    generator = torch.Generator().manual_seed(0)
    whole = fake_quantize(torch.randn(4, 8, 64, generator=generator), "mxfp4").to(place)
    model = Product(whole.clone())
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh(device, (2,)), reshard_after_forward=True, mp_policy=low)
    names = gather_packed(model, {"w_EGK"}, "even")
    part = model.w_EGK.to_local()
    x = torch.randn(3, 64, generator=generator).to(place, torch.bfloat16).requires_grad_()
    for turn in range(3):
        plain = whole.bfloat16().requires_grad_()
        want = torch.einsum("tk,egk->teg", x, plain)
        got = model(x)
        assert torch.equal(got, want)
        slope = torch.randn(want.shape, generator=generator).to(place, torch.bfloat16)
        d_x, d_w = torch.autograd.grad(want, (x, plain), slope)
        x.grad = model.w_EGK.grad = None
        got.backward(slope)
        assert torch.equal(x.grad, d_x)
        # FSDP takes the mean of two equal gradients.
        assert torch.equal(model.w_EGK.grad.to_local(), d_w.float().chunk(2)[rank])
        whole = fake_quantize(whole * (turn + 1.3), "mxfp4")
        with torch.no_grad():
            part.copy_(whole.chunk(2)[rank])
    return names


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gathered_weight_follows_the_parts(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert spawn(follow, 2, device, limit=180) == [{"w_EGK"}] * 2


def test_what_fsdp_has_not_cut_is_left_alone() -> None:
    layer = torch.nn.Linear(32, 32)
    assert gather_packed(layer, {"weight"}, "even") == frozenset()
    assert not hasattr(layer.weight, "fsdp_pre_all_gather")
