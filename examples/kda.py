"""Kimi Delta Attention alone, in plain torch: trains a layer to recall, then decodes with it.

A document is a list of pairs "key value", and each document has its own random dictionary. After a key that came
before, its value can only be known from the layer's state. Documents of different lengths are packed on one token axis.

    python examples/kda.py      # a few seconds on a CPU

Legend: T tokens, N documents, H heads, K key dim, V value dim, D model, C convolution channels, S state slots.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from perilune import Sequences
from perilune.config import Gate
from perilune.ops.conv import short_conv
from perilune.ops.kda import kda
from perilune.ops.kda.decode import Projected, Weights, decode_step_inplace, verify
from perilune.ops.norm import gated_rms_norm

KEYS = 16  # tokens 0..15 are keys, 16..31 values
STEPS, DOCUMENTS = 80, 16
EPS = 1e-5
State = tuple[torch.Tensor, torch.Tensor]  # KDA's matrix [N, H, K, V], the convolution's window [N, 3, C]


class Layer(nn.Module):
    """Projections, convolution, KDA, gated norm, output projection. The state is an argument, never an attribute."""

    def __init__(self, D: int, H: int, K: int, V: int) -> None:
        super().__init__()
        self.heads, self.gate = H, Gate("safe", -5.0)
        self.widths = [H * K, H * K, H * V, H * K, H, H * V]  # q, k, v, gate, beta, output gate
        self.project = nn.Linear(D, sum(self.widths), bias=False)
        self.conv_CW = nn.Parameter(torch.randn(H * (2 * K + V), 4) / 2)
        self.A_log_H = nn.Parameter(torch.zeros(H))
        self.dt_bias_HK = nn.Parameter(torch.full((H, K), -5.0))  # e^g near 1: the state starts as a long memory
        self.norm_V = nn.Parameter(torch.ones(V))
        self.out = nn.Linear(H * V, D, bias=False)

    def split(self, x_TD: torch.Tensor) -> Projected:
        """The six projections, each [T, H, dim] but beta [T, H]."""
        parts = [y.unflatten(1, (self.heads, -1)) for y in self.project(x_TD).split(self.widths, dim=1)]
        parts[4] = parts[4].squeeze(2)
        return Projected(*parts)

    def forward(
        self, x_TD: torch.Tensor, sequences: Sequences, state: State | None = None
    ) -> tuple[torch.Tensor, State]:
        """Any number of packed documents, each from its state."""
        matrix_NHKV, window_N3C = (None, None) if state is None else state
        p = self.split(x_TD)
        qkv_TC = torch.cat([p.q_THK.flatten(1), p.k_THK.flatten(1), p.v_THV.flatten(1)], 1)
        qkv_TC, window_N3C = short_conv(qkv_TC, self.conv_CW, sequences, window_N3C)
        q, k, v = (y.unflatten(1, (self.heads, -1)) for y in qkv_TC.split(self.widths[:3], dim=1))
        o_THV, matrix_NHKV = kda(
            q, k, v, p.g_raw_THK, p.beta_logit_TH, self.A_log_H, self.dt_bias_HK, self.gate, matrix_NHKV, sequences
        )
        o_THV = gated_rms_norm(o_THV, self.norm_V, p.out_gate_THV, EPS)
        return self.out(o_THV.flatten(1)), (matrix_NHKV, window_N3C)

    def decode_weights(self) -> Weights:
        """The same parameters, as the decode kernels take them."""
        conv_q, conv_k, conv_v = self.conv_CW.split(self.widths[:3])
        return Weights(conv_q, conv_k, conv_v, self.A_log_H, self.dt_bias_HK, self.norm_V, EPS, self.gate)


class Model(nn.Module):
    """Embedding, one KDA layer, read-out."""

    def __init__(self, D: int = 64, H: int = 2, K: int = 32, V: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * KEYS, D)
        self.layer = Layer(D, H, K, V)
        self.read = nn.Linear(D, 2 * KEYS, bias=False)

    def forward(
        self, tokens_T: torch.Tensor, sequences: Sequences, state: State | None = None
    ) -> tuple[torch.Tensor, State]:
        x_TD = self.embed(tokens_T)
        y_TD, state = self.layer(x_TD, sequences, state)
        return self.read(x_TD + y_TD), state

    def decode(self, tokens_T: torch.Tensor, state: State, slots_N: torch.Tensor, drafts: int = 0) -> torch.Tensor:
        """One token of each document advances its slot of the state; `drafts` tokens of each are only looked at."""
        x_TD = self.embed(tokens_T)
        arguments = (self.layer.split(x_TD), self.layer.decode_weights(), *state, slots_N)
        o_THV = verify(*arguments, drafts) if drafts else decode_step_inplace(*arguments)
        logits_TV: torch.Tensor = self.read(x_TD + self.layer.out(o_THV.flatten(1)))
        return logits_TV


def document(pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of `pairs` pairs, and where the next token is the value of a key seen before."""
    values = KEYS + torch.randperm(KEYS)
    keys = torch.randint(KEYS, (pairs,))
    tokens_T = torch.stack([keys, values[keys]], 1).flatten()
    seen = [key in keys[:i] for i, key in enumerate(keys)]
    return tokens_T, torch.stack([torch.tensor(seen), torch.zeros(pairs, dtype=torch.bool)], 1).flatten()


def batch(documents: int) -> tuple[torch.Tensor, torch.Tensor, Sequences]:
    """Documents of 12 to 60 pairs, packed."""
    drawn = [document(int(torch.randint(12, 61, ()))) for _ in range(documents)]
    sequences = Sequences.from_lengths(len(tokens_T) for tokens_T, _ in drawn)
    return torch.cat([tokens_T for tokens_T, _ in drawn]), torch.cat([known_T for _, known_T in drawn]), sequences


def train(model: Model) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    print(f"{'step':>6} {'tokens':>7} {'loss':>7} {'recalled':>9}")
    for step in range(STEPS + 1):
        tokens_T, known_T, sequences = batch(DOCUMENTS)
        logits_TV, _ = model(tokens_T, sequences)
        asked, answers = logits_TV[known_T], tokens_T.roll(-1)[known_T]
        loss = F.cross_entropy(asked, answers)
        if step % 20 == 0:
            right = (asked.argmax(1) == answers).float().mean()
            print(f"{step:6d} {len(tokens_T):7d} {loss.item():7.3f} {right.item():9.1%}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def packed_equals_alone(model: Model) -> None:
    tokens_T, _, sequences = batch(5)
    together, _ = model.layer(model.embed(tokens_T), sequences)
    worst = 0.0
    for a, b in pairwise(sequences.offsets):
        alone, _ = model.layer(model.embed(tokens_T[a:b]), Sequences.from_lengths([b - a]))
        worst = max(worst, (together[a:b] - alone).abs().max().item())
    print(f"\nfive documents packed against each alone: largest difference of the layer's output {worst:.1e}")
    assert worst < 1e-4


@torch.no_grad()
def decoding_equals_one_pass(model: Model) -> None:
    """Prefill, decode token by token from the returned state, check drafts: all the same numbers as one pass."""
    prompt, total = 50, 100
    tokens_T, known_T = document(total // 2)
    wanted_TV, (wanted_NHKV, _) = model(tokens_T, Sequences.from_lengths([total]))

    _, state = model(tokens_T[:prompt], Sequences.from_lengths([prompt]))
    slots_N = torch.tensor([0], dtype=torch.int32)
    drafts_TV = model.decode(tokens_T[prompt : prompt + 8], state, slots_N, drafts=8)
    decoded_TV = torch.cat([model.decode(tokens_T[t : t + 1], state, slots_N) for t in range(prompt, total)])

    logits = (decoded_TV - wanted_TV[prompt:]).abs().max().item()
    matrix = (state[0] - wanted_NHKV).abs().max().item()
    drafted = (drafts_TV - decoded_TV[:8]).abs().max().item()
    known = known_T[prompt:]
    right = (decoded_TV.argmax(1)[known] == tokens_T.roll(-1)[prompt:][known]).float().mean().item()
    print(f"prefill of {prompt} tokens and {total - prompt} decode steps against one pass of {total}:")
    print(f"  largest difference of logits {logits:.1e}, of the state {matrix:.1e}")
    print(f"  8 drafts verified at once against 8 decode steps: {drafted:.1e}")
    print(f"  values recalled while decoding: {right:.1%}")
    assert max(logits, matrix, drafted) < 1e-3


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    began = time.perf_counter()
    model = Model()
    count = sum(p.numel() for p in model.parameters())
    print(f"one KDA layer, 2 heads of 32, {count:,} parameters; guessing recalls {1 / KEYS:.1%}\n")
    train(model)
    packed_equals_alone(model)
    decoding_equals_one_pass(model)
    print(f"\n{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
