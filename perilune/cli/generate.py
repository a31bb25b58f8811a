"""`perilune generate`: a text and how a checkpoint continues it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from perilune.cli.checkpoint import Dtype, open_checkpoint, require_draws
from perilune.cli.parse import parse

DESCRIPTION = """Continue a text with a checkpoint; the text is printed as it is made.

examples:
  perilune generate runs/quickstart/checkpoint "def main():"
  perilune generate DIR "Once upon a time" --max-tokens 200 --temperature 0.8 --top-p 0.95 --seed 1
  cat prompt.txt | perilune generate DIR -"""


@dataclass(frozen=True)
class Generate:
    checkpoint: Annotated[str, tyro.conf.Positional]
    """folder of a checkpoint with its tokenizer"""
    prompt: Annotated[str, tyro.conf.Positional]
    """text to continue; - reads it from standard input"""
    max_tokens: int = 100
    """most tokens to make"""
    temperature: float = 1.0
    """0 takes the most likely token each time"""
    top_k: int | None = None
    """keep the k most likely tokens"""
    top_p: float | None = None
    """keep the most likely tokens that hold this much probability"""
    min_p: float | None = None
    """drop tokens less likely than this share of the most likely one"""
    seed: int = 0
    """of the draws"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes the GPU if there is one"""
    dtype: Dtype = "stored"
    """number format of the weights; stored takes that of the files"""


def run(arguments: list[str]) -> None:
    args = parse(Generate, "generate", arguments, DESCRIPTION)
    require_draws(args.max_tokens, args.seed)
    from perilune.chat import StreamDecoder
    from perilune.model import Sampling, generate

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    model, tokenizer = open_checkpoint(args.checkpoint, args.device, args.dtype)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    # A document begins with its beginning-of-sequence token, as in training.
    prompt = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer, skip_special=True)
    print(text, end="", flush=True)
    for token in generate(model, prompt, args.max_tokens, sampling, {tokenizer.eos_id, tokenizer.text_end_id}):
        print(decoder.push([token]), end="", flush=True)
    print(decoder.finish())


__all__ = ["run"]
