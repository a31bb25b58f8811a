"""`generate`, `chat` and `train` on a model small enough to build in the test: what is printed, and what is refused."""

from __future__ import annotations

import builtins
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.chat import Tokenizer, collect, train_bpe
from perilune.chat.specials import K2
from perilune.cli import main
from perilune.cli.chat import events
from perilune.config import ModelConfig
from perilune.model import Transformer, initialize, save

TEXT = "def main():\n    return 1\n" * 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random nano model of 300 tokens and its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    config = dataclasses.replace(ModelConfig.from_pretrained("nano"), vocab_size=300)
    save(initialize(Transformer(config), seed=0), folder)
    train_bpe([TEXT], 300).save(folder)
    return str(folder)


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code = main(argv)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_generate_continues_the_prompt(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "generate", checkpoint, "def main", "--max-tokens", "12", "--seed", "3")
    assert text.startswith("def main")
    assert text.endswith("\n")
    assert text == output(capsys, "generate", checkpoint, "def main", "--max-tokens", "12", "--seed", "3")


def test_generate_without_chance_does_not_depend_on_the_seed(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ("generate", checkpoint, "return", "--max-tokens", "8", "--temperature", "0", "--seed")
    assert output(capsys, *request, "1") == output(capsys, *request, "2")


def test_generate_reads_standard_input(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def piped"))
    assert output(capsys, "generate", checkpoint, "-", "--max-tokens", "2").startswith("def piped")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", "-1"), "temperature is -1.0; must be >= 0"),
        (("--top-p", "1.5"), "top_p is 1.5; must be in (0, 1]"),
        (("--device", "abacus"), "device is 'abacus'"),
        (("--device", "cuda:77"), "device is 'cuda:77'; this machine has"),
        (("--dtype", "int3"), "--dtype"),
        (("--max-tokens", "0"), "max_tokens is 0; must be >= 1"),
        (("--seed", str(2**64)), f"seed is {2**64}; must fit in 64 bits"),
    ],
)
def test_a_bad_option_is_one_line(
    options: tuple[str, str], said: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", checkpoint, "text", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_checkpoint_without_a_tokenizer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(ModelConfig.from_pretrained("nano"), vocab_size=300)
    save(initialize(Transformer(config)), tmp_path / "bare")
    assert main(["generate", str(tmp_path / "bare"), "text"]) == 2
    assert "holds neither tokenizer.json nor tiktoken.model" in capsys.readouterr().err


def test_a_truncated_shard_is_one_line(tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    for file in Path(checkpoint).iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    assert main(["generate", str(tmp_path), "text"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ".safetensors" in error


@pytest.mark.parametrize("options", [(), ("--thinking",), ("--system", "Be brief.")])
def test_chat_answers_until_the_input_ends(
    options: tuple[str, ...], checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = lines("hello", "and again")
    monkeypatch.setattr(builtins, "input", lambda prompt: next(asked))
    text = output(capsys, "chat", checkpoint, "--max-tokens", "6", "--seed", "1", *options)
    assert text.count("\n") >= 2
    assert not any(name in text for name in Tokenizer.load(checkpoint).specials)


@pytest.mark.parametrize(("option", "value"), [("--max-tokens", "-1"), ("--seed", str(-(2**63) - 1))])
def test_chat_refuses_numbers_out_of_range(
    option: str, value: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", checkpoint, option, value]) == 2
    error = capsys.readouterr().err
    assert f"{option[2:].replace('-', '_')} is {value}; must" in error
    assert error.count("\n") == 1


def lines(*said: str) -> Iterator[str]:
    """What a person types, then Ctrl-D."""
    yield from said
    raise EOFError


def test_train_makes_a_checkpoint_that_generate_reads(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(f"""
out = "{tmp_path / "run"}"
init_from = "{checkpoint}"
steps = 5
[data]
train = ["{tmp_path / "text.txt"}"]
held_out = ["{tmp_path / "text.txt"}"]
batch_tokens = 64
sequence_tokens = 64
""")
    text = output(capsys, "train", str(tmp_path / "run.toml"), "--steps", "2", "--optim.lr", "1e-3")
    made = str(tmp_path / "run" / "checkpoint")
    assert made in text
    assert output(capsys, "generate", made, "def", "--max-tokens", "2").startswith("def")


@pytest.mark.parametrize(
    ("toml", "options", "said"),
    [
        ("stepz = 5", (), "unknown key stepz"),
        ("steps = 'five'", (), "steps is 'five'"),
        ("steps = 5", ("--steps", "0"), "steps is 0; must be >= 1"),
        ("steps = 5", ("--stepz", "3"), "--stepz"),
        ("steps = [", (), "cannot be read"),
        ("steps = 5", ("--seed", str(2**64)), "must fit in 64 bits"),
        ("steps = 5", ("--optim.lr", "inf"), "optim.lr is inf; must be finite"),
    ],
)
def test_a_bad_training_config_is_one_line(
    toml: str, options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(toml)
    assert main(["train", str(tmp_path / "run.toml"), *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_an_empty_data_folder_writes_nothing(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nothing").mkdir()
    out = tmp_path / "run"
    (tmp_path / "run.toml").write_text(
        f'out = "{out}"\ninit_from = "{checkpoint}"\n[data]\ntrain = ["{tmp_path / "nothing"}"]\n'
    )
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    error = capsys.readouterr().err
    assert "nothing" in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_file_that_is_not_utf8_is_named(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 100)
    (tmp_path / "run.toml").write_text(
        f'out = "{tmp_path / "run"}"\ninit_from = "{checkpoint}"\n[data]\ntrain = ["{tmp_path / "latin.txt"}"]\n'
    )
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "latin.txt" in error
    assert "UTF-8" in error


@pytest.mark.parametrize("family", ["k3", "k2"])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("end", ["turn", "[EOS]"])
def test_chat_tells_thoughts_from_the_answer(family: str, thinking: bool, end: str) -> None:
    """In both formats, whose markers are special tokens; what ends an answer is not shown."""
    words = train_bpe(["def main():\n    return 1\n"], 300)
    if family == "k2":
        first = min(words.specials.values())
        words = Tokenizer(words._bpe, {name: first + i for i, name in enumerate(K2.values())})
    before = {"k3": ["<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>"], "k2": ["</think>"]}[family]
    after = {"k3": ["<|close|>", "response", "<|sep|>", "<|close|>", "message", "<|sep|>"], "k2": []}[family]
    parts = [*(["why", *before] if thinking else []), "yes", *after, words.eos_token if end == "turn" else end]
    tokens = [id for part in parts for id in ([words.specials[part]] if part in words.specials else words.encode(part))]
    reply = collect(events(tokens, words, family == "k3", thinking))
    assert (reply.reasoning, reply.content) == ("why" if thinking else "", "yes")
