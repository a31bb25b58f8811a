"""How long a rank's buffers must be: the most rows that a policy can give it, whatever the routing."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.errors import Error
from perilune.parallel.expert.plan import slots_for
from perilune.parallel.expert.policy import PARTS, Policy


def worst_case_rows(
    policy: Policy,
    ranks: int,
    experts: int,
    top_k: int,
    tokens: int,
    align: int,
    domains: Sequence[int] | None,
) -> int:
    """The most rows, padding included, that a rank can get. Raises Error for sizes that cannot be."""
    if experts < 1 or experts % ranks:
        raise Error(f"experts is {experts}; must be a multiple of the {ranks} ranks")
    if not 1 <= top_k <= experts:
        raise Error(f"top_k is {top_k}; must be in 1..{experts}")
    if tokens < 0 or align < 1:
        raise Error(f"tokens is {tokens} and align {align}; must be >= 0 and >= 1")
    if ranks * tokens * top_k >= 2**31:
        raise Error(f"tokens is {tokens} of {top_k} choices on {ranks} ranks; together they must be below 2^31")
    if domains is not None and len(domains) != ranks:
        raise Error(f"domains has {len(domains)} numbers; must have one for each of the {ranks} ranks")
    home, rows = experts // ranks, tokens * top_k
    if policy.kind in ("budget", "off"):
        rows *= ranks
    if policy.kind == "tolerant":
        limit = -(-rows * policy.parts(ranks) // PARTS)
        # Refused copies stay at home. While a donor's largest expert has min_rows, each ends a quota: R - 1 of them.
        # After that it has fewer than M min_rows rows left, whatever is refused.
        rows = min(max(limit, home * policy.min_rows) + policy.min_rows * (ranks - 1), rows * ranks)
    groups = home + slots_for(policy, ranks, experts)
    if policy.kind in ("exact", "one_donor"):
        groups = 2 * home
    return -(-(rows + (align - 1) * groups) // align) * align


__all__ = ["worst_case_rows"]
