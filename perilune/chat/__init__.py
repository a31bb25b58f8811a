"""Text <-> tokens <-> messages: rendering, tokenizer, and parsers of model output."""

from perilune.chat.parse import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Options,
    Reasoning,
    Reply,
    Stream,
    ToolCall,
    collect,
    declared,
    parse,
    parser,
)
from perilune.chat.render import render
from perilune.chat.render_k2 import render_k2
from perilune.chat.segment import Segment, join
from perilune.chat.tokenizer import StreamDecoder, Tokenizer, train_bpe

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Options",
    "Reasoning",
    "Reply",
    "Segment",
    "Stream",
    "StreamDecoder",
    "Tokenizer",
    "ToolCall",
    "collect",
    "declared",
    "join",
    "parse",
    "parser",
    "render",
    "render_k2",
    "train_bpe",
]
