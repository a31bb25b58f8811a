"""What rounding the experts costs: trained with it, rounded afterwards, or not at all, on the quickstart's text.

    python bench/qat.py [--out runs/qat] [--steps 256]

Every model does the quickstart's work: same text, same seed, same number of steps. Writes bench/results/qat.json.
A part that is finished is not done again.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
from functools import partial
from pathlib import Path
from typing import Any

import torch

import perilune
from perilune.chat import Tokenizer, train_bpe
from perilune.config import QuantConfig
from perilune.model import Transformer, load, quantize
from perilune.ops.mx import RULES
from perilune.train.bits import bits_per_byte, measure, model_bits
from perilune.train.config import BalanceConfig, QatConfig, TrainConfig
from perilune.train.corpus import library_corpus, write_corpus
from perilune.train.quickstart import Recipe
from perilune.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
TRAINED = {
    "unrounded": QatConfig(),
    "qat, weights": QatConfig(enabled=True, activations="none"),
    "qat, weights and inputs": QatConfig(enabled=True, activations="inputs"),
    "qat, weights, inputs and inner": QatConfig(enabled=True, activations="all"),
}


def train(name: str, out: Path, recipe: Recipe, qat: QatConfig) -> Path:
    """The checkpoint of one run."""
    run = out / name.replace(", ", "-").replace(" ", "-")
    data = dataclasses.replace(recipe.data, train=(str(out / "text"),))
    config = TrainConfig(
        out=str(run),
        model=recipe.model,
        tokenizer=str(out / "tokenizer"),
        steps=recipe.steps,
        eval_every=0,
        checkpoint_every=32,
        seed=recipe.seed,
        device="cpu",
        loss_chunk=1 << 20,
        data=data,
        optim=recipe.optim,
        balance=BalanceConfig(bins=0),
        qat=qat,
    )
    if not (run / "checkpoint" / "config.json").is_file():
        Trainer(config).run()
    return run / "checkpoint"


def rounded(checkpoint: Path, quant: QuantConfig) -> Transformer:
    """The unrounded model, rounded after training."""
    model = load(checkpoint)
    quantize(model, quant)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/qat"))
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    args = parser.parse_args()
    recipe = Recipe(steps=args.steps)
    corpus = library_corpus(recipe.held_out, recipe.library)
    write_corpus(corpus.train, args.out / "text")
    if not (args.out / "tokenizer").is_dir():
        train_bpe(corpus.train.values(), recipe.vocab_size).save(args.out / "tokenizer")
    tokenizer = Tokenizer.load(args.out / "tokenizer", "k3")
    checkpoints = {name: train(name, args.out, recipe, qat) for name, qat in TRAINED.items()}
    models: dict[str, Transformer] = {name: load(path, packed=True) for name, path in checkpoints.items()}
    for activations in ("none", "inputs", "all"):
        for rule in RULES if activations == "none" else ("even",):
            quant = QuantConfig(scale_rule=rule, activations=activations)  # type: ignore[arg-type]
            models[f"rounded afterwards, {rule}, activations {activations}"] = rounded(checkpoints["unrounded"], quant)
    files = measure(corpus.held_out, {name: partial(model_bits, model, tokenizer) for name, model in models.items()})
    found: dict[str, Any] = {name: bits_per_byte(files, name) for name in models}
    for name, value in found.items():
        print(f"{value:.4f}  {value - found['unrounded']:+.4f}  {name}")
    facts = {
        "date": datetime.date.today().isoformat(),
        "versions": {
            "perilune": perilune.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "shapes": {"model": recipe.model, "steps": recipe.steps, "tokens_per_step": recipe.data.batch_tokens},
        "bits_per_byte": found,
    }
    (ROOT / "bench" / "results" / "qat.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
