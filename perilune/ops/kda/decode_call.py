"""What a KDA decode call is made of, and the checks before any work. The functions are in decode.py.

Legend: T tokens (N * drafts), N sequences, S slots, H heads, K key dim, V value dim, R tail entries, C convolution
channels H * (K + K + V) in the order q, k, v, W convolution width 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.config import Gate
from perilune.errors import Error

GRID = 64  # tokens between two matrices
BLOCK = 16  # tokens whose keys share one decay origin
MAX_DRAFTS = 8
CAPACITY = GRID - 1 + MAX_DRAFTS
CENTRE = 40.0  # nats; the middle of a block's decay range
L2_EPS = 1e-6
WIDTH = 4
KERNEL_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Projected:
    """What the input projections give, token by token.

    q_THK, k_THK, v_THV: before the convolution. g_raw_THK: the gate before its activation. beta_logit_TH.
    out_gate_THV: the output gate before its sigmoid. Each may have any stride over T and must be dense within a
    token. With `drafts` tokens a sequence, token i of sequence n is row n * drafts + i.
    """

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_THV: torch.Tensor
    g_raw_THK: torch.Tensor
    beta_logit_TH: torch.Tensor
    out_gate_THV: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """A layer's parameters: convolutions [H * K, 4] (column 3 meets the current token), A_log_H, dt_bias_HK (or flat),
    the output norm norm_V with its epsilon, and the gate."""

    conv_q_CW: torch.Tensor
    conv_k_CW: torch.Tensor
    conv_v_CW: torch.Tensor
    A_log_H: torch.Tensor
    dt_bias_HK: torch.Tensor
    norm_V: torch.Tensor
    eps: float
    gate: Gate


@dataclass(frozen=True)
class Tail:
    """The entries of the tokens since the boundary: k_SHRK, u_SHRV in the ring's dtype, g_SHRK in fp32 (or fp64)."""

    k_SHRK: torch.Tensor
    u_SHRV: torch.Tensor
    g_SHRK: torch.Tensor

    @classmethod
    def empty(
        cls,
        slots: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tail:
        """Room for 71 tokens in each of `slots` slots. What a slot holds beyond its count is never read."""
        wide = torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(slots, heads, CAPACITY, key_dim, dtype=dtype, device=device),
            torch.zeros(slots, heads, CAPACITY, value_dim, dtype=dtype, device=device),
            torch.zeros(slots, heads, CAPACITY, key_dim, dtype=wide, device=device),
        )


@dataclass(frozen=True)
class Call:
    """One launch of a step, in either form: what every kernel takes.

    tokens: of each sequence. store: the state moves (in-place form: matrix and window; tail form: window).
    counts_N: in-place form, the tokens to run (None: all); tail form, the entries before this call.
    tail: None is the in-place form. matrices_N: where the matrices lie (None: slots_N). target_N: see `decode`.
    """

    inputs: Projected
    weights: Weights
    matrix_SHKV: torch.Tensor
    window_S3C: torch.Tensor
    slots_N: torch.Tensor
    tokens: int = 1
    store: bool = True
    counts_N: torch.Tensor | None = None
    tail: Tail | None = None
    matrices_N: torch.Tensor | None = None
    target_N: torch.Tensor | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether a kernel runs it: float64 has none."""
        return self.inputs.q_THK.is_cuda and self.inputs.q_THK.dtype != torch.float64

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        """What a kernel reads of tokens and layer, in the order of every kernel's arguments."""
        w = self.weights
        taps = (w.conv_q_CW, w.conv_k_CW, w.conv_v_CW)
        return (*vars(self.inputs).values(), *taps, w.A_log_H, w.dt_bias_HK, w.norm_V)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from token to token, of each of `Projected`."""
        return tuple(x.stride(0) for x in vars(self.inputs).values())

    @property
    def homes_N(self) -> torch.Tensor:
        """The slots of the matrices."""
        return self.slots_N if self.matrices_N is None else self.matrices_N

    def output(self) -> torch.Tensor:
        """An uninitialised o_THV."""
        return torch.empty_like(self.inputs.v_THV, memory_format=torch.contiguous_format)

    def check(self) -> None:
        """Raise Error unless every shape, dtype, device and inner stride fits."""
        x, w, tokens = self.inputs, self.weights, self.inputs.q_THK.shape[0]
        check_slots(self.slots_N, tokens, self.tokens)
        if self.matrix_SHKV.dim() != 4:
            raise Error(f"matrix_SHKV has shape {tuple(self.matrix_SHKV.shape)}; must be [slots, H, K, V]")
        slots, heads, K, V = self.matrix_SHKV.shape
        if self.matrices_N is not None:
            slots = self.window_S3C.shape[0]
        shapes = {
            "inputs.q_THK": (x.q_THK, (tokens, heads, K)),
            "inputs.k_THK": (x.k_THK, (tokens, heads, K)),
            "inputs.v_THV": (x.v_THV, (tokens, heads, V)),
            "inputs.g_raw_THK": (x.g_raw_THK, (tokens, heads, K)),
            "inputs.beta_logit_TH": (x.beta_logit_TH, (tokens, heads)),
            "inputs.out_gate_THV": (x.out_gate_THV, (tokens, heads, V)),
            "weights.conv_q_CW": (w.conv_q_CW, (heads * K, WIDTH)),
            "weights.conv_k_CW": (w.conv_k_CW, (heads * K, WIDTH)),
            "weights.conv_v_CW": (w.conv_v_CW, (heads * V, WIDTH)),
            "weights.norm_V": (w.norm_V, (V,)),
            "window_S3C": (self.window_S3C, (slots, WIDTH - 1, heads * (2 * K + V))),
        }
        device = x.q_THK.device
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape:
                raise Error(f"{name} is {tuple(tensor.shape)}; must be {shape}")
            if tensor.device != device:
                raise Error(f"{name} is on {tensor.device}; inputs.q_THK is on {device}")
            if not (tensor[0] if tensor.dim() > 1 and tensor.shape[0] else tensor).is_contiguous():
                raise Error(f"{name} has strides {tensor.stride()}; must be dense within its first dimension")
        for name, tensor, numbers in (("A_log_H", w.A_log_H, heads), ("dt_bias_HK", w.dt_bias_HK, heads * K)):
            if tensor.numel() != numbers or not tensor.is_contiguous() or tensor.device != device:
                raise Error(
                    f"weights.{name} has {tensor.numel()} elements, strides {tensor.stride()} and is on "
                    f"{tensor.device}; must be {numbers}, contiguous, on {device}"
                )
        if not self.matrix_SHKV.is_contiguous() or not self.window_S3C.is_contiguous():
            raise Error("matrix_SHKV and window_S3C must be contiguous: they are slot pools")
        for name in ("slots_N", "counts_N", "matrices_N", "target_N"):
            check_index(name, getattr(self, name), len(self.slots_N), device)
        if self.tail is not None:
            check_tail(self.tail, slots, heads, K, V)
        if self.on_gpu:
            if self.matrix_SHKV.dtype != torch.float32:
                raise Error(f"matrix_SHKV is {self.matrix_SHKV.dtype}; the kernel keeps float32")
            check_kernel_dims(K, V)


def check_kernel_dims(K: int, V: int) -> None:
    """Raise Error unless the kernels do these widths."""
    if K not in KERNEL_DIMS or V not in KERNEL_DIMS:
        raise Error(f"key and value dims are {K} and {V}; the kernel does 16, 32, 64, 128")


def check_slots(slots_N: torch.Tensor, tokens: int, drafts: int) -> None:
    """Raise Error unless there are slots for `tokens` rows, `drafts` (1..8) to a sequence."""
    if not 1 <= drafts <= MAX_DRAFTS:
        raise Error(f"drafts is {drafts}; allowed: 1..{MAX_DRAFTS}")
    if slots_N.dtype != torch.int32 or slots_N.dim() != 1:
        raise Error(f"slots_N is {slots_N.dtype} of {slots_N.dim()} dims; must be int32 [N]")
    if tokens != slots_N.shape[0] * drafts:
        raise Error(f"inputs have {tokens} tokens; {len(slots_N)} sequences of {drafts} need {len(slots_N) * drafts}")


def check_index(name: str, index_N: torch.Tensor | None, count: int, device: torch.device) -> None:
    """Raise Error unless the index is contiguous int32 [count] on the device, or None."""
    if index_N is None:
        return
    if index_N.device != device or index_N.dtype != torch.int32:
        raise Error(f"{name} is {index_N.dtype} on {index_N.device}; must be int32 on {device}")
    if tuple(index_N.shape) != (count,) or not index_N.is_contiguous():
        raise Error(
            f"{name} has shape {tuple(index_N.shape)} and strides {index_N.stride()}; "
            f"must be contiguous ({count},), one a sequence"
        )


def check_shift(
    inputs: Projected, window_S3C: torch.Tensor, slots_N: torch.Tensor, accepted_N: torch.Tensor, drafts: int
) -> None:
    """Raise Error unless the windows fit the tokens, and both indices their sequences."""
    tokens, heads, K = inputs.q_THK.shape
    V, device = inputs.v_THV.shape[-1], inputs.q_THK.device
    check_slots(slots_N, tokens, drafts)
    for name, index_N in (("slots_N", slots_N), ("accepted_N", accepted_N)):
        check_index(name, index_N, tokens // drafts, device)
    shapes = {
        "inputs.k_THK": (inputs.k_THK, (tokens, heads, K)),
        "inputs.v_THV": (inputs.v_THV, (tokens, heads, V)),
        "window_S3C": (window_S3C, (len(window_S3C), WIDTH - 1, heads * (2 * K + V))),
    }
    for name, (x, shape) in shapes.items():
        if tuple(x.shape) != shape or x.device != device:
            raise Error(f"{name} is {tuple(x.shape)} on {x.device}; must be {shape} on {device}")
    if not window_S3C.is_contiguous():
        raise Error("window_S3C must be contiguous: it is a slot pool")
    if inputs.q_THK.is_cuda and inputs.q_THK.dtype != torch.float64:
        check_kernel_dims(K, V)


def check_fold(
    matrix_SHKV: torch.Tensor, tail: Tail, indices: dict[str, torch.Tensor | None], slots_N: torch.Tensor
) -> None:
    """Raise Error unless the tails fit the matrices, and every index the sequences of slots_N."""
    if matrix_SHKV.dim() != 4 or not matrix_SHKV.is_contiguous():
        raise Error(f"matrix_SHKV has shape {tuple(matrix_SHKV.shape)}; must be contiguous [slots, H, K, V]")
    _, heads, K, V = matrix_SHKV.shape
    check_tail(tail, len(tail.k_SHRK), heads, K, V)
    if tail.k_SHRK.device != matrix_SHKV.device:
        raise Error(f"tail is on {tail.k_SHRK.device}; must be on {matrix_SHKV.device} as matrix_SHKV is")
    for name, index_N in {"slots_N": slots_N, **indices}.items():
        check_index(name, index_N, len(slots_N), matrix_SHKV.device)
    if matrix_SHKV.is_cuda and matrix_SHKV.dtype == torch.float32:
        check_kernel_dims(K, V)


def check_tail(tail: Tail, slots: int, heads: int, K: int, V: int) -> None:
    """Raise Error unless the tail has room for 71 entries in each slot, in one place."""
    for name, ring, dim in (("k_SHRK", tail.k_SHRK, K), ("u_SHRV", tail.u_SHRV, V), ("g_SHRK", tail.g_SHRK, K)):
        if tuple(ring.shape) != (slots, heads, CAPACITY, dim) or not ring.is_contiguous():
            raise Error(f"tail.{name} is {tuple(ring.shape)}; must be contiguous {(slots, heads, CAPACITY, dim)}")


__all__ = [
    "BLOCK",
    "CAPACITY",
    "CENTRE",
    "GRID",
    "L2_EPS",
    "MAX_DRAFTS",
    "WIDTH",
    "Call",
    "Projected",
    "Tail",
    "Weights",
    "check_fold",
    "check_index",
    "check_kernel_dims",
    "check_shift",
    "check_slots",
    "check_tail",
]
