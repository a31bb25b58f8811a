"""How closely the model agrees with other evaluations of the same function; writes bench/results/agreement.json.

Run: python bench/agreement.py  (about a minute on a CPU; needs the dev extra)
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from perilune import Sequences, Transformer
from perilune.model import EXACT, SequenceState, load, save

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "data" / "goldens"
sys.path.insert(0, str(ROOT / "tests" / "model"))

from models import random_tokens, tiny_model  # noqa: E402

LENGTH = 150


def one_pass(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of one document computed at once."""
    with torch.inference_mode():
        return model(tokens, Sequences.from_lengths([tokens.shape[0]])).double()


def golden(name: str) -> dict[str, float]:
    """Largest logit difference from the released reference code's float32 logits, and what float64 says of them."""
    file = load_file(GOLDENS / name / "golden.safetensors")
    found: dict[str, float] = {"absolute maximum": file["logits"].abs().max().item()}
    model = load(GOLDENS / name, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "copy")
        copies = {"float32": model, "float32, saved and loaded": load(Path(folder) / "copy", dtype=torch.float32)}
    copies["float64"] = load(GOLDENS / name, dtype=torch.float64)
    for label, copy in copies.items():
        logits = torch.stack([one_pass(copy, ids) for ids in file["input_ids"]])
        off_NT = (logits - file["logits"]).abs().amax(-1)
        found[f"{label}: largest"], found[f"{label}: median token"] = off_NT.max().item(), off_NT.median().item()
    return found


def transformers_both_ways() -> dict[str, float]:
    """A random Kimi-Linear through checkpoints: ours read by transformers, theirs read by us."""
    import transformers

    model, tokens = tiny_model("kimi_linear"), random_tokens(LENGTH, 257)
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "ours")
        theirs = transformers.KimiLinearForCausalLM.from_pretrained(Path(folder) / "ours", dtype=torch.float32).eval()
        theirs.save_pretrained(Path(folder) / "theirs")
        again = load(Path(folder) / "theirs", dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0].double()
    return {
        "ours in transformers": (one_pass(model, tokens) - expected).abs().max().item(),
        "transformers' in ours": (one_pass(again, tokens) - expected).abs().max().item(),
    }


def decoding(family: str) -> dict[str, float]:
    """Prefill of 20 tokens, then one at a time, against one pass."""
    found = {}
    for label, dtype, exact in (
        ("float32", torch.float32, False),
        ("float64", torch.float64, False),
        ("float32 exact", torch.float32, True),
    ):
        model = tiny_model(family, dtype).with_parts(EXACT)
        tokens = random_tokens(LENGTH, model.config.vocab_size)
        state = SequenceState.empty(model.config, exact, dtype=dtype)
        with torch.inference_mode():
            pieces = [
                model(tokens[a:b], Sequences.from_lengths([b - a]), [state])
                for a, b in itertools.pairwise([0, *range(20, LENGTH + 1)])
            ]
        found[label] = (torch.cat(pieces).double() - one_pass(model, tokens)).abs().max().item()
    return found


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    results = {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "golden": {name: golden(name) for name in ("k3-tiny", "k3-eps")},
        "transformers": transformers_both_ways(),
        "decode": {family: decoding(family) for family in ("kimi_k3", "kimi_linear")},
    }
    path = ROOT / "bench" / "results" / "agreement.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
