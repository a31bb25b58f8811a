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
# Of the weights that make q, k and v, for the tensors the presets may turn into FP8.
QKV_LIMIT = {"kda.qkv": 2e-2, "kda.gate": 2e-2, "mla.q": 2e-2, "mlp.gate": 2e-2, "mlp.up": 2e-2, "moe.y": 2e-2}


def errors(table: dict[str, str], dtype: torch.dtype = torch.float32, layers: int = 4) -> dict[str, float]:
    """Relative error of each weight's gradient; weights with next to no gradient left out."""
    world = World(dtype, layers)
    _, exact = world.step(None)
    _, got = world.step(Memory(Plan.of(table, required=False), world.weights, MemoryStore()))
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


def test_error_of_the_k3_preset() -> None:
    found = errors(PRESETS["k3"])
    assert worst(found, QKV)[0] <= 2e-2
    assert worst(found)[0] <= 5e-2


if __name__ == "__main__":
    rows = {name: errors({name: "fp8"}) for name in LIMITS} | {"k3": errors(PRESETS["k3"])}
    rows |= {f"k3, {layers} layers, bf16": errors(PRESETS["k3"], torch.bfloat16, layers) for layers in (4, 8, 16)}
    for name, found in rows.items():
        (any_error, weight), (qkv_error, qkv_weight) = worst(found), worst(found, QKV)
        print(f"| {name} | {qkv_error:.1e} | {qkv_weight} | {any_error:.1e} | {weight} |")
