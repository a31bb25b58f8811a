"""The documentation works when it is pasted: its Python runs, its commands are understood, its links lead somewhere."""

from __future__ import annotations

import contextlib
import functools
import io
import pkgutil
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.chat import train_bpe
from perilune.cli import COMMANDS, main
from perilune.config import ModelConfig
from perilune.model import Transformer, initialize, save

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
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


@functools.cache
def flags(*command: str) -> frozenset[str]:
    """The options that a command's help lists."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*command, "--help"]) == 0, command
    return frozenset(re.findall(FLAG, said.getvalue())) | {"--debug", "--version"}


@functools.cache
def bench_flags(script: str) -> frozenset[str]:
    """The options that a script in bench/ names, or a module that it imports or that is a part of it."""
    bench = ROOT / "bench"
    text = (bench / script).read_text("utf-8")
    names = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
    parts = {bench / f"{name}.py" for name in names} | {*bench.glob(f"{Path(script).stem}_*.py")}
    sources = [text, *(path.read_text("utf-8") for path in parts if path.exists())]
    return frozenset(re.findall(rf'"({FLAG})"', "\n".join(sources)))


FLAG = r"(?<![\w-])--[a-z][\w.-]*"
SUBCOMMANDS = ("serve", "create", "ls", "exec", "fork", "setup", "doctor", "top", "snapshot", "pause", "resume")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_exist(page: Path) -> None:
    """Of every command and script that a page names, in its text too; an option alone is one of any of them."""
    text = page.read_text("utf-8")
    for words in re.findall(r"\bperilune ([a-z][^`\n#|&]*)", text):
        name, *rest = words.split(" -- ")[0].split()
        if name in COMMANDS:
            inner = rest[:1] if name == "sandbox" and rest[:1] and rest[0] in SUBCOMMANDS else []
            for flag in re.findall(FLAG, " ".join(rest)):
                assert flag in flags(name, *inner), f"{page.name}: perilune {name} {' '.join(inner)} {flag}"
    for script, rest in re.findall(r"\bbench/(\w+\.py)([^`\n#]*)", text):
        for flag in re.findall(FLAG, rest):
            assert flag in bench_flags(script), f"{page.name}: bench/{script} {flag}"
    for flag in re.findall(rf"`({FLAG})", text):
        assert any(flag in some for some in every_flags()), f"{page.name}: {flag}"


def every_flags() -> Iterator[frozenset[str]]:
    """Of scripts, then of commands; what imports most comes last."""
    yield from (bench_flags(path.name) for path in sorted((ROOT / "bench").glob("*.py")))
    yield from (flags("sandbox", name) for name in SUBCOMMANDS)
    yield from (flags(name) for name in sorted(COMMANDS, key="train".__eq__))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_exist(page: Path) -> None:
    """Paths of this repository, and what of `perilune` is named with its dots."""
    text = page.read_text("utf-8")
    for path in re.findall(r"(?<![\w/.-])(?:bench|docs|examples|perilune|tests)/[\w/.-]+\.[a-z]+\b", text):
        assert "NAME" in path or (ROOT / path).exists(), f"{page.name} names {path}"
    for name in re.findall(r"`(perilune(?:\.\w+)+)", text):
        # Needs a library that wants another Python.
        if name != "perilune.sandbox.adapters.harbor":
            assert pkgutil.resolve_name(name) is not None, f"{page.name} names {name}"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
        if "://" not in target:
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(place), f"{page.name} links to {target}#{anchor}"


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
