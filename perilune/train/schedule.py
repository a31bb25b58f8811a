"""The learning rate over a run: linear warm-up, then half a cosine."""

from __future__ import annotations

import math


def learning_rate(step: int, steps: int, peak: float, warmup: float, min_lr: float) -> float:
    """Rate of step `step` (counted from 0) of a run of `steps`.

    It grows linearly over the first max(1, round(warmup * steps)) steps, reaches `peak` with the last of them, and
    falls along half a cosine to min_lr * peak, which the last step has.
    """
    warm = max(1, round(warmup * steps))
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm + 1) / max(1, steps - warm)
    return peak * (min_lr + (1 - min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


__all__ = ["learning_rate"]
