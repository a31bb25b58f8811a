"""The command line: exit codes, one-line errors on stderr, help with examples, output that programs can read."""

from __future__ import annotations

import errno
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import perilune
import perilune.ops
from perilune import cli
from perilune.cli import COMMANDS, main
from perilune.cli.env import kernels
from perilune.config import ModelConfig
from perilune.errors import Error


def failing(error: BaseException) -> SimpleNamespace:
    """A command module whose work raises `error`."""

    def run(arguments: list[str]) -> None:
        raise error

    return SimpleNamespace(run=run)


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make every command raise the error that it is called with."""

    def install(error: BaseException) -> None:
        monkeypatch.setattr(cli, "import_module", lambda name: failing(error))

    return install


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("perilune: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert "examples:" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: perilune {command}" in text
    assert f"  perilune {command}" in text.split("examples:")[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"perilune {perilune.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["fly"], "command 'fly' is unknown; allowed: quickstart, train"),
        (["info"], "MODEL"),
        (["info", "nano", "--jsno"], "--jsno"),
        (["info", "no-such-model"], "config 'no-such-model' is neither a preset"),
        (["env", "extra"], "extra"),
        (["train", "no-such-file.toml"], "no-such-file.toml"),
        (["generate", "no-such-folder", "text"], "no-such-folder"),
        (["chat", "no-such-folder"], "no-such-folder"),
        (["generate", "no-such-folder", "text", "--max-tokens", "many"], "--max-tokens"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert said in one_line(capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ('{"model_type": "kimi_linear"}', "linear_attn_config is missing"),
    ],
)
def test_a_bad_config_is_one_line(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["info", str(tmp_path)]) == 2
    assert said in one_line(capsys)


def test_inconsistent_sizes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = ModelConfig.from_pretrained("nano").to_hf()
    hf["text_config"]["num_experts_per_token"] = 1000
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert main(["info", str(tmp_path)]) == 2
    assert "num_experts_per_token is 1000; must be between 1 and" in one_line(capsys)


def test_an_unknown_own_key_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = ModelConfig.from_pretrained("nano").to_hf() | {"perilune_speed": 11}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert main(["info", str(tmp_path)]) == 2
    assert "'perilune_speed' is unknown" in one_line(capsys)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Error("steps is 0;\n  must be >= 1"), "perilune: steps is 0; must be >= 1\n"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b.tmp"), "perilune: a/b.tmp: No space left on device\n"),
        (OSError(errno.EXDEV, "Invalid link", "a", None, "b"), "perilune: a -> b: Invalid link\n"),
        (OSError("the disk is gone"), "perilune: the disk is gone\n"),
        (PermissionError(errno.EACCES, "Permission denied", "c"), "perilune: c: Permission denied\n"),
        (
            ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib"),
            "perilune: the package 'matplotlib' is not installed; `pip install 'perilune[train]'` brings it\n",
        ),
        (RuntimeError("odd\nshape"), "perilune: unexpected RuntimeError: odd shape (--debug prints the traceback)\n"),
    ],
)
def test_an_error_is_one_line(
    error: Exception, said: str, raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    raising(error)
    assert main(["env"]) == 2
    assert one_line(capsys) == said


@pytest.mark.parametrize(("command", "extra"), [("train", "serve"), ("serve", "serve"), ("sandbox", "sandbox")])
def test_a_package_of_two_extras_is_named_by_the_command(
    command: str, extra: str, raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    raising(ModuleNotFoundError("No module named 'fastapi'", name="fastapi"))
    assert main([command]) == 2
    assert f"`pip install 'perilune[{extra}]'`" in one_line(capsys)


def test_debug_shows_the_traceback(
    raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    raising(Error("steps is 0; must be >= 1"))
    assert main(["env", "--debug"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("Traceback")
    assert captured.err.endswith("perilune: steps is 0; must be >= 1\n")


def test_ctrl_c_is_130(raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]) -> None:
    raising(KeyboardInterrupt())
    assert main(["env"]) == 130
    assert one_line(capsys) == "perilune: stopped\n"


def test_info_as_json_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "kimi-k3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 2_779_931_837_184
    assert facts["checkpoint_bytes"] == 1_560_860_324_864
    assert {part["name"] for part in facts["components"]} >= {"KDA", "MLA", "routed experts", "vision tower"}


def test_info_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "kimi-k3"]) == 0
    text = capsys.readouterr().out
    for figure in ("2,779,931,837,184", "2,779,484,478,208", "1,560,860,324,864", "104.19 B", "434.1 MB", "449.4 MB"):
        assert figure in text
    assert len({len(line) for line in text.splitlines()[2:18]}) == 1, "the columns line up"


def test_info_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.from_pretrained("nano").to_hf()))
    assert main(["info", str(tmp_path), "--json"]) == 0
    folder = json.loads(capsys.readouterr().out)
    assert main(["info", "nano", "--json"]) == 0
    assert folder | {"model": "nano"} == json.loads(capsys.readouterr().out)


def test_env_names_versions_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["perilune"] == perilune.__version__
    assert {"torch", "torch threads", "python"} <= set(facts)


def test_env_asks_every_operation_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [folder.name for folder in pkgutil.iter_modules(perilune.ops.__path__) if folder.ispkg]
    expected = {f"ops.{name}": f"that of {name}" for name in folders}
    for name in folders:
        home = import_module("perilune.ops.mla.varlen" if name == "mla" else f"perilune.ops.{name}")
        monkeypatch.setattr(home, "implementation", lambda *tensors, name=name: f"that of {name}")
    assert kernels().items() >= expected.items()


def test_a_reader_that_leaves_early_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "import sys; from perilune.cli import main; sys.exit(main(['info', 'nano']))"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert done.stderr == ""
