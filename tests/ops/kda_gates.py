"""Inputs of KDA with raw softplus gates from mild to beyond all bounds; shared by the tests of K1 on Hopper."""

import math

import torch
from kda_kernels import make

LENGTHS, STARTS = (70, 0, 1, 129, 63), (0, 0, 5, 100, 64)
HUGE = torch.finfo(torch.bfloat16).max
KINDS = ("mild", "slow", "fast", "channels", "mixed", "edge", "slope", "alternating", "steep", "steepest", "resets")


def gates(kind, lengths=LENGTHS, starts=STARTS, H=3, V=128):
    """The inputs of `make` with other raw gates and rates."""
    inputs, sequences = make(list(lengths), list(starts), H=H, K=128, V=V, dtype=torch.bfloat16)
    g, A_log, dt_bias = inputs[3], inputs[5], inputs[6]
    random = torch.Generator(device=g.device).manual_seed(1)
    some = torch.rand(g.shape, generator=random, device=g.device)
    if kind == "slow":
        g -= 9
    elif kind == "fast":  # 16 nats a token and more, in all channels
        A_log += math.log(16.0)
    elif kind == "channels":  # one channel of eight is steep and stays so
        g[:, :, ::8] += 40
    elif kind == "mixed":  # jumps here and there
        g[some < 0.02] = 60
    elif kind == "edge":  # two jumps of 71.5, 72 and 72.5 nats end on either side of a window's edge at 144.2
        A_log.zero_()
        dt_bias.zero_()
        g.fill_(-12).add_(torch.where(some < 0.06, 83.5 + (some * 1000).floor() % 3 / 2, 0.0))
    elif kind == "slope":  # 160 nats in two tokens, then one nat a token: pairs that count, deep down
        A_log.zero_()
        dt_bias.zero_()
        g.fill_(0.54)
        g[5::32], g[6::32] = 80, 80
    elif kind == "alternating":
        g[::2], g[1::2] = 50, -30
    elif kind == "steep":
        g.fill_(50)
    elif kind == "steepest":
        A_log.fill_(90)
        g.fill_(1e4)
    elif kind == "resets":  # nothing is left after them; what comes next is slow again
        g -= 7
        for t, x in ((3, 1e4), (20, HUGE), (75, math.inf), (80, -math.inf), (100, HUGE), (101, HUGE)):
            g[t] = x
    return inputs, sequences


__all__ = ["KINDS", "gates"]
