"""One model over several processes: weights cut by the table of `perilune.parallel.tensor`, experts spread, one engine.

Rank 0 schedules and samples; the others do what it tells them (`link`), each on its part of the weights (`shard`).
"""

from perilune.serve.ranks.lead import Ranks

__all__ = ["Ranks"]
