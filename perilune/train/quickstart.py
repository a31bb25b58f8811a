"""The main job: a model with every mechanism learns from real text on a plain CPU, and what it learned is measured.

The text is the Python standard library's own source code, which every machine that runs this has. Whole modules are
held out. The work is fixed, so that two machines differ in time only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from perilune.chat import Tokenizer, train_bpe
from perilune.errors import Error
from perilune.model import Sampling, Transformer, generate, initialize, load
from perilune.train.arithmetic import ModelPredictor, decode, encode
from perilune.train.bits import FileBits, bits_per_byte, measure, model_bits
from perilune.train.config import BalanceConfig, DataConfig, OptimConfig, TrainConfig
from perilune.train.corpus import library_corpus, write_corpus
from perilune.train.data import encode_document, pack
from perilune.train.report import Section, write_report
from perilune.train.trainer import Trainer
from perilune.train.write import naming, write_whole

# Ordinary modules, long and short, that every Python of the last years has.
HELD_OUT = (
    "bisect",
    "bz2",
    "cmd",
    "csv",
    "dataclasses",
    "fractions",
    "heapq",
    "json",
    "queue",
    "selectors",
    "shutil",
    "textwrap",
)


@dataclass(frozen=True)
class Recipe:
    """What the main job does. The defaults are the job; tests make it smaller."""

    model: str = "nano"
    vocab_size: int = 2048
    held_out: tuple[str, ...] = HELD_OUT
    library: Path | None = None
    """Another folder of Python sources than the interpreter's library."""
    steps: int = 256
    data: DataConfig = field(
        default_factory=lambda: DataConfig(
            batch_tokens=4096, sequence_tokens=1024, shuffle_pieces=4096, held_out_tokens=20_000
        )
    )
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-2, warmup=0.02))
    prompt: str = "def read_lines(path):\n"
    sample_tokens: int = 120
    coded_bytes: int = 6000
    """The longest held-out file up to this size is really coded and decoded."""
    seed: int = 0


@dataclass(frozen=True)
class Summary:
    """What the main job found. bits: bits a byte over all held-out files by method; coded: the file that was coded."""

    out: Path
    checkpoint: Path
    report: Path
    files: list[FileBits]
    bits: dict[str, float]
    coded: dict[str, object]
    sample: str


def run(out: str | Path = "runs/quickstart", recipe: Recipe | None = None, console: Console | None = None) -> Summary:
    """Do the main job below `out`; continues one that was interrupted.

    Raises Error when the library has no sources, the folder holds another run or cannot be written, the saved model
    does not give the trained one's logits, or the decoded file differs.
    """
    recipe, out, console = recipe or Recipe(), Path(out), console or Console(file=sys.stderr, highlight=False)
    begin = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - begin:4.0f} s] {line}", markup=False, soft_wrap=True)

    corpus = library_corpus(recipe.held_out, recipe.library)
    size = sum(len(text.encode()) for text in corpus.train.values())
    say(
        f"text: {len(corpus.train)} files, {size / 1e6:.1f} MB of the standard library; held out {len(corpus.held_out)}"
    )
    write_corpus(corpus.train, out / "text" / "train")
    write_corpus(corpus.held_out, out / "text" / "held-out")
    tokenizer = train_bpe(corpus.train.values(), recipe.vocab_size)
    with naming(out / "tokenizer"):
        tokenizer.save(out / "tokenizer")
    say(f"tokenizer: {tokenizer.vocab_size} tokens in {out / 'tokenizer'}")

    trainer = Trainer(_config(recipe, out))
    count = sum(p.numel() for p in trainer.model.parameters())
    tokens = recipe.steps * recipe.data.batch_tokens
    say(f"model: {recipe.model}, {count:,} parameters; {recipe.steps} steps, {tokens:,} tokens")
    result = trainer.run(console=console)
    model = trainer.model.eval()

    say("measuring held-out files")
    untrained = initialize(Transformer(model.config), recipe.seed)
    methods = {
        "untrained": partial(model_bits, untrained, tokenizer),
        "perilune": partial(model_bits, model, tokenizer),
    }
    files = measure(corpus.held_out, methods)
    bits = {name: bits_per_byte(files, name) for name in files[0].bits}
    say("bits a byte, held out: " + ", ".join(f"{name} {value:.3f}" for name, value in bits.items()))

    _check_saved(model, load(result.checkpoint), tokenizer, corpus.held_out)
    say(f"saved, loaded back, equal logits: {result.checkpoint}")
    coded = _code(model, tokenizer, corpus.held_out, files, recipe.coded_bytes)
    say(f"arithmetic coding: {coded['file']}: {coded['bytes']} bytes -> {coded['coded']} -> the same text again")
    sample = _sample(model, tokenizer, recipe)
    say(f"a completion:\n{sample}")

    report = write_report(out, _sections(files, bits, coded, sample))
    facts = {"bits_per_byte": bits, "coded": coded, "seconds": time.monotonic() - begin}
    write_whole(out / "summary.json", json.dumps(facts, indent=1) + "\n")
    say("done")
    console.print(_next_steps(out, result.checkpoint, report), markup=False, soft_wrap=True)
    return Summary(out, result.checkpoint, report, files, bits, coded, sample)


def _config(recipe: Recipe, out: Path) -> TrainConfig:
    text = out / "text"
    every = max(1, recipe.steps // 4)
    return TrainConfig(
        out=str(out),
        model=recipe.model,
        tokenizer=str(out / "tokenizer"),
        steps=recipe.steps,
        eval_every=every,
        checkpoint_every=every,
        seed=recipe.seed,
        device="cpu",
        loss_chunk=1 << 20,  # 512 tokens' logits at a time stay in a CPU's cache
        data=dataclasses.replace(recipe.data, train=(str(text / "train"),), held_out=(str(text / "held-out"),)),
        optim=recipe.optim,
        balance=BalanceConfig(bins=0),
    )


def _check_saved(model: Transformer, loaded: Transformer, tokenizer: Tokenizer, texts: dict[str, str]) -> None:
    """Raise Error unless both models give the same logits, bit for bit, on the shortest held-out file."""
    text = min(texts.values(), key=len)
    batch = pack([encode_document(text, tokenizer)[0]])
    with torch.no_grad():
        same = torch.equal(model(batch.tokens_T, batch.sequences), loaded(batch.tokens_T, batch.sequences))
    if not same:
        raise Error("the model that was loaded back does not give the logits of the one that was saved")


def _code(
    model: Transformer, tokenizer: Tokenizer, texts: dict[str, str], files: list[FileBits], limit: int
) -> dict[str, object]:
    """Code one held-out file with the model's probabilities, decode it, and compare."""
    fitting = [file for file in files if file.bytes <= limit] or [min(files, key=lambda file: file.bytes)]
    file = max(fitting, key=lambda file: file.bytes)
    piece, _ = encode_document(texts[file.name], tokenizer)
    first, tokens = piece.tokens[0], piece.targets
    data = encode(tokens, ModelPredictor(model, first))
    back = decode(data, tokenizer.text_end_id, ModelPredictor(model, first), limit=len(tokens))
    if tokenizer.decode_bytes(back[:-1]) != texts[file.name].encode():
        raise Error(f"arithmetic coding: {file.name} came back different")
    return {
        "file": file.name,
        "bytes": file.bytes,
        "coded": len(data),
        "predicted": file.bits["perilune"] / 8,
        "gzip -9": round(file.bits["gzip -9"] / 8),
        "xz -9": round(file.bits["xz -9"] / 8),
    }


def _sample(model: Transformer, tokenizer: Tokenizer, recipe: Recipe) -> str:
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompt = bos + tokenizer.encode(recipe.prompt)
    ends = {tokenizer.text_end_id, tokenizer.eos_id}
    drawn = generate(model, prompt, recipe.sample_tokens, Sampling(0.7, top_p=0.95, seed=recipe.seed), ends)
    return recipe.prompt + tokenizer.decode(list(drawn), skip_special=True)


def _sections(files: list[FileBits], bits: dict[str, float], coded: dict[str, object], sample: str) -> list[Section]:
    names = list(bits)
    rows: list[list[object]] = [["file", "bytes", *names]]
    rows += [[f.name, f"{f.bytes:,}", *(f"{f.bits[n] / f.bytes:.3f}" for n in names)] for f in files]
    rows.append(["all", f"{sum(f.bytes for f in files):,}", *(f"{bits[n]:.3f}" for n in names)])
    note = (
        "Every byte counts, the first token (predicted from the beginning-of-sequence token) and the end included. "
        "gzip and xz see each file alone; the model has read other modules of the library, never these."
    )
    return [
        Section("Held-out files, bits a byte", note, rows),
        Section(
            "One file coded for real",
            "Coded with the model's own probabilities by an arithmetic coder and decoded to the same bytes.",
            [list(coded), [f"{v:.1f}" if isinstance(v, float) else v for v in coded.values()]],
        ),
        Section("A completion", "Temperature 0.7, top-p 0.95, of the trained model.", text=sample),
    ]


def _command(name: str) -> str:
    """How a program of this installation is called from here: by its path where the shell would not find it."""
    beside = Path(sys.executable).with_name(name)
    return name if not beside.exists() or shutil.which(name) == str(beside) else os.path.relpath(beside)


def _next_steps(out: Path, checkpoint: Path, report: Path) -> str:
    perilune = _command("perilune")
    return f"""
report        {report}  (with {out / "loss.png"} and {out / "expert-load.png"})
model         {checkpoint}  (Kimi-K3 layout, with its tokenizer)
curves        {_command("tensorboard")} --logdir {out / "tensorboard"}

try next:
  {perilune} generate {checkpoint} "class Queue:"
  {perilune} info {checkpoint}
  {perilune} train run.toml --init-from {checkpoint}
"""


__all__ = ["HELD_OUT", "Recipe", "Summary", "run"]
