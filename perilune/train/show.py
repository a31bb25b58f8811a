"""A step or an evaluation as it is shown: curves of tensorboard, and the progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perilune.train.evaluate import Evaluation
from perilune.train.log import Bar, Board


def show_step(row: Mapping[str, Any], board: Board, bar: Bar, peak: float | None) -> None:
    """A row of metrics.jsonl. peak: operations a second of the device, where they are known."""
    speed, rate = row["tokens"] / row["seconds"], row["flops"] / row["seconds"]
    uneven = max(row["imbalance"].values(), default=1.0)
    values = {"train/loss": row["loss"], "train/lr": row["lr"], "train/grad_norm": row["grad_norm"]}
    values |= {"speed/tokens_per_second": speed, "speed/flops_per_second": rate}
    values |= {f"imbalance/layer_{layer}": value for layer, value in row["imbalance"].items()}
    values["train/max_attention_logit"] = row["max_logit"]
    notes = [f"loss {row['loss']:.3f}", f"{speed:,.0f} tok/s"]
    if peak is not None:
        values["speed/mfu"] = rate / peak
        notes.append(f"MFU {rate / peak:.1%}")
    else:
        notes.append(f"{rate / 1e9:,.1f} GFLOP/s")
    notes.append(f"fullest expert {uneven:.2f}x")
    if "experts" in row:
        told = row["experts"]
        values |= {f"experts/{name}": value for name, value in told.items()}
        notes.append(f"ranks {told['before']:.2f}x -> {told['after']:.2f}x, {told['copies']} copies")
    board.add(values, row["step"])
    bar.step(row["step"], notes)


def show_evaluation(found: Evaluation, step: int, board: Board, bar: Bar) -> None:
    """An evaluation after `step` steps."""
    values = {"held_out/loss": found.loss}
    text = f"step {step}: held-out loss {found.loss:.4f}"
    if found.bits_per_byte is not None:
        values["held_out/bits_per_byte"] = found.bits_per_byte
        text += f", {found.bits_per_byte:.4f} bits a byte"
    board.add(values, step)
    bar.say(text)


__all__ = ["show_evaluation", "show_step"]
