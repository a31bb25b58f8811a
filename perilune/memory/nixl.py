"""A room on another rank behind NIXL (`nixl-cu12` or `nixl-cu13`): one-sided writes and reads, also between hosts.

NIXL knows no streams: a thread at the borrower waits until a tensor is made, moves it, and waits for the end, one after
the other, so copies keep their order. The lender does nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from perilune.errors import Error
from perilune.memory.peer import Copy


def package() -> str | None:
    """The module that is installed: the one for torch's CUDA, or on a CPU either; None without."""
    cuda = torch.version.cuda
    majors = [cuda.split(".")[0]] if cuda else ["12", "13"]
    return next((name for name in (f"nixl_cu{major}" for major in majors) if importlib.util.find_spec(name)), None)


def installed() -> bool:
    """Whether the package is there."""
    return package() is not None


class Agent:
    """This rank's end of all its rooms. `about` is what the other ranks must know of it."""

    def __init__(self, rank: int, timeout: float) -> None:
        """timeout: seconds that a transfer may take. Raises Error without the package."""
        name = package()
        if name is None:
            wanted = f"nixl-cu{(torch.version.cuda or '12').split('.')[0]}"
            raise Error(f"peer memory: transport is 'nixl', but the package is not installed; pip install {wanted}")
        api = importlib.import_module(f"{name}._api")
        self.timeout = timeout
        self.agent: Any = api.nixl_agent(f"perilune-{rank}", api.nixl_agent_config(backends=["UCX"]))
        self.thread = ThreadPoolExecutor(1, "perilune-nixl")
        self._lent: list[Any] = []

    @property
    def about(self) -> bytes:
        """With the buffers lent so far."""
        about: bytes = self.agent.get_agent_metadata()
        return about

    def lend(self, room: torch.Tensor) -> tuple[int, int]:
        """Let others write and read a flat buffer; (its address, its GPU)."""
        self._lent.append(self.agent.register_memory([room]))
        return room.data_ptr(), room.get_device() if room.is_cuda else 0

    def move(
        self, what: str, local: torch.Tensor, made: torch.cuda.Event | None, peer: str, address: int, gpu: int
    ) -> None:
        """WRITE a flat tensor to an address of a peer, or READ it from there; ends when the transfer has."""
        if made is not None:
            made.synchronize()
        agent, deadline = self.agent, time.monotonic() + self.timeout
        kind = "VRAM" if local.is_cuda else "DRAM"
        registered = agent.register_memory([local])
        try:
            here = agent.get_xfer_descs([local])
            there = agent.get_xfer_descs([(address, local.nbytes, gpu)], kind)
            handle = agent.initialize_xfer(what, here, there, peer)
            try:
                state = agent.transfer(handle)
                while state == "PROC":
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"no answer in {self.timeout:g} seconds")
                    time.sleep(0)
                    state = agent.check_xfer_state(handle)
                if state != "DONE":
                    raise RuntimeError(f"NIXL says {state}")
            finally:
                agent.release_xfer_handle(handle)
        finally:
            agent.deregister_memory(registered)


class NixlRoom:
    """The borrower's side of one room."""

    def __init__(self, lender: int, size: int, agent: Agent, about: bytes, address: int, gpu: int) -> None:
        """about, address, gpu: what the lender's `Agent` told."""
        self.lender, self.size, self._agent, self._address, self._gpu = lender, size, agent, address, gpu
        self._peer: str = agent.agent.add_remote_agent(about)
        self._peer = self._peer.decode() if isinstance(self._peer, bytes) else self._peer

    def write(self, offset: int, source: torch.Tensor) -> Copy:
        # On a CPU the tensor may change before the thread comes to it.
        return self._begin("WRITE", offset, source if source.is_cuda else source.clone())

    def read(self, offset: int, target: torch.Tensor, after: Copy) -> Copy:
        return self._begin("READ", offset, target)

    def close(self) -> None:
        """Wait for what has been begun."""
        self._agent.thread.submit(lambda: None).result()

    def _begin(self, what: str, offset: int, local: torch.Tensor) -> Copy:
        if not local.numel():
            return _Moved(self._agent.thread.submit(lambda: None))
        made = torch.cuda.current_stream(local.device).record_event() if local.is_cuda else None
        place = (self._peer, self._address + offset, self._gpu)
        return _Moved(self._agent.thread.submit(self._agent.move, what, local, made, *place))


class _Moved:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        try:
            self._future.result()
        except RuntimeError:
            raise
        except Exception as cause:
            # NIXL's own kinds.
            raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause

    finish = wait


__all__ = ["Agent", "NixlRoom", "installed"]
