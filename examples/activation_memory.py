"""The activation manager on a Llama of the transformers library: names by forward hooks, a plan, the same gradients.

python examples/activation_memory.py
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from perilune.memory import Memory, MemoryStore, Plan
from perilune.memory.profile import device_bytes, predict, profile
from perilune.ops.names import keep, layer, region

config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, attn_implementation="sdpa", use_cache=False,
)  # fmt: skip
torch.manual_seed(0)
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 512, (2, 128))


def name_output(name: str) -> Callable[[torch.nn.Module, Any, torch.Tensor], torch.Tensor]:
    return lambda module, inputs, output: keep(name, output)


# Where names go is up to whoever owns the model; here hooks do it from outside.
for index, block in enumerate(model.model.layers):
    block.register_forward_pre_hook(lambda module, inputs, index=index: layer(index))
    block.mlp.gate_proj.register_forward_hook(name_output("mlp.gate"))
    block.mlp.up_proj.register_forward_hook(name_output("mlp.up"))
    block.self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: (keep("attn.o", inputs[0]),))
    # A whole sublayer as a region: what it saves can be computed again from its input.
    block.mlp.forward = lambda x, inner=block.mlp.forward: region("mlp", inner, x)
model.model.norm.register_forward_pre_hook(lambda module, inputs: layer(None))

PLANS = {
    "none": {},
    "recompute the MLP": {"mlp": "recompute"},
    "gate and up to the host": {"mlp.gate": "host", "mlp.up": "host"},
    "gate and up as FP8": {"mlp.gate": "fp8", "mlp.up": "fp8"},
    "MLP again, attention to the host": {"mlp": "recompute", "attn.o": "host"},
}


def loss() -> torch.Tensor:
    value: torch.Tensor = model(tokens, labels=tokens).loss
    return value


weights = [*model.parameters(), *model.buffers(), tokens]
noted = profile(loss, weights, torch.device("cpu"))
reference: tuple[torch.Tensor, list[torch.Tensor]] | None = None
print(f"{'plan':<34}{'MB kept':>9}{'MB host':>9}  loss    largest gradient error")
for title, table in PLANS.items():
    plan = Plan.of(table)
    memory = Memory(plan, weights, host=MemoryStore())
    model.zero_grad()
    with memory.step():
        value = loss()
        value.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    reference = reference or (value.detach(), gradients)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, reference[1], strict=True))
    rows = predict(noted, plan)
    assert memory.rows == rows, "what was predicted is what was kept"
    assert torch.equal(value, reference[0])
    assert error == 0 or any("fp8" in placement for placement in table.values())
    stored = sum(row.stored for row in rows.values())
    print(f"{title:<34}{device_bytes(rows) / 1e6:>9.3f}{stored / 1e6:>9.3f}  {value.item():.4f}  {error:.1e}")
