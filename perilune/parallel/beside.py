"""Work that others do not wait for, done at the same time: on a stream of its own, forward and backward.

autograd runs an operation's backward pass on the stream of its forward pass and waits where streams meet, so what is
beside in the forward pass is beside in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

# A tensor, or a tuple of them.
Out = TypeVar("Out", torch.Tensor, tuple[torch.Tensor, ...])


class Beside:
    """`Parts.beside` for CUDA: call() runs on another stream; what it returns is used after join(). Same bits."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, call: Callable[[], Out], device: torch.device) -> Callable[[], Out]:
        """Start call() now; the function returned waits for it (on the device) and gives its result."""
        if device.type != "cuda":
            return call
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        main = torch.cuda.current_stream(device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            out = call()
        # Its memory belongs to the other stream, and the caller's reads of it as well.
        for tensor in out if isinstance(out, tuple) else (out,):
            tensor.record_stream(main)
        side = self._stream

        def join() -> Out:
            torch.cuda.current_stream(device).wait_stream(side)
            return out

        return join


__all__ = ["Beside"]
