"""Kimi Delta Attention: linear attention with a delta rule and a decay per channel, on packed sequences.

`kda` takes raw projections and picks an implementation by device; the rest works on activated inputs (`prepare`).

Legend: T tokens, N sequences, H heads, K key dim, V value dim, C checkpoints.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Literal

import torch

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops.kda import reference
from perilune.ops.kda.chunk import chunk
from perilune.ops.kda.prepare import Activated, Raw, prepare
from perilune.ops.kda.reference import recurrence
from perilune.ops.kda.segments import compose, fold, segment_maps
from perilune.ops.kda.table import check_checkpoints
from perilune.ops.kda.tail import fold_tail, tail_step
from perilune.ops.sequences import Sequences

Scan = Literal["serial", "segmented"]
Save = Literal["inputs", "all"]
Checkpoints = tuple[tuple[int, ...], ...]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def kda(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_raw_THK: torch.Tensor,
    beta_logit_TH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    gate: Gate,
    initial_state_NHKV: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: Checkpoints | None = None,
    scan: Scan = "serial",
    save: Save = "inputs",
) -> tuple[torch.Tensor, ...]:
    """Kimi Delta Attention over packed documents: gate, L2 norm and sigmoid inside, convolution and output norm not.

    q, k, v: after convolution and SiLU, one dtype (bf16, fp16, fp32, fp64). g_raw, beta_logit: before gate and sigmoid.
    A_log, dt_bias, state: fp32 (fp64 in fp64 runs). gate: the mode is explicit, there is no default.
    initial_state: None means zeros. sequences: lengths and absolute starts; chunks of 64 lie on the document's grid.
    checkpoints: for each sequence the absolute positions whose states are wanted; different multiples of 64 with
        start < position <= start + length.
    scan: "serial" runs a document's chunks in order; "segmented" folds tiles of 1024 tokens (see `segments`), worth it
        on a GPU for few heads and long documents.
    save: what the GPU kernels keep for the backward: "inputs" computes the rest again, "all" trades memory for time.
        The results are the same; the reference keeps all either way.

    Returns o_THV in v's dtype, final_NHKV in fp32 (fp64 in fp64 runs), and with checkpoints also their states
    [C, H, K, V] in the order given. Inputs are left unchanged. Level on CPU: bitwise-batch for cuts on the 64-grid
    (serial) or on the 1024-grid (segmented). Raises Error on any shape, dtype, device or option that is not supported.
    Source: Kimi Linear (arXiv:2510.26692).
    """
    raw = Raw(q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, A_log_H, dt_bias_HK)
    if scan not in ("serial", "segmented"):
        raise Error(f"kda: scan is {scan!r}; allowed: 'serial', 'segmented'")
    if save not in ("inputs", "all"):
        raise Error(f"kda: save is {save!r}; allowed: 'inputs', 'all'")
    _check(raw, initial_state_NHKV, sequences)
    if checkpoints is not None:
        check_checkpoints(sequences, checkpoints)
    sequences = sequences.to(q_THK.device)
    result: tuple[torch.Tensor, ...]
    if implementation(q_THK, v_THV) == "triton":
        result = _triton().kda(raw, gate, initial_state_NHKV, sequences, checkpoints, scan, save)
    else:
        result = reference.kda(raw, gate, initial_state_NHKV, sequences, checkpoints, scan)
    return result


def kda_maps(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_raw_THK: torch.Tensor,
    beta_logit_TH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    gate: Gate,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    """M_NHKK and B_NHKV, fp32 (fp64): what each sequence does to a state, S -> M S + B, from the inputs of `kda`.

    `segment_maps` on raw inputs, by the kernels where `implementation` says so. The final state of `kda` is M S + B;
    runs of one document fold with `fold`. Differentiable. q reaches neither result. Errors as `kda`.
    """
    raw = Raw(q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, A_log_H, dt_bias_HK)
    _check(raw, None, sequences)
    room = _triton() if implementation(q_THK, v_THV) == "triton" else reference
    result: tuple[torch.Tensor, torch.Tensor] = room.kda_maps(raw, gate, sequences.to(q_THK.device))
    return result


def implementation(q_THK: torch.Tensor, v_THV: torch.Tensor) -> Literal["triton", "reference"]:
    """Which code `kda` and `kda_maps` run for such inputs: the Triton kernels on CUDA where they are installed and
    support the sizes and dtype, else the reference."""
    if q_THK.is_cuda and importlib.util.find_spec("triton") and _triton().supports(q_THK, v_THV):
        return "triton"
    return "reference"


def _triton() -> ModuleType:
    """Imported late: Triton is an optional dependency."""
    return importlib.import_module("perilune.ops.kda.triton")


def _check(raw: Raw, state: torch.Tensor | None, sequences: Sequences) -> None:
    """Raise Error before any work."""
    q, k, v, g_raw, beta_logit, A_log, dt_bias = raw
    if q.ndim != 3 or v.ndim != 3:
        raise Error(f"kda: q has shape {tuple(q.shape)} and v {tuple(v.shape)}; must be [T, H, K] and [T, H, V]")
    (T, H, K), V = q.shape, v.shape[2]
    sequences.check_total("kda: q", T)
    if min(H, K, V) < 1 or max(K, V) > 256:
        raise Error(f"kda: H = {H}, K = {K}, V = {V}; H must be at least 1, K and V from 1 to 256")
    shapes: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]] = {
        "k": (k, (T, H, K)),
        "v": (v, (T, H, V)),
        "g_raw": (g_raw, (T, H, K)),
        "beta_logit": (beta_logit, (T, H)),
        "A_log": (A_log, (H,)),
        "dt_bias": (dt_bias, (H, K)),
        "initial_state": (state, (sequences.count, H, K, V)),
    }
    for name, (x, shape) in shapes.items():
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise Error(f"kda: {name} has shape {tuple(x.shape)}; must be {shape}")
        if x.device != q.device:
            raise Error(f"kda: {name} is on {x.device}; must be on {q.device} as q is")
        if x.dtype not in _DTYPES:
            raise Error(f"kda: {name} is {x.dtype}; allowed: bfloat16, float16, float32, float64")
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        raise Error(
            f"kda: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; must be one and the same of bf16, fp16, fp32, fp64"
        )


__all__ = [
    "Activated",
    "Checkpoints",
    "Raw",
    "Save",
    "Scan",
    "chunk",
    "compose",
    "fold",
    "fold_tail",
    "implementation",
    "kda",
    "kda_maps",
    "prepare",
    "recurrence",
    "segment_maps",
    "tail_step",
]
