"""Optimizer states that lie on the host or in files, and pass through the device in chunks during a step.

Between steps an optimizer's state holds tensors of the CPU, pinned or mapped from files, so checkpoints see nothing
unusual. `chunks` hands out the parameters some at a time, with their states on the device: while one chunk is worked
on, the next one comes and the one before it leaves. The arithmetic is the optimizer's own, so are the bits.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from perilune.errors import Error
from perilune.ops.pinned import host_empty


def whole(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """For states that are on the device anyway: one piece."""
    yield params


class States:
    """Where the states of one run's optimizers live. most: largest number of their bytes on the device so far."""

    def __init__(self, device: torch.device, folder: Path | None = None, chunk: int = 1 << 28) -> None:
        """folder: for files; None: host memory. chunk: bytes of states that come together, or one parameter's.

        Raises Error for a folder that is not there.
        """
        if folder is not None and not folder.is_dir():
            raise Error(f"memory.nvme is {str(folder)!r}; must be a folder that exists")
        self.device, self.folder, self.chunk, self.most = device, folder, chunk, 0
        self._here = 0
        self._away: dict[Tensor, dict[str, Tensor]] = {}
        if device.type == "cuda":
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in states that have come from elsewhere (a checkpoint). Raises Error where there is no room."""
        for state in optimizer.state.values():
            for key, value in state.items():
                if value.dim():
                    state[key] = self._home(value).copy_(value)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of an optimizer that treats each parameter by itself, such as AdamW."""
        groups = optimizer.param_groups
        everyone = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, everyone, strict=True):
                for other in groups:
                    other["params"] = []
                for chunk in self.chunks(optimizer, [p for p in params if p.grad is not None]):
                    group["params"] = list(chunk)
                    optimizer.step()
        finally:
            for group, params in zip(groups, everyone, strict=True):
                group["params"] = params

    def chunks(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """The parameters in order, some at a time, their states on the device until the next ones are asked for."""
        parts = list(self._cut(optimizer, params))
        leaving: list[tuple[torch.cuda.Event | None, list[Tensor]]] = []
        try:
            coming = self._load(optimizer, parts[0]) if parts else None
            for i, part in enumerate(parts):
                if coming is not None:
                    torch.cuda.current_stream(self.device).wait_event(coming)
                yield part
                leaving.append(self._store(optimizer, part))
                if i:
                    self._let_go(leaving.pop(0))
                if i + 1 < len(parts):
                    coming = self._load(optimizer, parts[i + 1])
        finally:
            for left in leaving:
                self._let_go(left)
            for param, states in self._away.items():
                # Only after an error: what a chunk has not changed to the end is as it was.
                optimizer.state[param].update(states)
            self._away.clear()

    def _cut(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        part: list[Tensor] = []
        size = 0
        for param in params:
            # What has no states yet gets at most two like it.
            known = [value.nbytes for value in optimizer.state[param].values()]
            more = sum(known) if known else 2 * param.nbytes
            if part and size + more > self.chunk:
                yield part
                part, size = [], 0
            part.append(param)
            size += more
        if part:
            yield part

    def _load(self, optimizer: torch.optim.Optimizer, part: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Begin to bring the states of a chunk; the event is behind the last copy."""
        copies = []
        for param in part:
            state = optimizer.state[param]
            homes = {key: value for key, value in state.items() if value.dim()}
            if homes:
                self._away[param] = homes
            for key, home in homes.items():
                state[key] = torch.empty_like(home, device=self.device, pin_memory=False)
                copies.append((state[key], home))
                self._here += home.nbytes
        self.most = max(self.most, self._here)
        return self._copy(copies, getattr(self, "_in", None))

    def _store(
        self, optimizer: torch.optim.Optimizer, part: Sequence[Tensor]
    ) -> tuple[torch.cuda.Event | None, list[Tensor]]:
        """Begin to take a chunk's states home; the tensors must be held until the event."""
        copies, held = [], []
        for param in part:
            state, homes = optimizer.state[param], self._away.pop(param, {})
            for key, value in state.items():
                if not value.dim():
                    continue
                if key not in homes:
                    # Made by the step itself: the first one of this parameter.
                    homes[key] = self._home(value)
                    self._here += value.nbytes
                copies.append((homes[key], value))
                held.append(value)
                state[key] = homes[key]
        self.most = max(self.most, self._here)
        return self._copy(copies, getattr(self, "_out", None)), held

    def _copy(
        self, copies: Sequence[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None
    ) -> torch.cuda.Event | None:
        with torch.no_grad():
            if stream is None:
                for target, source in copies:
                    target.copy_(source)
                return None
            before = torch.cuda.current_stream(self.device).record_event()
            with torch.cuda.stream(stream):
                stream.wait_event(before)
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                event: torch.cuda.Event = stream.record_event()
                return event

    def _let_go(self, left: tuple[torch.cuda.Event | None, list[Tensor]]) -> None:
        event, held = left
        if event is not None:
            event.synchronize()
        self._here -= sum(value.nbytes for value in held)
        held.clear()

    def _home(self, like: Tensor) -> Tensor:
        if self.folder is None:
            return host_empty(like.shape, like.dtype, pin=self.device.type == "cuda")
        return _mapped(self.folder, like)


def _mapped(folder: Path, like: Tensor) -> Tensor:
    """Like a tensor, in a file without a name whose blocks are there: a full disk is an error now, not in a step."""
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="perilune-state-")
        try:
            os.posix_fallocate(descriptor, 0, max(1, like.nbytes))
            flat = torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype)
        finally:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(name)
    except OSError as cause:
        raise Error(
            f"memory.nvme is {str(folder)!r}: {cause.strerror}; {like.nbytes} bytes of optimizer state do not fit"
        ) from cause
    return flat.view(like.shape)


__all__ = ["States", "whole"]
