"""The public `attention`: checks its arguments and picks an implementation.

Legend: T query tokens, S key tokens, H heads, Q query/key width, V value width.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Literal

import torch

from perilune.ops.mla import reference, varlen_cuda
from perilune.ops.sequences import Sequences


def attention(
    q_THQ: torch.Tensor,
    k_SHQ: torch.Tensor,
    v_SHV: torch.Tensor,
    queries: Sequences,
    keys: Sequences,
    scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o_THV = softmax(scale q k^T) v per sequence; also lse_TH and max_logit_H.

    The queries of a sequence are its last tokens: query t sees keys 0 .. (keys - queries) + t of its sequence. With
    causal=False it sees all of them, and there may be fewer keys than queries (a piece of a prefix, for `merge`).
    o_THV has v's dtype, 0 where a query sees no key. lse_TH (natural log of the sum of exponentials, -inf without keys)
    and max_logit_H (the exact largest scale * q k over all visible pairs, -inf without any; what QK-clip needs) are in
    max(fp32, dtype) and carry no gradient. Level: bitwise-layout; packed = separate bit for bit.
    Raises Error when shapes do not fit, a causal sequence has fewer keys than queries, on mixed devices, and for dtypes
    other than bf16, fp16, fp32 and fp64.
    """
    reference.check_attention("attention", q_THQ, k_SHQ, v_SHV, queries, keys, causal)
    chosen = implementation(q_THQ, k_SHQ, v_SHV, scale)
    if chosen != "reference" and queries.total and keys.total:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _triton().attention(
            q_THQ, k_SHQ, v_SHV, queries, keys, scale, causal, cuda=chosen == "cuda"
        )
        return found
    return reference.attention(q_THQ, k_SHQ, v_SHV, queries, keys, scale, causal)


def implementation(
    q_THQ: torch.Tensor, k_SHQ: torch.Tensor, v_SHV: torch.Tensor, scale: float = 1.0
) -> Literal["cuda", "triton", "reference"]:
    """Which code `attention` runs for such inputs: forward.cu where it can, then Triton, then plain torch."""
    if not q_THQ.is_cuda or not importlib.util.find_spec("triton"):
        return "reference"
    if not _triton().supports(q_THQ, k_SHQ, v_SHV, scale):
        return "reference"
    return "triton" if varlen_cuda.why_not(q_THQ, k_SHQ, v_SHV) else "cuda"


def _triton() -> ModuleType:
    """Imported late: Triton is an optional dependency."""
    return importlib.import_module("perilune.ops.mla.triton_varlen")


__all__ = ["attention", "implementation"]
