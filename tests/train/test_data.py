"""Files -> documents -> packed batches: nothing lost, nothing twice, and continued at the exact token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.chat import Segment
from perilune.errors import Error
from perilune.train import files
from perilune.train.config import DataConfig
from perilune.train.data import Batches, encode_document, held_out_batches
from perilune.train.files import find_files, read_documents

BOS, EOS = 256, 257


class Bytes:
    """A tokenizer with one token a byte."""

    bos_id: int | None = BOS
    text_end_id = EOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_segments(self, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
        pairs = [
            (300 if s.special else b, s.by_model) for s in segments for b in (b"x" if s.special else s.text.encode())
        ]
        return [i for i, _ in pairs], [m for _, m in pairs]


def words(n: int, seed: int) -> str:
    return "".join(chr(97 + (i * i + seed) % 26) for i in range(n))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, n in enumerate([5, 300, 1, 64, 777]):
        (tmp_path / f"f{i}.txt").write_text(words(n, i))
    rows = [{"text": words(n, 9 + n)} for n in (3, 90, 0, 17)]
    (tmp_path / "g.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return tmp_path


def documents(folder: Path) -> list[str]:
    return [str(d.content) for f in find_files(folder) for d in read_documents(f)]


def test_batches_are_full_and_targets_follow(folder: Path) -> None:
    batches = Batches(DataConfig(train=(str(folder),), batch_tokens=128, sequence_tokens=50), Bytes())
    for batch in itertools.islice(batches, 40):
        assert batch.tokens_T.shape == batch.targets_T.shape == (128,)
        assert batch.sequences.total == 128
        assert max(batch.sequences.lengths) <= 50
        for begin, end in itertools.pairwise(batch.sequences.offsets):
            assert batch.tokens_T[begin + 1 : end].tolist() == batch.targets_T[begin : end - 1].tolist()


@pytest.mark.parametrize("window", [1, 3, 1000])
def test_every_token_once_an_epoch(folder: Path, window: int) -> None:
    config = DataConfig(train=(str(folder),), batch_tokens=10, sequence_tokens=50, shuffle_pieces=window)
    want = sorted(t for d in documents(folder) for t in [*d.encode(), EOS])
    epochs = 2
    seen: list[int] = []
    batches = Batches(config, Bytes())
    while len(seen) < epochs * len(want):
        seen += next(batches).targets_T.tolist()
    assert sorted(seen[: len(want)]) == want
    assert sorted(seen[len(want) : 2 * len(want)]) == want
    assert window == 1 or seen[: len(want)] != seen[len(want) : 2 * len(want)]


@pytest.mark.parametrize("stop", [0, 1, 7, 30, 61])
def test_continues_at_the_exact_token(folder: Path, stop: int) -> None:
    config = DataConfig(
        train=(str(folder), str(folder / "f4.txt")),
        weights=(3.0, 1.0),
        batch_tokens=48,
        sequence_tokens=40,
        shuffle_pieces=4,
    )
    batches = Batches(config, Bytes(), seed=5)
    for _ in range(stop):
        next(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    resumed = Batches(config, Bytes(), seed=5)
    resumed.load_state_dict(state)
    for a, b in itertools.islice(zip(batches, resumed, strict=True), 40):
        assert a.tokens_T.equal(b.tokens_T)
        assert a.targets_T.equal(b.targets_T)
        assert a.sequences.lengths == b.sequences.lengths
    assert batches.state_dict() == resumed.state_dict()


@pytest.mark.parametrize("change", ["new", "gone", "renamed", "longer"])
def test_a_position_in_other_files_is_refused(tmp_path: Path, change: str) -> None:
    """A position counts files and bytes: in other files it would leave documents out, or repeat them, unnoticed."""
    for name in "bcd":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 50)
    config = DataConfig(train=(str(tmp_path),), batch_tokens=16, sequence_tokens=16, shuffle_pieces=4)
    batches = Batches(config, Bytes())
    next(batches)
    state = batches.state_dict()
    Batches(config, Bytes()).load_state_dict(state)
    if change == "new":
        (tmp_path / "a.txt").write_text("first")
    elif change == "gone":
        (tmp_path / "b.txt").unlink()
    elif change == "renamed":
        (tmp_path / "b.txt").rename(tmp_path / "e.txt")
    else:
        (tmp_path / "c.txt").write_text("c " * 51)
    with pytest.raises(Error, match="holds other files, or files of other sizes, than when the position was saved"):
        Batches(config, Bytes()).load_state_dict(state)
    # Positions of before files were noted are taken as they are.
    del state["sources"][0]["files"]
    Batches(config, Bytes()).load_state_dict(state)


@pytest.mark.parametrize("size", [1, 5, 16, 64, 1000])
def test_every_batch_has_something_that_counts(tmp_path: Path, size: int) -> None:
    """A loss of nothing would be 0, and the step one of weight decay alone: however a batch cuts long questions."""
    says = ["why " * 90, "so", "and then " * 70, "this", "?" * 200]
    roles = ("user", "assistant") * 2 + ("user",)
    chat = {"messages": [{"role": r, "content": content} for r, content in zip(roles, says, strict=True)]}
    (tmp_path / "c.jsonl").write_text(json.dumps(chat) + "\n")
    config = DataConfig(train=(str(tmp_path),), batch_tokens=size, sequence_tokens=5000)
    counted: list[int] = []
    for batch in itertools.islice(Batches(config, Bytes()), 2000 // size + 2):
        assert batch.sequences.total == len(batch.tokens_T) == size
        assert batch.mask_T.any()
        counted += batch.targets_T[batch.mask_T].tolist()
    # All of it, in order, epoch after epoch.
    (document,) = read_documents(tmp_path / "c.jsonl")
    piece = encode_document(document.content, Bytes())[0]
    once = [t for t, m in zip(piece.targets, piece.mask, strict=True) if m]
    assert len(counted) > len(once)
    assert counted == (once * (len(counted) // len(once) + 1))[: len(counted)]


def test_same_seed_same_order_other_seed_other_order(folder: Path) -> None:
    config = DataConfig(train=(str(folder),), batch_tokens=256, sequence_tokens=32)
    first = [next(Batches(config, Bytes(), seed)).tokens_T.tolist() for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]


def test_mixture_shares(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    config = DataConfig(
        train=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")),
        weights=(0.75, 0.25),
        batch_tokens=64,
        sequence_tokens=16,
    )
    seen = [t for batch in itertools.islice(Batches(config, Bytes()), 100) for t in batch.targets_T.tolist()]
    share = seen.count(ord("a")) / (seen.count(ord("a")) + seen.count(ord("b")))
    assert abs(share - 0.75) < 0.01


def test_held_out_counts_every_byte_once(folder: Path) -> None:
    config = DataConfig(held_out=(str(folder),), batch_tokens=100, sequence_tokens=64)
    batches = list(held_out_batches(config, Bytes()))
    texts = documents(folder)
    assert sum(b.bytes for b in batches) == sum(len(t.encode()) for t in texts)
    got = [t for b in batches for t in b.targets_T.tolist()]
    assert got == [t for d in texts for t in [*d.encode(), EOS]]
    assert max(len(b.tokens_T) for b in batches) <= 100
    few = list(held_out_batches(DataConfig(held_out=(str(folder),), batch_tokens=100, held_out_tokens=7), Bytes()))
    assert sum(b.bytes for b in few) == 5 + 300


def test_chat_counts_only_what_the_model_wrote(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Good day"}]}
    (tmp_path / "c.jsonl").write_text(json.dumps(chat) + "\n")
    (document,) = read_documents(tmp_path / "c.jsonl")
    piece, size = encode_document(document.content, Bytes())
    counted = "".join(chr(t) if t < 256 else "*" for t, m in zip(piece.targets, piece.mask, strict=True) if m)
    assert "Good day" in counted
    assert "Hi there" not in counted
    assert size >= len("Good day")
    batch = next(Batches(DataConfig(train=(str(tmp_path),), batch_tokens=128), Bytes()))
    assert 0 < batch.mask_T.sum() < 100


def test_parquet_with_several_row_groups(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [words(10 + i, i) for i in range(25)]
    parquet.write_table(pa.table({"text": rows, "other": list(range(25))}), tmp_path / "d.parquet", row_group_size=7)
    assert [d.content for d in read_documents(tmp_path / "d.parquet")] == rows
    for stop in (1, 7, 13, 24):
        offset = list(itertools.islice(read_documents(tmp_path / "d.parquet"), stop))[-1].next_offset
        assert [d.content for d in read_documents(tmp_path / "d.parquet", offset)] == rows[stop:]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.integers(8, 40))
def test_long_text_is_cut_without_loss(text: str, block: int) -> None:
    import tempfile

    text = text.encode("utf-8", "ignore").decode()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        path = Path(name) / "t.txt"
        path.write_bytes(text.encode())
        patch.setattr(files, "TEXT_BYTES", block)
        found = list(read_documents(path))
        assert "".join(str(d.content) for d in found) == text
        for i, d in enumerate(found):
            rest = "".join(str(e.content) for e in read_documents(path, d.next_offset))
            assert rest == "".join(str(e.content) for e in found[i + 1 :])


def test_bad_input(tmp_path: Path) -> None:
    def start(path: Path) -> None:
        next(Batches(DataConfig(train=(str(path),)), Bytes()))

    (tmp_path / "empty").mkdir()
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".x").write_text("secret")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text("")
    for name, data in {
        "latin.txt": "na\xefve".encode("latin-1"),
        "bad.jsonl": b'{"text": "a"}\n{"text": \n',
        "neither.jsonl": b'{"prompt": "a"}\n',
        "list.jsonl": b"[1]\n",
        "not.parquet": b"hello",
        "half.jsonl": b'{"text": "a"}\n\n{"text": "a\\ud800b"}\n',
        "half-chat.jsonl": b'{"messages": [{"role": "user", "content": "\\udc00"}]}\n',
        "role.jsonl": b'{"text": "a"}\n{"messages": [{"role": "cat", "content": "x"}]}\n',
    }.items():
        (tmp_path / name).write_bytes(data)
    for name, message in {
        "none": "does not exist",
        "empty": "holds no files",
        "hidden": "holds no files",
        "blank": "no text to train on",
        "latin.txt": "not UTF-8 at byte 2",
        "bad.jsonl": "at byte 14 is not JSON",
        "neither.jsonl": 'neither "text"',
        "list.jsonl": 'neither "text"',
        "not.parquet": "not a parquet file",
        "half.jsonl": r"half\.jsonl line 3 at byte 15 holds \\ud800",
        "half-chat.jsonl": r"half-chat\.jsonl line 1 at byte 0 holds \\udc00",
        "role.jsonl": r"role\.jsonl line 2 at byte 14: .*cat",
    }.items():
        with pytest.raises(Error, match=message) as caught:
            start(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(Error, match=r"role\.jsonl line 2 at byte 14: "):
        list(held_out_batches(DataConfig(held_out=(str(tmp_path / "role.jsonl"),)), Bytes()))
    with pytest.raises(Error, match=r"data\.train is empty"):
        Batches(DataConfig(), Bytes())
    (tmp_path / "ok.txt").write_text("fine")
    one, two = (Batches(DataConfig(train=(str(tmp_path / "ok.txt"),) * n), Bytes()) for n in (1, 2))
    with pytest.raises(Error, match="1 sources"):
        two.load_state_dict(one.state_dict())
