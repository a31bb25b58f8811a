"""Prefill pieces, then decode steps: the layer's outputs against one float64 pass over the whole documents.

This is what a serving engine does: `short_conv`, `tail_state`, `kda`, `tail_fill_inplace`, then `tail_step_inplace`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from perilune.config import Gate
from perilune.ops.conv import short_conv
from perilune.ops.kda import decode, kda
from perilune.ops.norm import gated_rms_norm
from perilune.ops.sequences import Sequences

SAFE, SOFTPLUS = Gate("safe", -5.0), Gate("softplus")
H, D, POOL = 3, 16, 6
SLOTS = (4, 0, 3)
TOKENS = ("u_NTC", "g_NTHK", "beta_NTH", "gate_NTHV")
# fp32 sums of some hundred terms along a few dozen tokens: 2e-6 is seen; fp64 1e-15.
LIMITS = {torch.float32: 2e-5, torch.float64: 1e-12}


@dataclass
class Layer:
    """Random projections of three documents and a layer's weights, in one dtype."""

    u_NTC: torch.Tensor
    g_NTHK: torch.Tensor
    beta_NTH: torch.Tensor
    gate_NTHV: torch.Tensor
    taps_CW: torch.Tensor
    A_log_H: torch.Tensor
    dt_bias_HK: torch.Tensor
    norm_V: torch.Tensor
    gate: Gate

    @classmethod
    def draw(cls, T: int, gate: Gate, dim: int = D) -> Layer:
        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64)

        tokens = rand(3, T, 3 * H * dim), 2 * rand(3, T, H, dim), rand(3, T, H), rand(3, T, H, dim)
        return cls(*tokens, rand(3 * H * dim, 4) / 2, 0.3 * rand(H), rand(H, dim) - 1, 1 + rand(dim) / 10, gate)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Layer:
        parts = vars(self).values()
        return Layer(*[x.to(device, dtype) if isinstance(x, torch.Tensor) else x for x in parts])

    def weights(self) -> decode.Weights:
        return decode.Weights(*self.taps_CW.chunk(3), self.A_log_H, self.dt_bias_HK, self.norm_V, 1e-5, self.gate)

    def inputs(self, begin: list[int], end: list[int]) -> decode.Projected:
        """Packed tokens begin[n] .. end[n] - 1 of each document."""

        def pack(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([row[a:b] for row, a, b in zip(x, begin, end, strict=True)])

        q, k, v = (y.unflatten(-1, self.dt_bias_HK.shape) for y in pack(self.u_NTC).chunk(3, -1))
        return decode.Projected(q, k, v, pack(self.g_NTHK), pack(self.beta_NTH), pack(self.gate_NTHV))


class Server:
    """Slot pools full of NaN outside the slots in use, and the calls of a serving engine."""

    def __init__(self, layer: Layer) -> None:
        self.layer, x, dim = layer, layer.u_NTC, len(layer.norm_V)
        self.slots = torch.tensor(SLOTS, dtype=torch.int32, device=x.device)
        self.matrix = layer.norm_V.new_full((POOL, H, dim, dim), torch.nan)
        self.window = x.new_full((POOL, 3, 3 * H * dim), torch.nan)
        self.matrix[self.slots], self.window[self.slots] = 0, 0
        self.tail = decode.Tail.empty(POOL, H, dim, dim, dtype=layer.norm_V.dtype, device=x.device)
        for ring in vars(self.tail).values():
            ring.fill_(torch.nan)
        self.at = [0, 0, 0]

    def lengths(self) -> torch.Tensor:
        return torch.tensor([p % 64 for p in self.at], dtype=torch.int32, device=self.slots.device)

    def prefill(self, end: list[int]) -> list[torch.Tensor]:
        """Outputs of the tokens up to `end` of each document."""
        layer, x, begin = self.layer, self.layer.inputs(self.at, end), self.at
        sequences = Sequences.from_lengths([b - a for a, b in zip(begin, end, strict=True)], begin, self.slots.device)
        u_TC = torch.cat([x.q_THK.flatten(1), x.k_THK.flatten(1), x.v_THV.flatten(1)], 1)
        y_TC, window = short_conv(u_TC, layer.taps_CW, sequences, self.window[self.slots])
        q, k, v = (y.unflatten(-1, layer.dt_bias_HK.shape) for y in y_TC.chunk(3, -1))
        gates = (layer.A_log_H, layer.dt_bias_HK, layer.gate)
        initial = decode.tail_state(self.matrix, self.tail, self.lengths(), self.slots, layer.gate)
        last = [b // 64 * 64 for b in end]
        wanted = tuple((b,) if b > a else () for a, b in zip(begin, last, strict=True))
        o, _, states = kda(q, k, v, x.g_raw_THK, x.beta_logit_TH, *gates, initial, sequences, wanted)
        passed = [slot for slot, positions in zip(SLOTS, wanted, strict=True) if positions]
        self.matrix[passed] = states
        pool = (self.matrix, self.tail, self.slots, sequences)
        decode.tail_fill_inplace(k, v, x.g_raw_THK, x.beta_logit_TH, *gates, *pool)
        self.window[self.slots], self.at = window, end
        o = gated_rms_norm(o, layer.norm_V, x.out_gate_THV, 1e-5)
        return list(o.split(list(sequences.lengths)))

    def step(self) -> list[torch.Tensor]:
        """Outputs of the next token of each document."""
        end = [p + 1 for p in self.at]
        pool = (self.matrix, self.window, self.tail, self.lengths(), self.slots)
        o = decode.tail_step_inplace(self.layer.inputs(self.at, end), self.layer.weights(), *pool, self.slots)
        self.at = end
        return list(o.split(1))


def whole(layer: Layer, T: int) -> torch.Tensor:
    """[3, T, H, V]: one pass in float64 over whole documents."""
    x, sequences = layer.inputs([0] * 3, [T] * 3), Sequences.from_lengths([T] * 3)
    u_TC = torch.cat([x.q_THK.flatten(1), x.k_THK.flatten(1), x.v_THV.flatten(1)], 1)
    y_TC = short_conv(u_TC, layer.taps_CW, sequences)[0]
    q, k, v = (y.unflatten(-1, layer.dt_bias_HK.shape) for y in y_TC.chunk(3, -1))
    gates = (layer.A_log_H, layer.dt_bias_HK, layer.gate)
    o = kda(q, k, v, x.g_raw_THK, x.beta_logit_TH, *gates, None, sequences)[0]
    return gated_rms_norm(o, layer.norm_V, x.out_gate_THV, 1e-5).unflatten(0, (3, T))


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; NaN never passes a comparison."""
    return float((got.double().cpu() - want).norm() / want.norm())


@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_then_steps_equal_one_pass(gate: Gate, dtype: torch.dtype) -> None:
    """Pieces that end on and off the grid, that pass a multiple of 64 or do not, or are empty."""
    T = 142
    double = Layer.draw(T, gate)
    want, server = whole(double, T), Server(double.to(dtype))
    outputs: list[list[torch.Tensor]] = [[], [], []]
    for pieces in (
        server.prefill([100, 10, 64]),
        server.prefill([130, 40, 64]),
        server.prefill([131, 48, 127]),
        *[server.step() for _ in range(11)],
    ):
        for n, piece in enumerate(pieces):
            outputs[n].append(piece)
    for n, end in enumerate(server.at):
        assert off(torch.cat(outputs[n]), want[n, :end]) <= LIMITS[dtype]
    state = decode.tail_state(server.matrix, server.tail, server.lengths(), server.slots, gate)
    assert state.isfinite().all()
    free = [slot for slot in range(POOL) if slot not in SLOTS]
    assert server.tail.k_SHRK[free].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS])
def test_pieces_then_steps_on_a_gpu(gate: Gate) -> None:
    """Prefill kernels, fill and decode kernels together; bf16 operands and outputs: 7e-3 is the bound of prefill."""
    double = Layer.draw(142, gate, dim=128)
    tokens = double.to(torch.bfloat16, "cuda")
    layer = replace(double.to(torch.float32, "cuda"), **{k: vars(tokens)[k] for k in TOKENS})
    want = whole(replace(double, **{k: vars(tokens)[k].cpu().double() for k in TOKENS}), 142)
    server = Server(layer)
    for end in ([100, 10, 64], [130, 40, 64], [131, 48, 127]):
        begin = server.at
        for n, o in enumerate(server.prefill(end)):
            assert end[n] == begin[n] or off(o, want[n, begin[n] : end[n]]) <= 7e-3
    for _ in range(11):
        for n, o in enumerate(server.step()):
            assert off(o[0], want[n, server.at[n] - 1]) <= 1e-2  # of one token: less even than of a whole piece


def test_filled_entries_equal_those_of_steps() -> None:
    """Entry by entry, in float64: k, u and the decays are those that decode steps write."""
    layer = Layer.draw(50, SAFE)
    filled, stepped = Server(layer), Server(layer)
    filled.prefill([50] * 3)
    for _ in range(50):
        stepped.step()
    for got, want in zip(vars(filled.tail).values(), vars(stepped.tail).values(), strict=True):
        for slot in SLOTS:
            assert off(got[slot, :, :50], want[slot, :, :50]) <= LIMITS[torch.float64]
    assert torch.equal(filled.window, stepped.window) or off(filled.window[0], stepped.window[0]) == 0


@pytest.mark.parametrize("length", [0, 1, 16, 37, 64, 71])
def test_state_of_a_tail_is_that_of_in_place_steps(length: int) -> None:
    """After any number of entries, in float64; padding gives zeros and reads nothing."""
    layer = Layer.draw(71, SAFE)
    server, twin = Server(layer), Server(layer)
    for i in range(length):
        x = layer.inputs([i] * 3, [i + 1] * 3)
        lengths = torch.full((3,), i, dtype=torch.int32)
        pool = (server.matrix, server.window, server.tail, lengths, server.slots)
        if i < 63:
            decode.tail_step_inplace(x, layer.weights(), *pool)
        else:
            decode.tail_verify_inplace(x, layer.weights(), *pool, 1)
            one = torch.ones(3, dtype=torch.int32)
            decode.shift_window_inplace(x, server.window, server.slots, one, 1)
        decode.decode_step_inplace(x, layer.weights(), twin.matrix, twin.window, twin.slots)
    slots = torch.tensor([4, -1, 3], dtype=torch.int32)
    state = decode.tail_state(server.matrix, server.tail, torch.full((3,), length, dtype=torch.int32), slots, SAFE)
    assert (state[1] == 0).all()
    for n in (0, 2):
        assert off(state[n], twin.matrix[SLOTS[n]]) <= LIMITS[torch.float64] or length == 0
        assert length or torch.equal(state[n], twin.matrix[SLOTS[n]])


def test_forks_share_a_matrix() -> None:
    """Two sequences on one boundary matrix: own windows and tails; a fold into a free slot leaves the shared one."""
    layer = Layer.draw(80, SAFE)
    want = whole(layer, 80)
    server = Server(layer)
    server.prefill([60] * 3)
    for part in (server.window, *vars(server.tail).values()):
        part[5] = part[4]  # the fork of document 0
    slots = torch.tensor([4, 5], dtype=torch.int32)
    matrices, target = torch.tensor([4, 4], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    before = server.matrix[4].clone()
    for p in range(60, 80):
        one = layer.inputs([p, 0, 0], [p + 1, 0, 0])
        x = decode.Projected(*[y.repeat(2, *[1] * (y.dim() - 1)) for y in vars(one).values()])
        lengths = torch.full((2,), p % 64, dtype=torch.int32)
        pool = (server.matrix, server.window, server.tail, lengths, slots)
        o = decode.tail_step_inplace(x, layer.weights(), *pool, target, matrices_N=matrices)
        matrices = target if p == 63 else matrices
        assert torch.equal(o[0], o[1])
        assert off(o[0], want[0, p]) <= LIMITS[torch.float64]
    assert torch.equal(server.matrix[4], before)
