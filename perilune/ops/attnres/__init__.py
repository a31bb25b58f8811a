"""Attention residuals: a layer's input as a softmax mixture of earlier outputs.

Legend: T tokens, D model width, n sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from perilune.errors import Error
from perilune.ops.attnres.partial import Partial
from perilune.ops.checks import check_floats
from perilune.ops.implementation import Implementation, room
from perilune.ops.implementation import implementation as _implementation

# The kernels hold a row in registers and take one pointer a source.
MAX_SOURCES, MAX_WIDTH = 9, 8192


def mix(sources: Sequence[torch.Tensor], norm_w_D: torch.Tensor, query_w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """h_TD = sum_i p_i V_i, the mixture of the sources, in their dtype; everything inside in max(fp32, dtype).

    p = softmax_i(r_i <norm_w query_w, V_i>), r_i = 1 / sqrt(mean V_i^2 + eps) (Kimi-K3 report, Block AttnRes).
    No [n, T, D] stack is made, and only [T, n] statistics are kept beside the sources for the backward pass.
    Every token's bits depend on that token alone (bitwise-batch), the weights' gradients on the layout.
    Raises Error without sources, when a shape, dtype or device differs, and for dtypes other than bf16, fp16, fp32
    and fp64.
    """
    _check("mix", sources, {"norm_w_D": norm_w_D, "query_w_D": query_w_D})
    h_TD: torch.Tensor = room(__name__, implementation(sources)).mix(sources, norm_w_D, query_w_D, eps)
    return h_TD


def mix_norm(
    sources: Sequence[torch.Tensor],
    norm_w_D: torch.Tensor,
    query_w_D: torch.Tensor,
    eps: float,
    out_w_D: torch.Tensor,
    out_eps: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(rms_norm(mix(sources)), the same sources again), with the roundings of `mix` and `rms_norm`.

    Later uses should take the sources returned here: a source's gradients then pass from use to use and are added
    inside the kernels, instead of by one addition of autograd a use. The values and the memory are the same.
    On a GPU one kernel that reads every source once; nothing [T, D] is kept beside the sources. Levels and errors as
    `mix`.
    """
    _check("mix_norm", sources, {"norm_w_D": norm_w_D, "query_w_D": query_w_D, "out_w_D": out_w_D})
    module = room(__name__, implementation(sources))
    result: tuple[torch.Tensor, list[torch.Tensor]] = module.mix_norm(
        sources, norm_w_D, query_w_D, eps, out_w_D, out_eps
    )
    return result


def mix_completed(
    sources: Sequence[torch.Tensor], norm_w_D: Sequence[torch.Tensor], query_w_D: Sequence[torch.Tensor], eps: float
) -> list[Partial]:
    """The part that completed sources x_TD have in the mixtures of several mixers, from one read of the sources.

    norm_w_D, query_w_D: one vector a mixer. `merge_norm` adds the one source that changes from mixer to mixer.
    Without gradients: raises Error where one would be recorded, and on shapes and dtypes as `mix`.
    Level: bitwise-batch. Source: two-phase inference of the Kimi-K3 report, in the manner of online softmax.
    """
    if len(norm_w_D) != len(query_w_D):
        raise Error(f"attnres.mix_completed: {len(norm_w_D)} norm_w but {len(query_w_D)} query_w; one of each a mixer")
    for norm_w, query_w in zip(norm_w_D, query_w_D, strict=True):
        _check("mix_completed", sources, {"norm_w_D": norm_w, "query_w_D": query_w})
    _refuse_gradients("mix_completed", *sources, *norm_w_D, *query_w_D)
    partials: list[Partial] = _inference(sources).mix_completed(sources, norm_w_D, query_w_D, eps)
    return partials


def merge_norm(
    partial: Partial,
    live_TD: torch.Tensor,
    norm_w_D: torch.Tensor,
    query_w_D: torch.Tensor,
    eps: float,
    out_w_D: torch.Tensor,
    out_eps: float,
) -> torch.Tensor:
    """rms_norm of the mixture of a partial's sources and one more, x_TD.

    Within tolerance of `mix_norm` over all of them, as the partial is rounded to the sources' dtype once more: 1.2e-2
    against float64 in bf16, where `mix_norm` keeps 1e-2, and 3e-5 in fp32 as there.
    Without gradients, errors and level as `mix_completed`.
    """
    weights = {"norm_w_D": norm_w_D, "query_w_D": query_w_D, "out_w_D": out_w_D}
    _check("merge_norm", [partial.h_TD, live_TD], weights)
    _refuse_gradients("merge_norm", live_TD, *weights.values())
    x_TD: torch.Tensor = _inference([live_TD]).merge_norm(partial, live_TD, norm_w_D, query_w_D, eps, out_w_D, out_eps)
    return x_TD


def implementation(sources: Sequence[torch.Tensor]) -> Implementation:
    """Which code `mix` and `mix_norm` run for such sources."""
    width = sources[0].shape[-1]
    return _implementation(sources[0], len(sources) <= MAX_SOURCES and 1 <= width <= MAX_WIDTH)


def _inference(sources: Sequence[torch.Tensor]) -> ModuleType:
    """Kernels for inference are in a file of their own; the reference has one."""
    return room(__name__, "triton_inference" if implementation(sources) == "triton" else "reference")


def _refuse_gradients(op: str, *tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise Error(f"attnres.{op}: an input requires a gradient, which this has not; call it under torch.no_grad()")


def _check(op: str, sources: Sequence[torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    if not sources:
        raise Error(f"attnres.{op}: sources is empty; at least one is needed")
    first = sources[0]
    for i, source in enumerate(sources):
        if source.shape != first.shape or source.dtype != first.dtype:
            raise Error(
                f"attnres.{op}: sources[{i}] is {source.dtype} {tuple(source.shape)}, "
                f"sources[0] is {first.dtype} {tuple(first.shape)}; they must be equal"
            )
    for name, w in weights.items():
        if w.shape != first.shape[-1:]:
            raise Error(f"attnres.{op}: {name} has shape {tuple(w.shape)}; must be ({first.shape[-1]},)")
    check_floats(f"attnres.{op}", **{f"sources[{i}]": source for i, source in enumerate(sources)}, **weights)


__all__ = ["Partial", "implementation", "merge_norm", "mix", "mix_completed", "mix_norm"]
