"""The documentation works when it is pasted: its Python runs, its commands are understood, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from perilune.chat import train_bpe
from perilune.cli import COMMANDS, main
from perilune.config import ModelConfig
from perilune.model import Transformer, initialize, save

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Read a line from a person, need a server or a run's files, or take minutes; their own tests run them.
NOT_RUN = ("quickstart", "chat", "train", "serve", "bench-serve", "plan", "export", "sandbox")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language; "" are the blocks of shell commands."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Words of every `perilune ...` line of a page's shell blocks."""
    lines = [line.split("#")[0].strip().removeprefix(".venv/bin/") for b in blocks(page, "") for line in b.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("perilune ")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages take from an earlier step: a checkpoint of the quickstart's shape."""
    folder = tmp_path_factory.mktemp("docs")
    checkpoint = folder / "runs" / "quickstart" / "checkpoint"
    save(initialize(Transformer(ModelConfig.from_pretrained("nano")), seed=0), checkpoint)
    train_bpe(["def main():\n    return 1\n" * 40], 2048).save(checkpoint)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_run(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    for words in commands(page):
        assert words[0] in COMMANDS or words[0].startswith("--"), words
        if words[0] not in NOT_RUN:
            assert main(words) == 0, (words, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.stem)
def test_toml_is_a_training_config(page: Path, tmp_path: Path) -> None:
    from perilune.train import load_config

    for block in blocks(page, "toml"):
        (tmp_path / "run.toml").write_text(block)
        load_config(tmp_path / "run.toml")


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        for block in blocks(page, ""):
            for target in re.findall(r"^make ([a-z]+)", block, re.MULTILINE):
                assert target in targets, f"{page.name}: make {target}"
    assert shutil.which("make") is None or {"demo", "test", "lint"} <= targets
