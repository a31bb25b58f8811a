"""Whole runs of a tiny model: it learns, it continues to the last bit, and its mistakes are one line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.errors import Error
from perilune.model import load
from perilune.ops.sequences import Sequences
from perilune.train import TrainConfig, Trainer, train
from perilune.train.checkpoint import list_checkpoints
from perilune.train.config import DataConfig
from perilune.train.log import read_metrics


def numbers(out: Path | str) -> list[dict[str, Any]]:
    """The rows of a run without what depends on the clock."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(Path(out) / "metrics.jsonl")]


def change(config: TrainConfig, **values: Any) -> TrainConfig:
    return dataclasses.replace(config, **values)


def test_a_run_learns_and_leaves_everything(tiny_run: TrainConfig) -> None:
    result = train(change(tiny_run, steps=30))
    rows = [row for row in numbers(result.out) if "eval" not in row]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[0]["loss"] == pytest.approx(math.log(320), abs=0.1)  # an untrained model knows nothing
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.5
    assert result.evaluation is not None
    assert result.evaluation.bits_per_byte is not None
    assert result.evaluation.bits_per_byte < 3
    for name in (
        "config.json",
        "metrics.jsonl",
        "report.html",
        "loss.png",
        "expert-load.png",
        "checkpoint/config.json",
    ):
        assert (result.out / name).stat().st_size > 0
    assert list((result.out / "tensorboard").iterdir())
    assert [p.name for p in list_checkpoints(result.out / "steps")] == ["step-00000028", "step-00000030"]
    assert result.evaluation.bytes == sum(
        f.stat().st_size for path in tiny_run.data.held_out for f in Path(path).iterdir()
    )


def test_export_loads_with_equal_logits(tiny_run: TrainConfig) -> None:
    trainer = Trainer(change(tiny_run, steps=2))
    result = trainer.run()
    tokens, sequences = torch.arange(50), Sequences.from_lengths([20, 30])
    with torch.no_grad():
        assert torch.equal(load(result.checkpoint)(tokens, sequences), trainer.model(tokens, sequences))


def test_continues_to_the_last_bit(tiny_run: TrainConfig) -> None:
    whole = train(tiny_run)
    cut = Trainer(change(tiny_run, out=tiny_run.out + "-cut"))

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 6:  # two steps past the checkpoint at 4: they are done again
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut.run(stop)
    torch.rand(3)  # the state of the caller's generator must not matter
    rest = train(cut.config)
    assert numbers(rest.out) == numbers(whole.out)
    ours, theirs = load(rest.checkpoint).state_dict(), load(whole.checkpoint).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


_RUN = """
import json, sys
import torch
torch.set_num_threads(1)
from perilune.train import from_dict, train
train(from_dict(json.loads(sys.argv[1])))
"""


def test_kill_9_and_resume_gives_the_same_losses(tiny_run: TrainConfig) -> None:
    def start(out: str) -> subprocess.Popen[bytes]:
        config = change(tiny_run, out=out, steps=16).to_dict()
        words = [sys.executable, "-c", _RUN, json.dumps(config)]
        return subprocess.Popen(words, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})

    whole, killed = tiny_run.out + "-whole", tiny_run.out + "-killed"
    straight = start(whole)
    victim = start(killed)
    metrics = Path(killed) / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while sum("eval" not in row for row in read_metrics(metrics)) < 6:
        assert victim.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    steps = [row["step"] for row in numbers(killed)]
    assert steps[-1] < 16
    assert list_checkpoints(Path(killed) / "steps")
    assert start(killed).wait(90) == 0
    assert straight.wait(90) == 0
    assert numbers(killed) == numbers(whole)


def test_accumulation_is_one_larger_batch(tiny_run: TrainConfig) -> None:
    # float64; the same documents in one batch of 320 tokens or in two of 160 when no piece is cut by a batch's end.
    data = dataclasses.replace(tiny_run.data, batch_tokens=160, sequence_tokens=80, shuffle_pieces=1)
    two = Trainer(change(tiny_run, data=data, dtype="float64", balance=dataclasses.replace(tiny_run.balance, bins=0)))
    big = dataclasses.replace(data, batch_tokens=320)
    one = Trainer(change(two.config, data=big, accumulate=1, out=tiny_run.out + "-one"))
    for _ in range(3):
        a, b = two.train_step(), one.train_step()
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-11)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-9)
        assert a["imbalance"] == b["imbalance"]


def test_init_from_starts_where_the_other_ended(tiny_run: TrainConfig) -> None:
    first = train(change(tiny_run, steps=8))
    again = change(tiny_run, out=tiny_run.out + "-sft", init_from=str(first.checkpoint), tokenizer=None)
    trainer = Trainer(again)
    found = trainer.evaluate()
    assert found is not None
    assert first.evaluation is not None
    assert found.nats == first.evaluation.nats
    assert trainer.step == 0


def test_bfloat16_keeps_float32_masters(tiny_run: TrainConfig) -> None:
    trainer = Trainer(change(tiny_run, dtype="bfloat16", steps=30))
    first = trainer.train_step()["loss"]
    assert trainer.model.lm_head.weight.dtype == torch.bfloat16
    assert trainer.model.layers[0].attn.A_log_H.dtype == torch.float32
    assert trainer.masters.params["lm_head.weight"].dtype == torch.float32
    for _ in range(20):
        last = trainer.train_step()["loss"]
    assert last < first - 1
    path = trainer.save()
    trainer.close()
    twin = Trainer(trainer.config)
    assert twin.step == trainer.step
    assert path in list_checkpoints(trainer.out / "steps")
    assert torch.equal(twin.masters.params["lm_head.weight"], trainer.masters.params["lm_head.weight"])
    assert twin.train_step()["loss"] == trainer.train_step()["loss"]


def test_qk_clip_runs_and_is_counted(tiny_run: TrainConfig) -> None:
    trainer = Trainer(change(tiny_run, optim=dataclasses.replace(tiny_run.optim, qk_clip=1e-6)))
    row = trainer.train_step()
    assert row["max_logit"] > 1e-6
    assert row["clipped_heads"] >= 1


def test_balancing_evens_the_load(tiny_run: TrainConfig) -> None:
    on = Trainer(change(tiny_run, steps=40, out=tiny_run.out + "-on"))
    off = Trainer(
        change(
            tiny_run, steps=40, out=tiny_run.out + "-off", balance=dataclasses.replace(tiny_run.balance, enabled=False)
        )
    )
    last: dict[str, float] = {}
    for name, trainer in (("on", on), ("off", off)):
        rows = [trainer.train_step() for _ in range(25)]
        last[name] = sum(sum(row["imbalance"].values()) / len(row["imbalance"]) for row in rows[-10:]) / 10
    assert last["on"] < last["off"]
    assert not any(layer.ffn.router.bias_E.any() for layer in list(off.model.layers)[1:])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"tokenizer": None}, "tokenizer is not set"),
        ({"model": "kimi-9"}, "kimi-9"),
        ({"init_from": "nowhere"}, "nowhere"),
        ({"data": DataConfig(train=("nowhere",))}, "nowhere does not exist"),
        ({"data": DataConfig(held_out=("nowhere",))}, "nowhere does not exist"),
    ],
)
def test_bad_settings(tiny_run: TrainConfig, values: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message) as caught:
        train(change(tiny_run, **values))
    assert "\n" not in str(caught.value)
    assert not Path(tiny_run.out).exists()


def test_another_run_in_the_same_folder_is_refused(tiny_run: TrainConfig) -> None:
    train(change(tiny_run, steps=4))
    with pytest.raises(Error, match="holds a run whose seed is 0, not 7"):
        train(change(tiny_run, steps=4, seed=7))
    assert train(change(tiny_run, steps=4, keep=1)).out.exists()  # finished: nothing left to do but the report


def test_a_loss_that_is_not_finite_stops_the_run(tiny_run: TrainConfig) -> None:
    trainer = Trainer(tiny_run)
    with torch.no_grad():
        trainer.model.embed.weight[:] = math.nan
    with pytest.raises(Error, match="step 1: loss is nan"):
        trainer.run()
    assert list_checkpoints(trainer.out / "steps") == []


def test_config_json_is_rewritten_whole_and_only_when_it_changed(tiny_run: TrainConfig) -> None:
    out = train(change(tiny_run, steps=2)).out
    path = out / "config.json"
    before = path.stat()
    (out / "config.json.writing").write_text("left by a kill")
    train(change(tiny_run, steps=2))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    train(change(tiny_run, steps=2, keep=1))
    assert json.loads(path.read_text())["keep"] == 1
    assert not list(out.glob("*.writing"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"steps": 2, "se', "config.json, of the run to continue, is not JSON"),
        ("config.json", "[1]", "config.json, of the run to continue, holds a list"),
        ("config.json", None, "config.json, of the run to continue, cannot be read"),
        ("steps/step-00000002/meta.json", '{"step": 2', "step-00000002 cannot be read"),
        ("steps/step-00000002/meta.json", "{}", "meta.json is malformed: KeyError"),
        ("steps/step-00000002/meta.json", '{"step": "x", "data": {}}', "meta.json is malformed: ValueError"),
        ("steps/step-00000002/meta.json", '{"step": 2, "data": {"sources": [1]}}', "meta.json is malformed"),
        ("metrics.jsonl", '{"step": 1\n{"step": 2}\n', "metrics.jsonl line 1 is not JSON"),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl line 1 is .* must be an object with"),
    ],
)
def test_a_damaged_run_is_one_line(tiny_run: TrainConfig, name: str, text: str | None, message: str) -> None:
    path = train(change(tiny_run, steps=2)).out / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(Error, match=message) as caught:
        train(change(tiny_run, steps=2))
    assert "\n" not in str(caught.value)
    assert path.exists() == (text is not None)
    if text is not None:
        assert path.read_text() == text


def test_held_out_files_without_text_are_refused_before_work(tiny_run: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("")
    data = dataclasses.replace(tiny_run.data, held_out=(str(tmp_path / "blank.txt"),))
    with pytest.raises(Error, match="holds no text to evaluate on"):
        Trainer(change(tiny_run, data=data))
    assert not Path(tiny_run.out).exists()


def test_two_runs_in_one_folder_are_refused(tiny_run: TrainConfig) -> None:
    first = Trainer(tiny_run)
    with pytest.raises(Error, match="where another run is at work") as caught:
        Trainer(tiny_run)
    assert tiny_run.out in str(caught.value)
    first.close()
    second = Trainer(tiny_run)
    with pytest.raises(Error, match="where another run is at work"):
        first.run()
    second.close()


_CLAIM = """
import sys, time
from pathlib import Path
from perilune.train.write import lock_folder
claim = lock_folder(Path(sys.argv[1]))
print("claimed", flush=True)
time.sleep(60)
"""


def test_a_killed_process_lets_its_folder_go(tiny_run: TrainConfig) -> None:
    Path(tiny_run.out).mkdir()
    with subprocess.Popen([sys.executable, "-c", _CLAIM, tiny_run.out], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(Error, match="where another run is at work"):
            Trainer(tiny_run)
        other.kill()
    Trainer(tiny_run).close()
