"""Real text that is on every machine: the sources of the Python standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from perilune.errors import Error
from perilune.train.write import naming

# Tables of code points, tests, and a separate application: not the prose-like code that the rest is.
_LEFT_OUT = frozenset({"encodings", "test", "tests", "idlelib", "site-packages", "__pycache__", "lib-dynload"})


class Corpus(NamedTuple):
    """Texts by their path below the library, in the order of the names."""

    train: dict[str, str]
    held_out: dict[str, str]


def library_corpus(held_out: Iterable[str], root: Path | None = None) -> Corpus:
    """The .py files of the running interpreter's library, with whole top-level modules held out.

    held_out: names such as "json" (a package, all its files) or "argparse". root: another library folder.
    Empty files and files that are not UTF-8 are left out. Raises Error when a folder, a module or all training text
    is missing.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    if not root.is_dir():
        raise Error(f"corpus: {root} is not a folder; the interpreter has no library sources")
    names = set(held_out)
    corpus = Corpus({}, {})
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if _LEFT_OUT.intersection(inner.parts[:-1]) or path.stem in _LEFT_OUT:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            module = inner.parts[0].removesuffix(".py")
            (corpus.held_out if module in names else corpus.train)[inner.as_posix()] = text
    found = {name.split("/")[0].removesuffix(".py") for name in corpus.held_out}
    if missing := sorted(names - found):
        raise Error(f"corpus: {root} has no module {missing[0]!r} to hold out")
    if not corpus.train:
        raise Error(f"corpus: {root} holds no Python sources to train on")
    return corpus


def write_corpus(texts: dict[str, str], folder: Path) -> None:
    """Write texts as files below `folder`, byte for byte. Raises Error naming one that cannot be written."""
    for name, text in texts.items():
        path = folder / name
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())


__all__ = ["Corpus", "library_corpus", "write_corpus"]
