"""What a training run is: one frozen dataclass, read from a TOML file and changed by `--key value`.

Every key of the file is a field here; a key that is not is an error, so that a spelling mistake cannot train
something else than was asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from perilune.errors import Error
from perilune.train.table import build, one_line, require


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it is cut.

    A path is a file or a folder (searched for all files): .jsonl rows hold "text" or "messages" (chat: loss only on
    what the model wrote), .parquet has a "text" or "messages" column, anything else is read as UTF-8 text.
    """

    train: tuple[str, ...] = ()
    """Files or folders to train on."""
    weights: tuple[float, ...] = ()
    """Share of the training tokens of each path of `train`; empty: equal shares."""
    held_out: tuple[str, ...] = ()
    """Files or folders for evaluation, never trained on."""
    batch_tokens: int = 8192
    """T: tokens of one micro-batch, several documents packed."""
    sequence_tokens: int = 2048
    """Longest piece of one document; longer documents are cut."""
    shuffle_pieces: int = 1024
    """Pieces are shuffled within windows of about this many; 1 keeps the order of the files."""
    held_out_tokens: int = 1_000_000
    """An evaluation stops after the document that reaches this many tokens."""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "sequence_tokens", "shuffle_pieces", "held_out_tokens"):
            require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "must be >= 1")
        if self.weights:
            n = len(self.train)
            require(len(self.weights) == n, "data.weights", self.weights, f"needs one number for each of {n} paths")
            require(all(w > 0 for w in self.weights), "data.weights", self.weights, "every weight must be > 0")


@dataclass(frozen=True)
class OptimConfig:
    """Muon for the matrices the model marks, AdamW for everything else; cosine schedule with linear warm-up."""

    lr: float = 2e-3
    """Peak learning rate of Muon; its updates are scaled to the size of AdamW's, so one scale fits both."""
    adam_lr: float | None = None
    """Peak learning rate of AdamW; None: the same as `lr`."""
    min_lr: float = 0.05
    """Last learning rate as a fraction of the peak."""
    warmup: float = 0.01
    """Fraction of all steps with a linearly growing learning rate."""
    weight_decay: float = 0.1
    """Decoupled, on matrices only; vectors and scalars are not decayed."""
    momentum: float = 0.95
    """Muon's momentum (Nesterov form)."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    ns_dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Number format of the Newton-Schulz iterations."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip: float = 1.0
    """Largest norm of the whole gradient; larger ones are scaled down."""
    qk_clip: float = 100.0
    """MLA heads whose largest logit in a step exceeds this are scaled back to it; 0 turns it off."""

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "eps"):
            require(getattr(self, name) > 0, f"optim.{name}", getattr(self, name), "must be > 0")
        for name in ("lr", "adam_lr", "eps", "weight_decay"):
            value = getattr(self, name)
            require(value is None or math.isfinite(value), f"optim.{name}", value, "must be finite")
        if self.adam_lr is not None:
            require(self.adam_lr > 0, "optim.adam_lr", self.adam_lr, "must be > 0")
        for name in ("min_lr", "warmup"):
            require(0 <= getattr(self, name) <= 1, f"optim.{name}", getattr(self, name), "must be in [0, 1]")
        for name in ("weight_decay", "qk_clip"):
            require(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "must be >= 0")
        require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "must be in [0, 1)")
        require(self.ns_steps >= 1, "optim.ns_steps", self.ns_steps, "must be >= 1")
        require(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas, "both must be in [0, 1)")


@dataclass(frozen=True)
class BalanceConfig:
    """Quantile Balancing of the experts."""

    enabled: bool = True
    """False leaves the router bias as it is, as in inference."""
    ema: float = 0.0
    """Share of the old bias that is kept at each step; 0 takes the new one whole."""
    bins: int = 1000
    """Histogram bins for the quantile; 0 keeps all scores of a step and takes it exactly."""

    def __post_init__(self) -> None:
        require(0 <= self.ema < 1, "balance.ema", self.ema, "must be in [0, 1)")
        require(self.bins >= 0, "balance.bins", self.bins, "must be >= 0")


@dataclass(frozen=True)
class QatConfig:
    """Training in the numbers that are served: routed experts' weights MXFP4, what they multiply MXFP8."""

    enabled: bool = False
    """False trains, and exports, experts in the run's dtype, also from a quantised checkpoint."""
    scale_rule: Literal["even", "floor", "rceil", "ceil"] = "even"
    """How the scale of 32 values is chosen; must be that of a quantised `init_from`."""
    activations: Literal["none", "inputs", "all"] = "inputs"
    """Which activations are MXFP8: none, the experts' inputs, or those between their two products as well."""


@dataclass(frozen=True)
class ParallelConfig:
    """Several processes on one run (torchrun); one process needs none of it.

    `accumulate` micro-batches make a step on any number of processes; it must be a multiple of those with tokens of
    their own (all processes / (pp x cp x tp)).
    """

    pp: int = 1
    """Stages that the layers are dealt out to."""
    schedule: Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = "1F1B"
    """In which order stages work on micro-batches; names of torch.distributed.pipelining."""
    virtual: int = 1
    """Stages of one process; more than 1 with the interleaved schedules, 2 with ZBV."""
    shard: int = 0
    """Processes over which `zero` cuts parameters; 0: all with tokens of their own. What is left are replicas."""
    zero: Literal[0, 1, 2, 3] = 0
    """0: every process holds all parameters. 1: optimizer states are cut, 2: gradients as well, 3: weights as well."""
    cp: int = 1
    """Processes that one stream of tokens is cut over."""
    order: Literal["contiguous", "zigzag"] = "zigzag"
    """How cp cuts a stream; zigzag gives every process tokens with short and with long pasts."""
    tp: int = 1
    """Processes that the matrices of attention, dense MLP, embedding and head are cut over."""
    ep: int = 0
    """Processes that one set of experts is spread over; 0: all of a stage. What is left of them holds replicas."""
    policy: Literal["exact", "tolerant", "off"] = "tolerant"
    """How experts' load is evened out: to the row, above a limit only, or not at all."""
    eps: float = 0.02
    """tolerant: rows above (1 + eps) times the mean of the ranks move."""
    min_rows: int = 1024
    """tolerant: no expert is copied for fewer rows; on Hopper GPUs a copy pays from 1000 to 2000 on."""
    transport: Literal["collective", "symmetric"] = "collective"
    """How rows get to other ranks: torch.distributed's collectives, or GPUs writing each other's memory."""
    timeout: float = 600.0
    """Seconds after which a rank that waits for another ends with an error."""

    def __post_init__(self) -> None:
        for name in ("pp", "virtual", "cp", "tp"):
            require(getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "must be >= 1")
        for name in ("shard", "ep"):
            require(getattr(self, name) >= 0, f"parallel.{name}", getattr(self, name), "must be >= 0")
        require(0 <= self.eps < 1e6, "parallel.eps", self.eps, "must be >= 0")
        require(self.min_rows >= 0, "parallel.min_rows", self.min_rows, "must be >= 0")
        require(0 < self.timeout < 1e7, "parallel.timeout", self.timeout, "must be > 0 and < 1e7 seconds")


@dataclass(frozen=True)
class MemoryConfig:
    """What is kept between the forward and the backward pass, and where (docs/memory.md)."""

    plan: str = "none"
    """none, full-recompute, k3, fit, or the path of a TOML file with a table [plan]."""
    budget: int = 0
    """fit: most bytes on the device: of everything on one GPU that has its gradients, else of saved activations."""
    host_bytes: int = 0
    """Most host memory for activations; 0: no limit."""
    nvme: str | None = None
    """Folder for what a plan, or `optimizer`, sends to nvme."""
    gradients: Literal["device", "host"] = "device"
    """host: added up in host memory over the micro-batches of a step; not with parallel.zero 1, which adds once."""
    optimizer: Literal["device", "host", "nvme"] = "device"
    """Where the optimizers' states lie between steps; they pass through the device in chunks."""

    def __post_init__(self) -> None:
        require(self.host_bytes >= 0, "memory.host_bytes", self.host_bytes, "must be >= 0")
        require(
            (self.budget > 0) == (self.plan == "fit"), "memory.budget", self.budget, "must be > 0 with plan fit only"
        )
        placed = self.optimizer != "nvme" or self.nvme is not None
        require(placed, "memory.optimizer", self.optimizer, "needs a folder in memory.nvme")


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    out: str = "runs/train"
    """Folder of everything the run writes. A run whose folder holds a checkpoint continues from it."""
    model: str = "nano"
    """A preset (nano, mini, ...) or a folder with a config.json: the shape of a new model."""
    init_from: str | None = None
    """Folder of a saved model whose weights (and shape) the run starts from."""
    tokenizer: str | None = None
    """A tokenizer file or a folder that has one; None: the folder of `init_from`."""
    steps: int = 1000
    """Optimizer steps of the whole run."""
    accumulate: int = 1
    """Micro-batches whose gradients are added up for one step."""
    eval_every: int = 100
    """Steps between evaluations on the held-out data; 0: only at the end."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    seed: int = 0
    """Of the weights and of the order of the data."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes the GPU if there is one."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Number format of the weights and activations."""
    loss_chunk: int = 4096 * 2048
    """Most logits (tokens x vocabulary) that exist at a time."""
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    qat: QatConfig = field(default_factory=QatConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "keep", "loss_chunk"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be >= 1")
        require(-(2**63) <= self.seed < 2**64, "seed", self.seed, "must fit in 64 bits")
        for name in ("eval_every", "checkpoint_every"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be >= 0")
        summed = self.memory.gradients == "device" or self.parallel.zero != 1
        require(summed, "memory.gradients", self.memory.gradients, "must be 'device' with parallel.zero 1")
        schedule = self.parallel.schedule
        fits = self.memory.plan == "none" or "ZeroBubble" not in schedule
        allowed = f"must be 'none' with parallel.schedule {schedule!r}, which splits backward passes"
        require(fits, "memory.plan", self.memory.plan, allowed)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as they stand in the run's config.json."""
        return dataclasses.asdict(self)


def from_dict(values: dict[str, Any]) -> TrainConfig:
    """The run described by nested `values` (a parsed TOML file). Raises Error for an unknown key or a wrong type."""
    built: TrainConfig = build(TrainConfig, values, "")
    return built


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The run described by a TOML file, changed by command-line words such as ["--optim.lr", "1e-3"].

    path None starts from the defaults. "--help" among the overrides prints all fields and raises SystemExit(0).
    Raises Error for a missing or malformed file, an unknown key, a value of a wrong type or out of range.
    """
    config = TrainConfig() if path is None else from_dict(_read_toml(Path(path)))
    if not overrides:
        return config
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(TrainConfig, prog="perilune train CONFIG", args=list(overrides), default=config)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise Error(one_line(message.getvalue())) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Error(f"config file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as cause:
        raise Error(f"config file {path} cannot be read: {cause}") from cause


__all__ = [
    "BalanceConfig",
    "DataConfig",
    "MemoryConfig",
    "OptimConfig",
    "ParallelConfig",
    "TrainConfig",
    "from_dict",
    "load_config",
]
