"""Bytes that a rank receives by each collective of a step.

Legend as in `train.plan`.
"""

from __future__ import annotations

from math import ceil

from perilune.ops.conv import WIDTH
from perilune.ops.sequences import Sequences
from perilune.parallel.expert.model import is_stacked
from perilune.parallel.fragments import exchange_bytes
from perilune.parallel.layout import Layout
from perilune.parallel.slices import cut_stream
from perilune.parallel.stages import hop_blocks
from perilune.parallel.tensor_model import CUT
from perilune.train.plan_ranks import Part, following, is_here, itemsize


def collective_bytes(part: Part) -> dict[str, int]:
    config, shape, mesh, places, micro = part.config, part.shape, part.mesh, part.places, part.micro
    b, wide = itemsize(config), max(4, itemsize(config))
    _, _, _, cp, tp = mesh.sizes
    zero = config.parallel.zero if mesh.part[1] > 1 else 0
    unsharded = Layout(shape, mesh, CUT)
    full = {
        name: sum(box.numel for box in unsharded.boxes(name, whole))
        for name, whole in part.shapes.items()
        if is_here(name, places)
    }
    experts = sum(n for name, n in full.items() if is_stacked(name) and mesh.shards > 1)
    rest = sum(full.values()) - experts
    stage = mesh.ranks // mesh.sizes[0]
    out: dict[str, int] = {}
    if zero:
        F = mesh.part[1]
        gathers = 1 if zero < 3 else 2 * micro
        reductions = 1 if zero == 1 or config.parallel.pp > 1 else micro
        out["gather weights"] = rest * b * (F - 1) // F * gathers
        out["reduce gradients"] = rest * wide * (F - 1) // F * reductions
    elif stage > 1:
        out["add gradients"] = 2 * rest * wide * (stage - 1) // stage
    twins = stage // mesh.shards
    if experts and twins > 1:
        out["add experts' gradients"] = 2 * experts * wide * (twins - 1) // twins
    layers = [layer for place in places for layer in range(place.first, place.last)]
    tokens = ceil(config.data.batch_tokens / cp)
    rows = ceil(tokens / tp)
    if mesh.shards > 1:
        ep, J = mesh.shards, shape.moe.top_k
        reached = ep * (1 - (1 - 1 / ep) ** J)
        width = (shape.moe.latent_size or shape.hidden_size) * b
        sparse = sum(shape.is_sparse(layer) for layer in layers)
        # Inputs to each rank that is reached, results a choice; backward the same again and the gradients' inputs.
        moves = 3 * reached + 2 * J
        out["rows to experts and back"] = int(rows * width * moves * (ep - 1) / ep) * sparse * micro
    linear = sum(not shape.is_mla(layer) for layer in layers)
    if cp > 1:
        whole = Sequences.from_lengths([config.data.batch_tokens])
        spans = cut_stream(whole, cp, config.parallel.order)
        H = shape.kda.num_heads // tp
        states = exchange_bytes(spans, H, shape.kda.head_dim, shape.kda.head_dim, wide)
        out["KDA states"] = (states["forward"] + states["backward"]) * linear * micro
        each = spans.count // cp
        channels = 3 * H * shape.kda.head_dim
        out["convolution"] = 2 * (cp - 1) * each * (WIDTH - 1) * channels * b * linear * micro
        latent = shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim
        out["latent rows"] = 2 * tokens * (cp - 1) * latent * b * (len(layers) - linear) * micro
    if tp > 1:
        gathered = rows * (tp - 1) * shape.hidden_size * b
        modules = len(layers) + sum(not shape.is_sparse(layer) for layer in layers)
        out["tokens to heads and back"] = 4 * gathered * modules * micro
    if mesh.sizes[0] > 1:
        into = sum(1 + hop_blocks(shape, place) for place in places if place.index)
        back = sum(1 + hop_blocks(shape, place) for place in following(shape, config, places))
        out["pipeline hops"] = (into + back) * rows * shape.hidden_size * b * micro
    spread = sum(n for name, n in full.items() if name in part.muon and not is_stacked(name))
    if zero:
        out["Muon"] = 2 * spread * wide // mesh.part[1]
    return out


__all__ = ["collective_bytes"]
