"""The training loop: steps, evaluations, checkpoints, and what the run reports.

Files of a run, below `out`: .lock, config.json, metrics.jsonl, tensorboard/, steps/ (checkpoints to continue from), and
at the end checkpoint/ (the model in the released layout, with its tokenizer), report.html, loss.png, expert-load.png.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from torch import Tensor

from perilune.chat import Tokenizer
from perilune.errors import Error
from perilune.memory.gradients import HostGradients
from perilune.memory.optimizer import States
from perilune.model import Stats, quantized_parameters, save
from perilune.parallel.collectives import local
from perilune.train.activations import Activations
from perilune.train.balance import Balancer, imbalance
from perilune.train.checkpoint import (
    empty_states,
    list_checkpoints,
    open_checkpoint,
    pack_optimizers,
    parameter_of,
    read_checkpoint,
    save_checkpoint,
    unpack_optimizers,
)
from perilune.train.config import TrainConfig
from perilune.train.data import Batch, Batches, held_out_batches
from perilune.train.evaluate import Evaluation, evaluate
from perilune.train.files import find_files
from perilune.train.flops import count_flops, device_peak
from perilune.train.folder import claim
from perilune.train.log import Bar, Board, MetricsFile
from perilune.train.malloc import keep_freed_memory
from perilune.train.masters import Masters
from perilune.train.optim import build_optimizers, clip_gradients, set_learning_rates, step_optimizers
from perilune.train.qk_clip import clip_heads, peaks
from perilune.train.report import require_plots, write_report
from perilune.train.setup import device_of, outline_model, tokenizer_path
from perilune.train.show import show_evaluation, show_step
from perilune.train.team import Team
from perilune.train.write import lock_folder, naming

# Rows of metrics.jsonl that carry the load of every expert.
_LOAD_ROWS = 100


@dataclass(frozen=True)
class Result:
    """What a finished run left: its model in the released layout, and its last evaluation (None without held-out)."""

    out: Path
    checkpoint: Path
    evaluation: Evaluation | None


def train(config: TrainConfig) -> Result:
    """Run (or continue) a training run to its end.

    Raises Error, before any work, for anything missing or contradictory in `config` and for a folder that holds a run
    of another config or one in which another run is at work; later for unreadable data, a loss that is not finite, and
    a disk that is full.
    """
    return Trainer(config).run()


class Trainer:
    """One run. All state lives here: model, optimizers, position in the data, step.

    Under torchrun each process has one; all make the same calls (`perilune.train.team`), the first writes the files.
    The folder is locked against other runs until `run` ends, `close` is called, or the process dies.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.out, self.step = config, Path(config.out), 0
        require_plots()
        for path in config.data.held_out:
            find_files(path)
        self.device = device_of(config.device)
        self.team = Team(config.parallel, self.device)
        self.team.share(range(config.accumulate))
        if self.team.mesh.ranks > 1 and config.balance.enabled and config.balance.bins == 0:
            raise Error("balance.bins is 0; a run of several processes needs bins > 0")
        if self.device.type == "cpu":
            keep_freed_memory()
        self.tokenizer = Tokenizer.load(tokenizer_path(config))
        self.data = Batches(config.data, self.tokenizer, config.seed)
        if config.data.held_out and next(held_out_batches(config.data, self.tokenizer), None) is None:
            raise Error(f"data.held_out is {config.data.held_out!r}; it holds no text to evaluate on")
        torch.manual_seed(config.seed)
        self.model, values = outline_model(config, self.tokenizer)
        if self.tokenizer.vocab_size > self.model.config.vocab_size:
            size = self.model.config.vocab_size
            raise Error(f"tokenizer has {self.tokenizer.vocab_size} ids; the model's vocab_size is {size}")
        self.model = self.team.spread(self.model, config.data.batch_tokens, values=values)
        rule = self.model.config.quant.scale_rule if self.model.config.quant else "even"
        self.masters = Masters(self.model, quantized_parameters(self.model.config), rule)
        heads, spread = self.team.matrices(self.model, self.masters.params)
        self.states = _states(config, self.device)
        self.optimizers = build_optimizers(self.masters.params, heads, config.optim, spread, self.states)
        on_host = config.memory.gradients == "host"
        self.gradients = HostGradients(self.masters.weights, local) if on_host else None
        self.activations = Activations(config, self.model, self.device, self.team, self.optimizers.values())
        self.balancer = Balancer(self.model, config.balance)
        self.flops = count_flops(self.model.config)
        self.lock: IO[bytes] | None = None
        problem = None
        try:
            self.lock = claim(config) if self.team.leads else None
        except Error as error:
            problem = error
        try:
            self.team.agree(problem)
            self._resume()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other runs have the folder, and other ranks their memory."""
        self.activations.close()
        if self.gradients is not None:
            self.gradients.close()
            self.gradients = None
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    # -- one step ------------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, Any]:
        """One optimizer step; returns its row of metrics.jsonl. Raises Error after a finished run of several ranks."""
        self.team.must_be_cut("train_step")
        begin = time.perf_counter()
        config = self.config
        everyones = [next(self.data) for _ in range(config.accumulate)]
        counted = int(sum(batch.mask_T.sum() for batch in everyones))
        batches = [batch.to(self.device) for batch in self.team.share(everyones)]
        logits: dict[int, Tensor] = {}

        def observe(stats: Stats) -> None:
            self.balancer.add(stats.routing)
            for layer, max_logit_H in stats.max_logit.items():
                seen_H = self.team.all_heads(max_logit_H.detach())
                logits[layer] = torch.maximum(logits[layer], seen_H) if layer in logits else seen_H

        self.model.train()
        with self.activations.step(lambda: self._rehearse(batches[0])):
            total = self.team.passes(self.model, batches, counted, config.loss_chunk, observe)
        self.masters.take_gradients()
        params = self.masters.params
        for name, grad in self.gradients.take().items() if self.gradients is not None else ():
            params[name].grad = grad.to(params[name].dtype)
        self.team.add_gradients(params)
        self.team.add([total])
        self.team.add_in_stage(self.balancer.sums())
        self.team.largest_in_stage(logits.values())
        norm = clip_gradients(params.values(), config.optim.clip, self.team.copies(params), self.team.add_squares)
        mean = total.item() / max(1, counted)
        tops = peaks(logits)
        if not (math.isfinite(mean) and bool(norm.isfinite())):
            raise Error(f"step {self.step + 1}: loss is {mean}, gradient norm {norm.item()}; lower optim.lr or clip")
        lr = set_learning_rates(self.optimizers, config.optim, self.step, config.steps)
        step_optimizers(self.optimizers, self.states)
        clipped = clip_heads(
            logits, tops, config.optim.qk_clip, self.model.config.mla, self.masters.params, self.team.scale_rows
        )
        self.masters.write_back()
        load = self.balancer.update()
        highest = max(tops.values(), default=0.0)
        seen = self.team.of_stages((load, highest, clipped))
        load = {layer: load_E for loads, _, _ in seen for layer, load_E in loads.items()}
        highest, clipped = max(value for _, value, _ in seen), sum(heads for _, _, heads in seen)
        self.step += 1
        tokens = sum(batch.sequences.total for batch in everyones)
        row: dict[str, Any] = {
            "step": self.step,
            "tokens": tokens,
            "counted": counted,
            "loss": mean,
            "lr": lr,
            "grad_norm": norm.item(),
            "flops": sum(self.flops.train(batch.sequences) for batch in everyones),
            "imbalance": {str(layer): imbalance(load_E) for layer, load_E in load.items()},
            "max_logit": highest,
            "clipped_heads": clipped,
            "seconds": time.perf_counter() - begin,
        }
        experts = self.team.expert_stats()
        if experts is not None:
            row["experts"] = dict(experts)
        hops = self.team.hop_bytes()
        if hops is not None:
            row["hop_bytes"] = hops
        if self.step % max(1, config.steps // _LOAD_ROWS) == 0:
            row["load"] = {str(layer): load_E.tolist() for layer, load_E in load.items()}
        return row

    def _rehearse(self, batch: Batch) -> Tensor:
        """The forward pass of a micro-batch as in a step, of which nothing is counted."""
        loss, _ = self.team.whole_loss(self.model, batch, self.config.loss_chunk, gradients=True)
        self.team.end_evaluation(self.model)
        self.team.expert_stats()
        return loss

    def evaluate(self) -> Evaluation | None:
        """Loss on the held-out data; None if the run has none."""
        if not self.config.data.held_out:
            return None
        self.model.eval()
        batches = held_out_batches(self.config.data, self.tokenizer)
        found = evaluate(self.model, batches, self.config.loss_chunk, self.team.whole_loss)
        self.team.end_evaluation(self.model)
        self.team.expert_stats()
        return found

    # -- the whole run -------------------------------------------------------------------------------------------

    def run(self, on_step: Callable[[dict[str, Any]], None] | None = None, console: Console | None = None) -> Result:
        """All steps that are left, then the export and the report.

        on_step is called with the row of each step; console shows progress (None: standard error).
        """
        if self.lock is None and self.team.leads:
            self.lock = lock_folder(self.out)
        try:
            return self._run(on_step, console)
        finally:
            self.close()

    def _run(self, on_step: Callable[[dict[str, Any]], None] | None, console: Console | None) -> Result:
        config = self.config
        if not self.team.leads:
            return self._follow(on_step)
        metrics = MetricsFile(self.out / "metrics.jsonl", self.step)
        board = Board(self.out / "tensorboard", self.step + 1)
        peak = device_peak(self.device, getattr(torch, config.dtype))
        evaluation = None
        with Bar(config.steps, self.step, console) as bar:
            while self.step < config.steps:
                row = self.train_step()
                metrics.write(row)
                show_step(row, board, bar, peak)
                if self._due(config.eval_every):
                    evaluation = self._evaluate(metrics, board, bar)
                if self._due(config.checkpoint_every):
                    self.save()
                if on_step is not None:
                    on_step(row)
        metrics.close()
        board.close()
        evaluation = evaluation or self.evaluate()
        checkpoint = self.out / "checkpoint"
        self.model = self.team.whole(self.model, self.masters.weights)
        save(self.model, checkpoint)
        with naming(checkpoint):
            self.tokenizer.save(checkpoint)
        write_report(self.out)
        return Result(self.out, checkpoint, evaluation)

    def _follow(self, on_step: Callable[[dict[str, Any]], None] | None) -> Result:
        """`_run` of a rank that writes nothing: the same steps, evaluations and checkpoints in the same order."""
        evaluation = None
        while self.step < self.config.steps:
            row = self.train_step()
            if self._due(self.config.eval_every):
                evaluation = self.evaluate()
            if self._due(self.config.checkpoint_every):
                self.save()
            if on_step is not None:
                on_step(row)
        evaluation = evaluation or self.evaluate()
        self.model = self.team.whole(self.model, self.masters.weights)
        return Result(self.out, self.out / "checkpoint", evaluation)

    def _due(self, every: int) -> bool:
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def _evaluate(self, metrics: MetricsFile, board: Board, bar: Bar) -> Evaluation | None:
        found = self.evaluate()
        if found is None:
            return None
        row = {"loss": found.loss, "nats": found.nats, "tokens": found.tokens, "bytes": found.bytes}
        metrics.write({"step": self.step, "eval": row})
        show_evaluation(found, self.step, board, bar)
        return found

    # -- state ---------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint of everything the next step depends on, in one layout for any number of ranks."""
        self.team.must_be_cut("save")
        tensors = {f"model/{name}": self.team.part(name, value) for name, value in self.masters.params.items()}
        tensors |= {f"model/{name}": value for name, value in self.model.named_buffers()}
        names = {param: name for name, param in self.masters.params.items()}
        for name, value in pack_optimizers(self.optimizers, names).items():
            tensors[name] = self.team.part(parameter_of(name), value)
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        meta = {"step": self.step, "data": self.data.state_dict()}
        return save_checkpoint(self.out / "steps", self.step, tensors, meta, self.config.keep)

    def _resume(self) -> None:
        """Go to the newest checkpoint of the run's folder, if it has one."""
        checkpoints = list_checkpoints(self.out / "steps")
        if checkpoints:
            self.load(checkpoints[-1])

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of this run, written by any number of ranks in any layout."""
        meta, stored = open_checkpoint(path)
        try:
            step, data = int(meta["step"]), dict(meta["data"])
            self.data.load_state_dict(data)
        except Error:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as cause:
            raise Error(f"checkpoint {path / 'meta.json'} is malformed: {type(cause).__name__}: {cause}") from cause
        params, buffers = self.masters.params, dict(self.model.named_buffers())
        wanted = {f"model/{name}": self.team.part(name, value) for name, value in params.items()}
        wanted |= {f"model/{name}": value for name, value in buffers.items()}
        outside = None if self.states is None else torch.device("cpu")
        states = empty_states(stored, params, self.team.shapes or params, outside)
        wanted |= {name: self.team.part(parameter_of(name), value) for name, value in states.items()}
        rng = {name: torch.empty(*stored[name][:1], dtype=torch.uint8) for name in stored if name.startswith("rng/")}
        read_checkpoint(path, wanted | rng)
        self.masters.write_back()
        unpack_optimizers(states, self.optimizers, params)
        if self.states is not None:
            for optimizer in self.optimizers.values():
                self.states.settle(optimizer)
        torch.set_rng_state(rng["rng/cpu"])
        if self.device.type == "cuda" and "rng/cuda" in rng:
            torch.cuda.set_rng_state(rng["rng/cuda"], self.device)
        self.step = step


def _states(config: TrainConfig, device: torch.device) -> States | None:
    where = config.memory
    if where.optimizer == "device":
        return None
    return States(device, Path(where.nvme) if where.optimizer == "nvme" and where.nvme is not None else None)


__all__ = ["Result", "Trainer", "train"]
