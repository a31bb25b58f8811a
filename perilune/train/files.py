"""Documents out of files: plain text, JSON lines, parquet; read piece by piece, continued at any document.

A document is a string (text) or a chat: a dict with "messages" and perhaps "tools".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from perilune.errors import Error

# A longer text file is read as several documents, cut after a line: a file of any size takes little memory.
TEXT_BYTES = 1 << 20


class Document(NamedTuple):
    """One document, where it begins, and where the next one of its file does (bytes; rows in a parquet file)."""

    content: str | dict[str, Any]
    next_offset: int
    offset: int = 0


def find_files(path: str | Path) -> list[Path]:
    """The file `path`, or all files below the folder `path` in the order of their names, hidden ones left out.

    Raises Error when there is none.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise Error(f"data: {path} does not exist; must be a file or a folder")
    inside = (found for found in path.rglob("*") if found.is_file())
    files = sorted(f for f in inside if not any(part.startswith(".") for part in f.relative_to(path).parts))
    if not files:
        raise Error(f"data: folder {path} holds no files")
    return files


def read_documents(path: Path, offset: int = 0) -> Iterator[Document]:
    """The documents of one file from `offset` (0, or a `next_offset`) on; empty ones are left out.

    Raises Error for text that is not UTF-8, a row that is not JSON, or a row with neither "text" nor "messages", and
    half of a surrogate pair; the message names the file and the row.
    """
    return _READERS.get(path.suffix.lower(), _read_text)(path, offset)


def place(path: Path, offset: int) -> str:
    """Where a document is, in words."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return f"{path} row {offset}"
    if suffix == ".jsonl":
        with path.open("rb") as file:
            line = 1
            while file.tell() < offset and file.readline():
                line += 1
        return f"{path} line {line} at byte {offset}"
    return f"{path} at byte {offset}"


def _read_text(path: Path, offset: int) -> Iterator[Document]:
    with path.open("rb") as file:
        file.seek(offset)
        rest = b""
        while True:
            block = rest + file.read(TEXT_BYTES - len(rest))
            if not block:
                return
            cut = block.rfind(b"\n") + 1 if len(block) == TEXT_BYTES else len(block)
            cut = cut or _character_cut(block)
            text, rest = _decode(block[:cut], path, offset), block[cut:]
            begin, offset = offset, offset + cut
            yield Document(text, offset, begin)


def _character_cut(block: bytes) -> int:
    """The end of the last whole UTF-8 character of a block without a line end."""
    for back in range(1, min(4, len(block)) + 1):
        if block[-back] >= 0xC0:
            return len(block) - back or len(block)
        if block[-back] < 0x80:
            break
    return len(block)


def _read_jsonl(path: Path, offset: int) -> Iterator[Document]:
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            begin, offset = offset, offset + len(line)
            if not line.strip():
                continue
            text = _decode(line, path, begin)
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as cause:
                raise Error(f"data: {place(path, begin)} is not JSON: {cause}") from None
            content = _content(row, path, begin)
            if "\\u" in text:
                _require_characters(content, path, begin)
            if content:
                yield Document(content, offset, begin)


def _read_parquet(path: Path, offset: int) -> Iterator[Document]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise Error(f"data: {path} needs pyarrow; install perilune[train]") from None
    try:
        file = parquet.ParquetFile(path)
    except Exception as cause:
        raise Error(f"data: {path} is not a parquet file: {str(cause).splitlines()[0]}") from None
    names = [name for name in ("text", "messages", "tools") if name in file.schema_arrow.names]
    row = 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if row + size > offset:
            for values in file.read_row_group(group, columns=names).to_pylist():
                row += 1
                if row <= offset:
                    continue
                content = _content(values, path, row - 1)
                if content:
                    yield Document(content, row, row - 1)
        else:
            row += size


def _content(row: Any, path: Path, offset: int) -> str | dict[str, Any]:
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return str(row["text"])
        if isinstance(row.get("messages"), list):
            return {key: row[key] for key in ("messages", "tools") if row.get(key) is not None}
    raise Error(f'data: {place(path, offset)} holds neither "text" (a string) nor "messages" (a list)')


def _require_characters(content: str | dict[str, Any], path: Path, offset: int) -> None:
    """Raise Error for half of a surrogate pair: JSON can write one, but it is no character."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as cause:
        half = ord(cause.object[cause.start])
        raise Error(f"data: {place(path, offset)} holds \\u{half:04x}, half of a surrogate pair") from None


def _decode(block: bytes, path: Path, offset: int) -> str:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise Error(f"data: {path} is not UTF-8 at byte {offset + cause.start}") from None


_READERS: dict[str, Callable[[Path, int], Iterator[Document]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}

__all__ = ["Document", "find_files", "place", "read_documents"]
