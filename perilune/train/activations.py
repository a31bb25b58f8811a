"""The activation manager in a training run: from the config's [memory] to a context around each step's passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from perilune.errors import Error
from perilune.memory.files import FileStore
from perilune.memory.fit import fit, working_set
from perilune.memory.lending import Lending, Loan
from perilune.memory.manager import Memory
from perilune.memory.pinned import PinnedStore
from perilune.memory.plan import Plan, load_plan
from perilune.memory.profile import Profile, device_bytes, predict, profile
from perilune.memory.stores import MemoryStore, Store
from perilune.model import Transformer
from perilune.parallel.collectives import local
from perilune.train.config import TrainConfig
from perilune.train.plan import plan
from perilune.train.plan_ranks import live_micro_batches
from perilune.train.team import Team

# Bytes a second between a GPU and its host, or within a CPU's memory, by which `fit` weighs moving against computing.
LINK = {"cuda": 50e9, "cpu": 5e9}


class Activations:
    """`step` wraps the passes of one step. Without a plan it does nothing.

    With several ranks all carry out one plan, so that regions with collectives are computed again on all of them in
    the same order. Raises Error for a plan that does not exist or cannot be carried out.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Transformer,
        device: torch.device,
        team: Team,
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        """optimizers: whose states take from what a plan may use (`fit` on one GPU)."""
        self.config, self.device, self.team = config.memory, device, team
        self.memory: Memory | None = None
        self._run, self._shape = config, model.config
        self._lending: Lending | None = None
        self._weights = [local(x.detach()) for x in (*model.parameters(), *model.buffers())]
        self._params, self._optimizers = list(model.parameters()), list(optimizers)
        self._checked: Plan | None = None
        if self.config.plan == "none":
            return
        if self.config.plan != "fit":
            self.memory = self.manager(self._of_ranks(load_plan(self.config.plan)))

    @contextlib.contextmanager
    def step(self, forward: Callable[[], Tensor]) -> Iterator[None]:
        """forward: the loss of one micro-batch; run once, before the first step, where a plan is to be fitted."""
        if self.config.plan == "fit" and self.memory is None:
            self.memory = self.manager(self.plan(forward))
        if self.memory is None:
            yield
            return
        with self.memory.step():
            yield
        if self._checked is not None:
            # A stage need not have all names; all stages together must.
            names = {name: kind for told in self.team.of_stages(self.memory.names) for name, kind in told.items()}
            checked, self._checked = self._checked, None
            checked.check(names)

    def plan(self, forward: Callable[[], Tensor]) -> Plan:
        """The run's plan, the same on all ranks of a stage."""
        if self.config.plan != "fit":
            return load_plan(self.config.plan)
        noted = profile(forward, self._weights, self.device)
        chosen, problem = Plan(), None
        micro = self._run.accumulate // self.team.mesh.data[1]
        budget = self.config.budget // live_micro_batches(self._run, self.team.mesh.places[0], micro)
        alone = self.device.type == "cuda" and self.team.mesh.ranks == 1 and self.config.gradients == "device"
        around = self._around(forward, noted) if alone else 0
        try:
            chosen = fit(noted, budget, LINK[self.device.type], around=around)
        except Error as error:
            problem = error
        self.team.agree(problem)
        return _of_the_fullest(self.team.of_stage((_kept(noted), chosen)))

    def _around(self, forward: Callable[[], Tensor], noted: Profile) -> int:
        """Bytes of the GPU at the peak of a step under any plan: weights, gradients, optimizer states, working set."""
        missing = [p for p in self._params if p.requires_grad and p.grad is None]
        for param in missing:
            param.grad = torch.zeros_like(param)
        around = torch.cuda.memory_allocated(self.device) + working_set(forward, self._weights, noted, self.device)
        for param in missing:
            param.grad = None
        if self.config.optimizer != "device":
            return around
        for optimizer in self._optimizers:
            # States that the first step will make: AdamW's two averages, Muon's one.
            averages = 2 if isinstance(optimizer, torch.optim.AdamW) else 1
            params = [param for group in optimizer.param_groups for param in group["params"]]
            around += averages * sum(param.nbytes for param in params if param not in optimizer.state)
        return around

    def manager(self, plan: Plan, inputs: Sequence[Tensor] = ()) -> Memory:
        """inputs: tensors of the batch, which exist with or without a plan and are not counted."""
        wanted = {rule.placement.where for rule in plan.rules}
        host: Store | None = None
        if "host" in wanted and self.device.type == "cuda":
            host = PinnedStore(self.device, self.config.host_bytes)
        elif "host" in wanted:
            host = MemoryStore(self.config.host_bytes)
        if "nvme" in wanted and self.config.nvme is None:
            raise Error("memory.nvme is not set, and the plan sends tensors there; name a folder")
        nvme = FileStore(Path(self.config.nvme)) if "nvme" in wanted and self.config.nvme is not None else None
        if "peer" in wanted and self._lending is None:
            self._lending = self._lend()
        peer = self._lending.store if "peer" in wanted and self._lending is not None else None
        mesh = self.team.mesh
        collectives = mesh.shards > 1 or mesh.cp is not None or mesh.tp is not None
        return Memory(plan, [*self._weights, *inputs], host, nvme, peer, collectives)

    def close(self) -> None:
        """Give back what other ranks lend."""
        if self._lending is not None:
            self._lending.close()
            self._lending = None

    def _of_ranks(self, plan: Plan) -> Plan:
        if self.team.mesh.stages is None:
            return plan
        self._checked = plan
        return plan.optional()

    def _lend(self) -> Lending:
        mesh = self.team.mesh
        if mesh.stages is None:
            raise Error("the memory plan sends tensors to a peer; needs parallel.pp > 1, whose late stages have room")
        columns = torch.arange(mesh.ranks).view(mesh.sizes[0], -1).T.tolist()
        found = plan(self._run, self._shape, mesh.ranks).loans
        loans = [Loan(ranks[loan.borrower], ranks[loan.lender], loan.bytes) for loan in found for ranks in columns]
        return Lending(loans, self.device, self.team.config.timeout)


def _kept(noted: Profile) -> int:
    return device_bytes(predict(noted, Plan()))


def _of_the_fullest(told: Sequence[tuple[int, Plan]]) -> Plan:
    """The choice of the rank that would keep most, the first of several."""
    return max(told, key=lambda pair: pair[0])[1]


__all__ = ["LINK", "Activations"]
