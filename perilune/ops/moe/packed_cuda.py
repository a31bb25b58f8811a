"""Launches packed_few.cu and packed_many.cu (Hopper, bf16 rows), compiled by NVRTC.

Never required: `why_not` says what is missing, and the Triton kernels of triton_packed.py do the same work.

Legend: R rows sorted by expert, E experts, G weight rows, K weight columns, F expert width.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import torch

from perilune.config import Activation
from perilune.ops import nvrtc
from perilune.ops.mla.tensor_map import tensor_map

_HERE = Path(__file__).parent
FEW = tuple(_HERE / name for name in ("packed_hopper.cuh", "packed.cuh", "packed_few.cu"))
MANY = (
    *(_HERE.parent / "mla" / name for name in ("wgmma.cuh", "cluster.cuh")),
    *(_HERE / name for name in ("packed_wgmma.cuh", "packed.cuh", "packed_many.cu")),
)
# Rows an expert has on average, up to which packed_few.cu takes them.
FEW_ROWS = 16
HEIGHTS = (64, 128, 160, 192, 240)
WARPS, THREADS = 16, {FEW: 608, MANY: 384}
SHARED_BYTES = 232_448
MAX_EXPERTS, MAX_WIDTH = 1024, 4096
# Of packed_many.cu beside the ring: outputs on their way, barriers, and the tables of the experts.
_MANY_FIXED = 4 * 16 * 144 + 128 + 12 * MAX_EXPERTS
_GATES = {"silu": 1, "situ": 2}


class _Arguments(ctypes.Structure):
    """`struct Arguments` of packed_few.cu, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "codes", "scales", "weights", "y", "ends")),
        *((name, c_int) for name in ("experts", "outputs")),
        *((name, c_float) for name in ("beta", "linear_beta")),
    )


class _ManyArguments(ctypes.Structure):
    """`struct Arguments` of packed_many.cu, field by field."""

    _fields_ = (
        *((name, c_uint64 * 16) for name in ("x", "codes")),
        *((name, c_void_p) for name in ("scales", "y", "ends")),
        *((name, c_int) for name in ("experts", "outputs")),
        ("padding", c_int * 8),  # the tensor maps give the structure its alignment
    )


def why_not(x_RK: torch.Tensor, codes: torch.Tensor, experts: int) -> str | None:
    """None where the kernels multiply x by these codes [E, G, K/2]; otherwise what stands against it."""
    if not x_RK.is_cuda or torch.cuda.get_device_capability(x_RK.device) != (9, 0):
        return f"{x_RK.device} is not a Hopper GPU"
    if x_RK.dtype != torch.bfloat16:
        return f"the rows are {x_RK.dtype}, not bf16"
    if x_RK.shape[1] % 128 or x_RK.shape[1] > MAX_WIDTH or codes.shape[1] % 128:
        return f"codes of {tuple(codes.shape)}; weights must be whole 128s high and wide, and up to {MAX_WIDTH} wide"
    if experts > MAX_EXPERTS:
        return f"{experts} experts; at most {MAX_EXPERTS}"
    return nvrtc.missing()


def product(
    x_RK: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, offs_E: torch.Tensor, out_RG: torch.Tensor | None
) -> torch.Tensor:
    """y_RG = x W_e^T for the rows of each expert, into out_RG if given; all contiguous on 16 bytes."""
    y_RG = x_RK.new_empty(x_RK.shape[0], codes.shape[1]) if out_RG is None else out_RG
    if few(x_RK.shape[0], offs_E.shape[0]):
        _run_few(x_RK, codes, scales, offs_E, None, y_RG, 0, (0.0, 0.0))
    elif y_RG.numel():
        (R, K), (E, G, _) = x_RK.shape, codes.shape
        high = tile_height(R / E)
        maps = tensor_map(x_RK, R, K, K, high), tensor_map(codes, E * G, K // 2, K // 2, 128)
        given = _ManyArguments(*maps, scales.data_ptr(), y_RG.data_ptr(), offs_E.data_ptr(), E, G)
        stage = 256 * high + 8192
        numbers = {"K": K, "HEIGHT": high, "STAGES": min(8, (SHARED_BYTES - _MANY_FIXED) // stage), "CLUSTER": 1}
        _launch(MANY, "packed_many", numbers, given, x_RK.device)
    return y_RG


def few(rows: int, experts: int) -> bool:
    """Whether an expert's rows are taken to be a handful."""
    return rows <= FEW_ROWS * experts


@lru_cache(maxsize=4096)
def tile_height(rows: float) -> int:
    """The cheapest tile for experts that have so many rows on average, spread as if drawn one by one.

    A tile costs its height, and its weights' decoding as much as 24 rows more.
    """
    spread = NormalDist(rows, max(rows, 1.0) ** 0.5)
    tiles = {high: sum(1 - spread.cdf(n * high) for n in range(1 + int(2 * rows / high))) for high in HEIGHTS}
    return min(HEIGHTS, key=lambda high: (high + 24) * tiles[high])


def glu_product(
    x_RL: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offs_E: torch.Tensor,
    activation: Activation,
    row_weights_R: torch.Tensor | None,
) -> torch.Tensor:
    """a_RF = w glu(x gate_up_e^T), for few rows."""
    a_RF = x_RL.new_empty(x_RL.shape[0], codes.shape[1] // 2)
    betas = (activation.beta, activation.linear_beta)
    _run_few(x_RL, codes, scales, offs_E, row_weights_R, a_RF, _GATES[activation.kind], betas)
    return a_RF


def _low_height(rows: int, experts: int) -> int:
    """Rows of a tile: 8 where an expert with more of them is rare."""
    return 8 if rows <= 3 * experts else 16


def stages(width: int, height: int, experts: int) -> int:
    """Units of 16 weight rows that shared memory has room for."""
    unit = 16 * (width // 2 + width // 32)
    fixed = 2 * WARPS * height * 20 * 4 + 3 * 4 * experts + 512
    return min(16, (SHARED_BYTES - fixed) // unit)


def _run_few(
    x_RK: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offs_E: torch.Tensor,
    row_weights_R: torch.Tensor | None,
    y: torch.Tensor,
    glu: int,
    betas: tuple[float, float],
) -> None:
    if not y.numel():
        return
    weights = None if row_weights_R is None else row_weights_R.contiguous()
    pointers = (None if t is None else t.data_ptr() for t in (x_RK, codes, scales, weights, y, offs_E))
    given = _Arguments(*pointers, offs_E.shape[0], y.shape[1], *betas)
    K, high = x_RK.shape[1], _low_height(x_RK.shape[0], offs_E.shape[0])
    numbers = {"K": K, "HEIGHT": high, "STAGES": stages(K, high, MAX_EXPERTS), "GLU": glu}
    _launch(FEW, "packed_few", numbers, given, x_RK.device)


def _launch(
    sources: tuple[Path, ...], name: str, numbers: dict[str, int], arguments: ctypes.Structure, device: torch.device
) -> None:
    """One block a multiprocessor."""
    defines = tuple((key, str(number)) for key, number in numbers.items())
    with torch.cuda.device(device):
        function = nvrtc.load(sources, name, defines, SHARED_BYTES, torch.cuda.current_device())
        grid = torch.cuda.get_device_properties(device).multi_processor_count
        nvrtc.launch(function, (grid, 1), THREADS[sources], SHARED_BYTES, arguments)


__all__ = ["few", "glu_product", "product", "stages", "tile_height", "why_not"]
