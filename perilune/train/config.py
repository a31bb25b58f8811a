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
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from perilune.errors import Error


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise Error(f"{name} is {value!r}; {allowed}")


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
            _require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "must be >= 1")
        if self.weights:
            n = len(self.train)
            _require(len(self.weights) == n, "data.weights", self.weights, f"needs one number for each of {n} paths")
            _require(all(w > 0 for w in self.weights), "data.weights", self.weights, "every weight must be > 0")


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
            _require(getattr(self, name) > 0, f"optim.{name}", getattr(self, name), "must be > 0")
        for name in ("lr", "adam_lr", "eps", "weight_decay"):
            value = getattr(self, name)
            _require(value is None or math.isfinite(value), f"optim.{name}", value, "must be finite")
        if self.adam_lr is not None:
            _require(self.adam_lr > 0, "optim.adam_lr", self.adam_lr, "must be > 0")
        for name in ("min_lr", "warmup"):
            _require(0 <= getattr(self, name) <= 1, f"optim.{name}", getattr(self, name), "must be in [0, 1]")
        for name in ("weight_decay", "qk_clip"):
            _require(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "must be >= 0")
        _require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "must be in [0, 1)")
        _require(self.ns_steps >= 1, "optim.ns_steps", self.ns_steps, "must be >= 1")
        _require(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas, "both must be in [0, 1)")


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
        _require(0 <= self.ema < 1, "balance.ema", self.ema, "must be in [0, 1)")
        _require(self.bins >= 0, "balance.bins", self.bins, "must be >= 0")


@dataclass(frozen=True)
class ParallelConfig:
    """Several processes on one run (torchrun); one process needs none of it.

    `accumulate` micro-batches make a step on any number of processes, so it must be a multiple of that number.
    """

    ep: int = 0
    """Processes that one set of experts is spread over; 0: all of them. What is left of them holds replicas."""
    policy: Literal["exact", "tolerant", "off"] = "tolerant"
    """How experts' load is evened out: to the row, above a limit only, or not at all."""
    eps: float = 0.02
    """tolerant: rows above (1 + eps) times the mean of the ranks move."""
    min_rows: int = 0
    """tolerant: no expert is copied for fewer rows; on GPUs a copy pays from 1000 to 2000 on."""
    transport: Literal["collective", "symmetric"] = "collective"
    """How rows get to other ranks: torch.distributed's collectives, or GPUs writing each other's memory."""
    timeout: float = 600.0
    """Seconds after which a rank that waits for another ends with an error."""

    def __post_init__(self) -> None:
        _require(self.ep >= 0, "parallel.ep", self.ep, "must be >= 0")
        _require(0 <= self.eps < 1e6, "parallel.eps", self.eps, "must be >= 0")
        _require(self.min_rows >= 0, "parallel.min_rows", self.min_rows, "must be >= 0")
        _require(0 < self.timeout < 1e7, "parallel.timeout", self.timeout, "must be > 0 and < 1e7 seconds")


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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "keep", "loss_chunk"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be >= 1")
        _require(-(2**63) <= self.seed < 2**64, "seed", self.seed, "must fit in 64 bits")
        for name in ("eval_every", "checkpoint_every"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must be >= 0")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as they stand in the run's config.json."""
        return dataclasses.asdict(self)


def from_dict(values: dict[str, Any]) -> TrainConfig:
    """The run described by nested `values` (a parsed TOML file). Raises Error for an unknown key or a wrong type."""
    built: TrainConfig = _build(TrainConfig, values, "")
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
        raise Error(_one_line(message.getvalue())) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Error(f"config file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as cause:
        raise Error(f"config file {path} cannot be read: {cause}") from cause


def _build(cls: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise Error(f"config: {where.rstrip('.')} is {values!r}; must be a table of keys")
    kinds = typing.get_type_hints(cls)
    unknown = [key for key in values if key not in kinds]
    if unknown:
        raise Error(f"config: unknown key {where}{unknown[0]}; allowed: {', '.join(sorted(kinds))}")
    return cls(**{key: _convert(kinds[key], value, where + key) for key, value in values.items()})


def _convert(kind: Any, value: Any, name: str) -> Any:
    """`value` as the annotated type `kind`; integers are taken for floats, lists for tuples."""
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, name + ".")
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _convert(next(a for a in args if a is not type(None)), value, name)
    if origin is Literal:
        _require(value in args, f"config: {name}", value, f"allowed: {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        variable = args[-1] is Ellipsis
        ok = isinstance(value, list | tuple) and (variable or len(value) == len(args))
        _require(ok, f"config: {name}", value, "must be a list" + ("" if variable else f" of {len(args)}"))
        return tuple(_convert(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _require(type(value) is kind, f"config: {name}", value, f"must be of type {kind.__name__}")
    return value


def _one_line(message: str) -> str:
    """tyro's boxed message as one line, without its frame and its help text."""
    lines = [line.strip(" │╭╮╰╯─|-") for line in message.splitlines()]
    kept: list[str] = []
    for line in lines[1:]:
        if line.startswith(("For full helptext", "Argument helptext", "Perhaps you meant")):
            break
        if line:
            kept.append(line)
    return "config: " + " ".join(kept)


__all__ = ["BalanceConfig", "DataConfig", "OptimConfig", "ParallelConfig", "TrainConfig", "from_dict", "load_config"]
