"""KDA as this project and its public peers compute it, on the same inputs; used by `kda.py` and `kda_errors.py`.

Peers are not installed by this project. fla-core (flash-linear-attention) searches its configurations for about two
minutes on its first call for a new head count; FlashKDA has a forward only.
"""

import os
from collections.abc import Callable

import torch

from perilune.config import Gate
from perilune.ops.kda import decode, kda
from perilune.ops.sequences import Sequences

os.environ.setdefault("FLA_FLASH_KDA", "0")  # fla's own kernels; it would call FlashKDA where that is installed
BOUND = -5.0
Inputs = list[torch.Tensor]  # q, k, v, g_raw [T, H, 128], beta_logit [T, H], A_log [H], dt_bias [H, 128]
Forward = Callable[[Inputs], tuple[torch.Tensor, torch.Tensor]]  # to o [T, H, 128] and the final state [H, 128, 128]


def perilune(x: Inputs, **options: str) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = Sequences.from_lengths([x[0].shape[0]], device=x[0].device)
    o, final = kda(*x, Gate("safe", BOUND), None, sequences, **options)  # type: ignore[arg-type]
    return o, final[0]


def fla(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.kda import chunk_kda

    *raw, A_log, dt_bias = x
    inside = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
    options = {**inside, "output_final_state": True, "safe_gate": True, "lower_bound": BOUND}
    o, final = chunk_kda(*(t[None] for t in raw), A_log=A_log, dt_bias=dt_bias.flatten(), **options)
    return o[0], final[0]


def fla_decode(inputs: decode.Projected, weights: decode.Weights, state: torch.Tensor) -> torch.Tensor:
    """One token of each sequence; state [N, H, 128, 128]. Returns o [N, H, 128]; the next state is left aside."""
    from fla.ops.kda import fused_recurrent_kda

    raw = (inputs.q_THK, inputs.k_THK, inputs.v_THV, inputs.g_raw_THK, inputs.beta_logit_TH)
    inside = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
    gate = {"A_log": weights.A_log_H, "dt_bias": weights.dt_bias_HK.flatten(), "lower_bound": BOUND}
    o, _ = fused_recurrent_kda(
        *(t[:, None] for t in raw), initial_state=state, output_final_state=True, **inside, **gate
    )
    return o[:, 0]


def flashkda(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    import flash_kda

    *raw, A_log, dt_bias = x
    (_, H, K), o = x[0].shape, torch.empty_like(x[2])
    final = torch.empty(1, H, K, K, dtype=torch.float32, device=o.device)  # value dim first
    flash_kda.fwd(*(t[None] for t in raw), K**-0.5, o[None], A_log, dt_bias, BOUND, final_state=final)
    return o, final[0].transpose(-1, -2)


def peers() -> dict[str, Forward]:
    """Those that can be imported."""
    found: dict[str, Forward] = {}
    for name, module, call in (("fla", "fla.ops.kda", fla), ("FlashKDA", "flash_kda", flashkda)):
        try:
            __import__(module)
        except ImportError:
            continue
        found[name] = call
    return found


def versions() -> dict[str, str]:
    import triton

    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for module in ("fla", "flash_kda"):
        try:
            found[module] = str(getattr(__import__(module), "__version__", "unknown"))
        except ImportError:
            continue
    return found
