"""Text <-> tokens <-> messages: rendering, tokenizer, and parsers of model output."""

from perilune.chat.render import render
from perilune.chat.segment import Segment, join
from perilune.chat.tokenizer import StreamDecoder, Tokenizer, train_bpe

__all__ = ["Segment", "StreamDecoder", "Tokenizer", "join", "render", "train_bpe"]
