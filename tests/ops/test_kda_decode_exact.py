"""Exact decode equals prefill bit for bit: outputs, states at multiples of 64, and convolution windows.

On a CPU in fp32 by the reference; on a GPU (marker gpu) in bf16 by the kernels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kda_decode_fill import SAFE, SOFTPLUS, TOKENS, Layer, Server

from perilune.config import Gate
from perilune.ops.conv import short_conv
from perilune.ops.kda import decode, kda
from perilune.ops.kda.decode_exact import RawTail, exact_fold_inplace, exact_step_inplace, exact_verify_inplace
from perilune.ops.norm import gated_rms_norm
from perilune.ops.sequences import Sequences

T = 150


class Exact(Server):
    """The serving engine of test_kda_decode_fill with a raw tail."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        x = layer.u_NTC
        H, D = layer.dt_bias_HK.shape
        self.raw = RawTail.empty(len(self.matrix), H, D, D, dtype=x.dtype, device=x.device)
        for ring in vars(self.raw).values():
            ring.fill_(torch.nan)

    def keep(self, begin: list[int], end: list[int]) -> None:
        """The raw tail of a prefill from `begin` to `end`."""
        layer, x = self.layer, self.layer.inputs(begin, end)
        cut = Sequences.from_lengths([b - a for a, b in zip(begin, end, strict=True)], begin, self.slots.device)
        u_TC = torch.cat([x.q_THK.flatten(1), x.k_THK.flatten(1), x.v_THV.flatten(1)], 1)
        _, k, v = (y.unflatten(-1, layer.dt_bias_HK.shape) for y in short_conv(u_TC, layer.taps_CW, cut)[0].chunk(3, 1))
        self.raw.fill_inplace(k, v, x.g_raw_THK, x.beta_logit_TH, self.slots, cut)

    def exact_step(self) -> torch.Tensor:
        end = [p + 1 for p in self.at]
        pool = (self.matrix, self.window, self.raw, self.lengths(), self.slots)
        o = exact_step_inplace(self.layer.inputs(self.at, end), self.layer.weights(), *pool)
        self.at = end
        return o


def one_pass(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [3, T, H, V] and the states at 64 and 128 of each document."""
    x, cut = layer.inputs([0] * 3, [T] * 3), Sequences.from_lengths([T] * 3, device=layer.u_NTC.device)
    u_TC = torch.cat([x.q_THK.flatten(1), x.k_THK.flatten(1), x.v_THV.flatten(1)], 1)
    y_TC = short_conv(u_TC, layer.taps_CW, cut)[0]
    q, k, v = (y.unflatten(-1, layer.dt_bias_HK.shape) for y in y_TC.chunk(3, -1))
    gates = (layer.A_log_H, layer.dt_bias_HK, layer.gate)
    o, _, states = kda(q, k, v, x.g_raw_THK, x.beta_logit_TH, *gates, None, cut, ((64, 128),) * 3)
    return gated_rms_norm(o, layer.norm_V, x.out_gate_THV, 1e-5).unflatten(0, (3, T)), states.unflatten(0, (3, 2))


def draw(gate: Gate, device: str) -> Layer:
    return Layer.draw(T, gate) if device == "cpu" else Layer.draw(T, gate, dim=128)


def cast(layer: Layer, device: str) -> Layer:
    """fp32 on a CPU; on a GPU what the kernels take: tokens in bf16, weights in fp32."""
    if device == "cpu":
        return layer.to(torch.float32)
    tokens = vars(layer.to(torch.bfloat16, device))
    return replace(layer.to(torch.float32, device), **{name: tokens[name] for name in TOKENS})


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS])
def test_steps_equal_prefill_bitwise(gate: Gate, device: str) -> None:
    """From prefills of different lengths, over multiples of 64, with neighbours at other places in their chunks."""
    layer = cast(draw(gate, device), device)
    want, states = one_pass(layer)
    server = Exact(layer)
    begin = [100, 60, 1]
    server.prefill(begin)
    server.keep([0] * 3, begin)
    for _ in range(6 if device == "cpu" else 50):
        o = server.exact_step()
        for n, p in enumerate(server.at):
            assert torch.equal(o[n], want[n, p - 1])
            if p % 64 == 0:
                assert torch.equal(server.matrix[server.slots[n]], states[n, p // 64 - 1])
    free = [slot for slot in range(len(server.matrix)) if slot not in server.slots.tolist()]
    assert server.matrix[free].isnan().all()
    assert server.window[free].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_equal_prefill_bitwise(device: str) -> None:
    """Drafts that reach into the next chunk; some accepted, folded, and decoding goes on; padding is left alone."""
    layer = cast(draw(SAFE, device), device)
    want, states = one_pass(layer)
    server = Exact(layer)
    begin, d = [62, 40, 120], 8
    server.prefill(begin)
    server.keep([0] * 3, begin)
    x = layer.inputs(begin, [p + d for p in begin])
    slots = server.slots.clone()
    slots[1] = -1
    before = server.matrix.clone()
    pool = (server.matrix, server.window, server.raw, server.lengths(), slots)
    o = exact_verify_inplace(x, layer.weights(), *pool, d).unflatten(0, (3, d))
    assert torch.equal(before.nan_to_num(7.0), server.matrix.nan_to_num(7.0))
    assert not o[1].any()
    for n in (0, 2):
        assert torch.equal(o[n], want[n, begin[n] : begin[n] + d])
    accepted = torch.tensor([5, 3, 8], dtype=torch.int32, device=slots.device)
    decode.shift_window_inplace(x, server.window, slots, accepted, d)
    exact_fold_inplace(layer.weights(), server.matrix, server.raw, server.lengths() + accepted, slots)
    assert torch.equal(server.matrix[slots[0]], states[0, 0])
    assert torch.equal(server.matrix[slots[2]], states[2, 1])
    server.at, server.slots = [67, 40, 128], slots
    o = server.exact_step()
    assert torch.equal(o[0], want[0, 67])
    assert torch.equal(o[2], want[2, 128])
