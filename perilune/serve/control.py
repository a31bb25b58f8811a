"""New weights and sleep: what an operator or a trainer does to an engine between two steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import torch

from perilune.errors import Error
from perilune.serve.engine import Engine
from perilune.serve.errors import EngineError


def update_weights(
    engine: Engine,
    weights: Iterable[tuple[str, torch.Tensor]],
    version: int,
    running: Literal["recompute", "keep", "abort"] = "recompute",
) -> int:
    """Replace weights by name (those of `model.state_dict()`, all or some of them), one at a time; how many.

    running: what becomes of requests on their way. "recompute" computes their tokens again with the new weights; "keep"
    goes on from their states, of which nothing will be reused; "abort" ends them. What the cache holds of the old
    version is dropped, and neither that nor what is still being computed with it can ever be matched again; holds end.
    Raises Error for a version that is not newer, or for a name or shape the model does not have. A collection (a list,
    `dict.items()`) is looked at before anything changes; of a generator the weights before the wrong one are replaced
    then, and the engine refuses to step until an update succeeds.
    """
    if version <= engine.scheduler.version:
        raise Error(f"version is {version}; must be > {engine.scheduler.version}")
    if running not in ("recompute", "keep", "abort"):
        raise Error(f"running is {running!r}; allowed: 'recompute', 'keep', 'abort'")
    if engine.asleep:
        raise EngineError(f"the engine sleeps at level {engine.asleep}; wake it first", "unavailable")
    own, before = engine.runner.weights(), engine.incomplete
    if isinstance(weights, Collection):
        for name, value in weights:
            _fits(own, name, value)
        _complete(own, {name for name, _ in weights}, before)
    engine.land()
    with engine.alone():
        engine.scheduler.new_version(version, running, engine.clock())
    engine.incomplete = f"the update of the weights to version {version} has failed; update them again"
    replaced = set[str]()
    with torch.no_grad():
        for name, value in weights:
            _fits(own, name, value)
            engine.runner.put_weight(name, value)
            replaced.add(name)
    _complete(own, replaced, before)
    engine.runner.refresh()
    engine.incomplete = None
    return len(replaced)


def _fits(own: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    if name not in own:
        raise Error(f"weights holds {name!r}, which the model does not have")
    if not isinstance(value, torch.Tensor) or value.is_floating_point() != own[name].is_floating_point():
        raise Error(f"{name} is {getattr(value, 'dtype', type(value))}; must be a tensor like {own[name].dtype}")
    if own[name].shape != value.shape:
        raise Error(f"{name} has shape {tuple(value.shape)}; must be {tuple(own[name].shape)}")


def _complete(own: dict[str, torch.Tensor], given: set[str], before: str | None) -> None:
    if before is not None and given != set(own):
        missing = sorted(set(own) - given)
        raise Error(f"weights lacks {missing[0]!r} and {len(missing) - 1} more; all are needed: {before}")


def sleep(engine: Engine, level: int = 1) -> None:
    """Give memory back. 1: pages and slots; 2: the weights as well.

    Requests stay, and compute their tokens again after `wake`; what was cached is gone, and holds end.
    Raises Error for another level, or an engine that sleeps already.
    """
    if level not in (1, 2):
        raise Error(f"level is {level}; allowed: 1, 2")
    if engine.asleep:
        raise Error(f"the engine sleeps at level {engine.asleep} already")
    engine.land()
    with engine.alone():
        engine.scheduler.drop_all(engine.clock())
        engine.runner.release(weights=level == 2)
    if level == 2:
        engine.incomplete = "the weights were dropped by sleep(2); update_weights with all of them"
    if engine.pools.device.type == "cuda":
        torch.cuda.empty_cache()
    engine.asleep = level


def wake(engine: Engine) -> None:
    """Take the memory again. After level 2, `update_weights` with all weights comes next. Raises Error if awake."""
    if not engine.asleep:
        raise Error("the engine does not sleep")
    engine.runner.take(weights=engine.asleep == 2)
    engine.asleep = 0


__all__ = ["sleep", "update_weights", "wake"]
