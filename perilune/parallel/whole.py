"""A model whose parameters are spread over ranks, put together again on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from perilune.model import Transformer, outline
from perilune.parallel.layout import Layout


def whole_model(
    model: Transformer,
    params: Mapping[str, torch.Tensor],
    layout: Layout,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
) -> Transformer:
    """A plain model with the same numbers, on the same device; every rank of the run must call it.

    params: this rank's parts. shapes, dtypes: of the whole parameters. All by name.
    """
    here = {name: p.detach() for name, p in params.items()} | dict(model.named_buffers())
    device = next(iter(here.values())).device
    new = outline(model.config, model.parts)
    state = {}
    for name, value in new.state_dict().items():
        shape = tuple(value.shape)
        mine = here.get(name)
        if mine is not None and layout.mesh.sizes[0] == 1 and (name not in shapes or layout.whole_here(name)):
            state[name] = mine.to(dtypes.get(name, mine.dtype))
            continue
        # The first rank that holds a number gives it, all others add zero.
        out = torch.zeros(shape, dtype=dtypes[name], device=device)
        if mine is not None and layout.gives(name):
            for box in layout.boxes(name, shape):
                at = tuple(slice(a, a + n) for a, n in zip(box.begin, box.size, strict=True))
                out[at] = box.of_part(mine).to(out.dtype)
        dist.all_reduce(out)
        state[name] = out
    new.load_state_dict(state, assign=True)
    return new.train(model.training)


__all__ = ["whole_model"]
