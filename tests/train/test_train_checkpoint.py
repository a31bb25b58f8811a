"""Checkpoints: exact, whole or absent, and honest about a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perilune.errors import Error
from perilune.train import checkpoint
from perilune.train.checkpoint import list_checkpoints, load_checkpoint, remove_incomplete, save_checkpoint


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {
        "model/a.weight": torch.randn(5, 7, generator=gen),
        "model/b": torch.randn(3, generator=gen).to(torch.bfloat16),
        "optim/a.weight/step": torch.tensor(3.0),
        "rng": torch.get_rng_state(),
        "empty": torch.zeros(0, 4),
    }


def test_round_trip_is_exact(tmp_path: Path) -> None:
    meta = {"step": 12, "data": {"rest": [[1, 2], [3]], "given": [0.1]}}
    path = save_checkpoint(tmp_path, 12, tensors(), meta, keep=2)
    assert path.name == "step-00000012"
    got, back = load_checkpoint(path)
    assert back == meta
    assert got.keys() == tensors().keys()
    for name, want in tensors().items():
        assert got[name].dtype == want.dtype
        assert torch.equal(got[name], want)


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 10, 100):
        save_checkpoint(tmp_path, step, tensors(), {}, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000010", "step-00000100"]


def test_incomplete_ones_are_ignored_and_cleaned(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, tensors(), {}, keep=3)
    (tmp_path / "step-00000009.writing").mkdir()
    (tmp_path / "step-00000009.writing" / "part").write_text("half")
    (tmp_path / "step-00000008").mkdir()  # a folder without meta.json is no checkpoint
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000005"]
    assert remove_incomplete(tmp_path) == 1
    assert not (tmp_path / "step-00000009.writing").exists()
    assert list_checkpoints(tmp_path / "none") == []


_FULL = """
import resource, signal, sys, torch
from perilune.errors import Error
from perilune.train.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save_checkpoint(sys.argv[1], 1, {"a": torch.zeros(10)}, {}, keep=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_checkpoint(sys.argv[1], 2, {"a": torch.zeros(100_000)}, {}, keep=1)
except Error as error:
    print(error)
"""


def test_a_write_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    # The kernel refuses bytes past a file-size limit: a real failing write, in the middle of the tensor file.
    done = subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "step-00000002 could not be written: File too large" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert torch.equal(load_checkpoint(tmp_path / "step-00000001")[0]["a"], torch.zeros(10))


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(Error, match="No space left on device"):
        save_checkpoint(tmp_path, 3, tensors(), {}, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, tensors(), {}, keep=1)
    for file in path.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Error, match="cannot be read") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(Error, match="cannot be read"):
        load_checkpoint(tmp_path / "step-00000099")


def test_states_that_a_checkpoint_lacks_are_gone_after_it_is_loaded() -> None:
    """Else a parameter that had no gradient yet then would go on with averages of later steps."""
    used, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    adam = {"adamw": torch.optim.AdamW([used, late])}
    names = {used: "used", late: "late"}
    used.grad = torch.ones(2)
    adam["adamw"].step()
    stored = {name: value.clone() for name, value in checkpoint.pack_optimizers(adam, names).items()}
    late.grad = torch.ones(2)
    adam["adamw"].step()
    checkpoint.unpack_optimizers(stored, adam, {name: param for param, name in names.items()})
    back = checkpoint.pack_optimizers(adam, names)
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], value) for name, value in stored.items())
