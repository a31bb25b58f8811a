"""What FP8 costs, tensor by tensor: the worst relative error of a weight's gradient, all else in fp32.

docs/memory.md quotes this table (`python tests/memory/test_fp8_errors.py` prints it).
"""

from __future__ import annotations

import pytest
import torch
from memory_models import QKV, World

from perilune.memory import PRESETS, Memory, MemoryStore, Plan

# Name -> largest relative error (Frobenius) of the gradient of any weight. An E4M3 number is off by 2.6e-2 (root mean
# square), which is what a product with nothing to average over shows.
LIMITS = {
    "kda.qkv": 2.5e-2,
    "kda.o": 5e-2,
    "kda.gate": 1.5e-2,
    "mla.q": 2e-3,
    "mla.kv": 4e-2,
    "mla.k": 2.5e-2,
    "mla.o": 4e-2,
    "mlp.gate": 4e-2,
    "mlp.up": 4e-2,
    "moe.z": 5e-2,
    "moe.y": 4e-2,
}
# The preset k3 with the gates of attention outputs as FP8, which change least.
GATES = PRESETS["k3"] | {"kda.gate": "fp8+host", "mla.gate": "fp8+host"}
# Of the weights that make q, k and v.
QKV_LIMIT = {"kda.qkv": 2e-2, "kda.gate": 2e-2, "mla.q": 2e-2, "mlp.gate": 2e-2, "mlp.up": 2e-2, "moe.y": 2e-2}


def errors(table: dict[str, str], dtype: torch.dtype = torch.float32, layers: int = 4) -> dict[str, float]:
    """Relative error of each weight's gradient; weights with next to no gradient left out."""
    world = World(dtype, layers)
    _, exact = world.step(None)
    _, got = world.step(Memory(Plan.of(table, required=False), world.weights, MemoryStore()))
    return relative(got, exact)


def relative(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    exact, got = ({name: g.float() for name, g in grads.items()} for grads in (exact, got))
    size = {name: float(g.norm()) / g.numel() ** 0.5 for name, g in exact.items()}
    least = 1e-3 * max(size.values())
    return {name: float((got[name] - g).norm() / g.norm()) for name, g in exact.items() if size[name] > least}


def worst(found: dict[str, float], parts: tuple[str, ...] = ("",)) -> tuple[float, str]:
    return max((error, name) for name, error in found.items() if any(part in name for part in parts))


@pytest.mark.parametrize("name", LIMITS)
def test_error_of_one_tensor(name: str) -> None:
    found = errors({name: "fp8"})
    assert 0 < worst(found)[0] <= LIMITS[name]
    assert worst(found, QKV)[0] <= QKV_LIMIT.get(name, LIMITS[name])


@pytest.mark.parametrize("layers", [4, 8])
def test_error_of_gates(layers: int) -> None:
    found = errors(GATES, layers=layers)
    assert 0 < worst(found, QKV)[0] <= 2e-2
    assert worst(found, ("o_proj",))[0] <= 1e-2
    assert worst(found)[0] <= 5e-2


def noise(layers: int) -> dict[str, float]:
    """Relative error of a bf16 model's gradients whose backward pass rounds every number otherwise."""
    world = World(torch.bfloat16, layers)
    _, exact = world.step(None)
    world.model.zero_grad(set_to_none=True)
    (3 * world.forward()).backward()
    thirds = {n: p.grad.float() / 3 for n, p in world.model.named_parameters() if p.grad is not None}
    return relative(thirds, exact)


if __name__ == "__main__":
    rows = {name: errors({name: "fp8"}) for name in LIMITS}
    for layers in (4, 8, 16):
        rows |= {f"gates, {layers} layers": errors(GATES, layers=layers)}
        rows |= {f"gates, {layers} layers, bf16": errors(GATES, torch.bfloat16, layers)}
        rows |= {f"nothing, {layers} layers, another rounding in bf16": noise(layers)}
    for name, found in rows.items():
        parts = (QKV, ("o_proj",), ("",))
        print(
            f"| {name} | " + " | ".join(f"{error:.1e} ({weight})" for error, weight in (worst(found, p) for p in parts))
        )
