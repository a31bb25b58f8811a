"""Load for any server with an OpenAI-compatible address, and what it measures. Knows nothing of our own server."""

from perilune.serve.bench.client import Record, Target, measure
from perilune.serve.bench.load import closed_loop, open_loop
from perilune.serve.bench.report import Slo, draw, summarize
from perilune.serve.bench.workload import Item, poisson, random_items, shared_items, trace_items

__all__ = [
    "Item",
    "Record",
    "Slo",
    "Target",
    "closed_loop",
    "draw",
    "measure",
    "open_loop",
    "poisson",
    "random_items",
    "shared_items",
    "summarize",
    "trace_items",
]
