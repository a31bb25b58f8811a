"""The main job in small: another library folder, a tiny model, a few steps; everything it promises is there."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from train_tiny import VOCAB, invented_text, tiny_model

from perilune.chat import Tokenizer
from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Transformer, initialize
from perilune.train import quickstart
from perilune.train.bits import bits_per_byte, measure, model_bits
from perilune.train.config import DataConfig, OptimConfig
from perilune.train.corpus import library_corpus
from perilune.train.data import encode_document, pack
from perilune.train.quickstart import HELD_OUT, Recipe, run


@pytest.fixture
def recipe(material: Path, tmp_path: Path) -> Recipe:
    library = tmp_path / "library"
    for i in range(8):
        (library / f"module{i}.py").parent.mkdir(exist_ok=True)
        (library / f"module{i}.py").write_text(f"# module {i}\n" + invented_text(i))
    (library / "package").mkdir()
    (library / "package" / "inner.py").write_text(invented_text(50, 100) + "\nné\r\n")
    (library / "encodings").mkdir()
    (library / "encodings" / "big5.py").write_text("left out")
    (library / "latin.py").write_bytes(b"# na\xefve")
    return Recipe(
        model=str(material / "model"),
        vocab_size=VOCAB,
        held_out=("module3", "package"),
        library=library,
        steps=16,
        data=DataConfig(batch_tokens=256, sequence_tokens=128, held_out_tokens=500),
        optim=OptimConfig(lr=1e-2),
        sample_tokens=10,
        coded_bytes=1000,
    )


def test_everything_it_promises(recipe: Recipe, tmp_path: Path) -> None:
    screen = io.StringIO()
    summary = run(tmp_path / "out", recipe, Console(file=screen, width=200))
    assert {f.name for f in summary.files} == {"module3.py", "package/inner.py"}
    assert summary.bits["perilune"] < summary.bits["untrained"] - 1
    assert summary.coded["file"] == "package/inner.py"
    predicted, coded = summary.coded["predicted"], summary.coded["coded"]
    assert isinstance(predicted, float)
    assert isinstance(coded, int)
    assert predicted - 1 <= coded <= 1.01 * predicted + 3
    assert summary.sample.startswith(recipe.prompt)
    page = summary.report.read_text()
    for word in ("gzip -9", "xz -9", "untrained", "module3.py", "A completion"):
        assert word in page
    shown = screen.getvalue()
    for word in ("step 16/16", "equal logits", "try next", str(summary.checkpoint)):
        assert word in shown
    facts = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert facts["bits_per_byte"] == summary.bits
    again = run(tmp_path / "out", recipe, Console(file=io.StringIO()))
    assert again.bits == summary.bits  # a finished job is measured again, not trained again


def test_bits_of_a_file_are_counted_right(material: Path) -> None:
    model, tokenizer = (
        initialize(Transformer(ModelConfig.from_hf(tiny_model()))),
        Tokenizer.load(material / "tokenizer"),
    )
    text = invented_text(3, 60)
    batch = pack([encode_document(text, tokenizer)[0]])
    with torch.no_grad():
        logp = torch.log_softmax(model(batch.tokens_T, batch.sequences).double(), dim=-1)
    ids = [*tokenizer.encode(text), tokenizer.text_end_id]
    assert batch.tokens_T[0] == tokenizer.bos_id
    want = -sum(float(logp[i, id_]) for i, id_ in enumerate(ids)) / torch.log(torch.tensor(2.0)).item()
    assert model_bits(model, tokenizer, text) == pytest.approx(want, rel=1e-6)
    (file,) = measure({"a": text}, {"model": lambda _: 80.0})
    data = text.encode()
    assert gzip.decompress(gzip.compress(data, 9, mtime=0)) == data
    assert file.bits == {
        "gzip -9": 8 * len(gzip.compress(data, 9, mtime=0)),
        "xz -9": 8 * len(lzma.compress(data, preset=9)),
        "model": 80.0,
    }
    assert bits_per_byte([file, file], "model") == pytest.approx(80.0 / len(data))


def test_corpus_holds_out_whole_modules(recipe: Recipe) -> None:
    corpus = library_corpus(recipe.held_out, recipe.library)
    assert "package/inner.py" in corpus.held_out
    assert corpus.held_out["package/inner.py"].endswith("né\r\n")
    assert not set(corpus.train) & set(corpus.held_out)
    assert not any("encodings" in name or name == "latin.py" for name in corpus.train)
    with pytest.raises(Error, match="no module 'nothing'"):
        library_corpus(["nothing"], recipe.library)
    with pytest.raises(Error, match="not a folder"):
        library_corpus([], Path("nowhere"))


def test_this_interpreter_has_the_held_out_modules() -> None:
    corpus = library_corpus(HELD_OUT)
    assert sum(len(t.encode()) for t in corpus.train.values()) > 5e6
    assert 1e5 < sum(len(t.encode()) for t in corpus.held_out.values()) < 1e6
    assert not any(part in ("test", "encodings", "idlelib") for name in corpus.train for part in name.split("/")[:-1])
    assert sys.version_info >= (3, 11)


def test_the_next_command_is_one_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `make demo` the programs are in .venv/bin, which is not on the path."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "perilune"):
        (tmp_path / ".venv" / "bin" / name).write_text("")
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert quickstart._command("perilune") == ".venv/bin/perilune"
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    assert quickstart._command("perilune") == "perilune"
    assert quickstart._command("tensorboard") == "tensorboard"  # of the extra `train`, which is not here
