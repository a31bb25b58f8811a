"""TrainConfig: TOML and command line give the same run; every mistake is one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.errors import Error
from perilune.train.config import TrainConfig, from_dict, load_config


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_file_then_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, 'steps = 7\nadam_lr_unused = 1\n[data]\ntrain = ["a"]\n'.replace("adam_lr_unused = 1\n", ""))
    config = load_config(path, ["--optim.lr", "3e-4", "--data.train", "b", "c", "--data.weights", "1", "2"])
    assert (config.steps, config.optim.lr, config.data.train, config.data.weights) == (7, 3e-4, ("b", "c"), (1.0, 2.0))
    assert config.optim.momentum == TrainConfig().optim.momentum


def test_round_trip_through_plain_values() -> None:
    config = load_config(None, ["--optim.adam-lr", "1e-3", "--balance.ema", "0.5"])
    assert from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 1", "unknown key stepz"),
        ("[optim]\nlearning_rate = 1.0", r"unknown key optim\.learning_rate"),
        ("steps = 1.5", "steps is 1.5; must be of type int"),
        ("steps = true", "steps is True; must be of type int"),
        ("steps = 0", "steps is 0; must be >= 1"),
        ("optim = 3", "optim is 3; must be a table"),
        ('dtype = "float8"', "dtype is 'float8'; allowed"),
        ("[optim]\nbetas = [0.9]", "must be a list of 2"),
        ('[data]\ntrain = ["a", "b"]\nweights = [1.0]', "data.weights"),
        ('[data]\ntrain = ["a"]\nweights = [0.0]', "data.weights"),
        ("steps = ", "cannot be read"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Error, match=message) as caught:
        load_config(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim.lrr", "1"], r"--optim\.lrr"),
        (["--steps", "many"], "steps"),
        (["--steps", "-1"], "steps is -1"),
        (["--dtype", "int8"], "int8"),
    ],
)
def test_bad_overrides(words: list[str], message: str) -> None:
    with pytest.raises(Error, match=message) as caught:
        load_config(None, words)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(Error, match="does not exist"):
        load_config(tmp_path / "none.toml")


def test_help_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config(None, ["--help"])
    assert stop.value.code == 0
    assert "optim.lr" in capsys.readouterr().out
