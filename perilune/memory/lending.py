"""Loans of memory between the ranks of a run: who lends whom how much, and the rooms that come of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from perilune.errors import Error
from perilune.memory import nixl
from perilune.memory.messages import Lender, MessageRoom, Pair
from perilune.memory.peer import MappedRoom, PeerStore, Room

Transport = Literal["auto", "mapped", "nixl", "messages"]


@dataclass(frozen=True)
class Loan:
    """`bytes` of the lender's device memory for the borrower's activations; both are ranks of the run."""

    borrower: int
    lender: int
    bytes: int


def even_out(needs: Sequence[int], movable: Sequence[int]) -> list[Loan]:
    """Loans after which all have about the mean of `needs`: those above it, the fullest first, from the emptiest.

    movable: bytes that each could keep elsewhere at most.
    """
    level = sum(needs) // len(needs)
    held, left, loans = list(needs), list(movable), []
    for borrower in sorted(range(len(needs)), key=lambda i: -needs[i]):
        for lender in sorted(range(len(needs)), key=lambda i: held[i]):
            size = min(held[borrower] - level, level - held[lender], left[borrower])
            if size > 0:
                loans.append(Loan(borrower, lender, size))
                held[borrower] -= size
                held[lender] += size
                left[borrower] -= size
    return loans


def after(needs: Sequence[int], loans: Sequence[Loan]) -> list[int]:
    """What each holds when the loans are used in full."""
    held = list(needs)
    for loan in loans:
        held[loan.borrower] -= loan.bytes
        held[loan.lender] += loan.bytes
    return held


class Lending:
    """This rank's part of all loans. Every rank of the run makes the same calls.

    `store` is where this rank's activations may go; a room of nothing where it borrows nothing.
    """

    def __init__(
        self, loans: Sequence[Loan], device: torch.device, timeout: float, transport: Transport = "auto"
    ) -> None:
        """timeout: seconds after which a lender that does not answer is an error.

        transport, auto: the memory of GPUs of one host is mapped; other GPUs are reached by NIXL where it is installed,
        else by messages (NCCL); CPUs by messages (gloo). Raises Error where it cannot be had.
        """
        self.timeout, rank = timeout, dist.get_rank()
        hosts: list[str] = _tell(socket.gethostname())
        kinds = {loan: _kind(transport, device, hosts[loan.borrower] == hosts[loan.lender]) for loan in loans}
        pairs = {loan: Pair(loan.borrower, loan.lender, device, timeout) for loan in loans if kinds[loan] == "messages"}
        mine = {loan: _buffer(loan, device) for loan in loans if loan.lender == rank}
        self._buffers = list(mine.values())
        self._lenders = [Lender(pair, mine[loan]) for loan, pair in pairs.items() if loan in mine]
        agent = nixl.Agent(rank, timeout) if "nixl" in kinds.values() else None
        told: dict[Loan, Any] = {}
        for loan, buffer in mine.items():
            if kinds[loan] == "mapped":
                from perilune.memory.mapped import share

                told[loan] = share(buffer)
            elif agent is not None and kinds[loan] == "nixl":
                told[loan] = agent.lend(buffer)
        self._agent, abouts = agent, _tell(None if agent is None else agent.about)
        known = {loan: what for theirs in _tell(told) for loan, what in theirs.items()}
        rooms: list[Room] = []
        for loan in loans:
            if loan.borrower != rank:
                continue
            if kinds[loan] == "mapped":
                from perilune.memory.mapped import open_room

                handle, offset = known[loan]
                rooms.append(MappedRoom(loan.lender, open_room(handle, offset, loan.bytes, device)))
            elif agent is not None and kinds[loan] == "nixl":
                rooms.append(nixl.NixlRoom(loan.lender, loan.bytes, agent, abouts[loan.lender], *known[loan]))
            else:
                rooms.append(MessageRoom(pairs[loan], loan.bytes))
        # A lender may not leave before it has been found.
        _tell(None)
        self.store = PeerStore(rooms)

    def close(self) -> None:
        """End this rank's loans; for when no step is under way on any rank, since nobody else is waited for where the
        lender's memory is reached without it."""
        self.store.close()
        for lender in self._lenders:
            lender.close(self.timeout)


def _kind(transport: Transport, device: torch.device, one_host: bool) -> Transport:
    if transport != "auto":
        return transport
    if device.type != "cuda":
        return "messages"
    return "mapped" if one_host else "nixl" if nixl.installed() else "messages"


def _tell(mine: Any) -> list[Any]:
    """A value of every rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def _buffer(loan: Loan, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(loan.bytes, dtype=torch.uint8, device=device)
    except RuntimeError as cause:
        raise Error(f"peer memory: {loan.bytes} bytes to be lent to rank {loan.borrower} cannot be had") from cause


__all__ = ["Lending", "Loan", "Transport", "after", "even_out"]
