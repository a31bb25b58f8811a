"""What is imported when: light commands stay light, and rooms import downwards only."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import perilune

ROOT = Path(__file__).parents[1]
BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter in which the `blocked` packages cannot be imported."""
    code = BLOCK.format(blocked=set(blocked)) + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("module", ["perilune", "perilune.config", "perilune.sizes", "perilune.errors", "perilune.cli"])
def test_imports_without_torch(module: str) -> None:
    done = run(f"import {module}", "torch", "numpy", "triton")
    assert done.returncode == 0, done.stderr


def test_help_needs_nothing_but_python() -> None:
    done = run("from perilune.cli import main; sys.exit(main(['--help']))", "torch", "numpy", "tyro", "rich")
    assert done.returncode == 0, done.stderr
    assert "usage: perilune COMMAND" in done.stdout


@pytest.mark.parametrize("command", ["quickstart", "generate", "chat", "serve", "info", "env"])
def test_the_help_of_a_command_does_not_import_torch(command: str) -> None:
    code = f"""
from perilune.cli import main
code = main([{command!r}, '--help'])
assert 'torch' not in sys.modules, 'torch was imported'
sys.exit(code)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


@pytest.mark.parametrize("name", perilune.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(perilune, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        perilune.nothing  # noqa: B018


def test_every_room_lists_its_public_names_and_says_what_they_are() -> None:
    for init in sorted((ROOT / "perilune").rglob("__init__.py")):
        name = ".".join(init.parent.relative_to(ROOT).parts)
        module = import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.__all__ names {public!r}, which is not there"
            thing = getattr(module, public)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                # A dataclass without a docstring is given its signature for one.
                said = (thing.__doc__ or "").partition(f"{thing.__name__}(")[0]
                assert said, f"{name}.{public} has no docstring"


def test_rooms_import_downwards_only() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, timeout=100, cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
