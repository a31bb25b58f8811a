"""The name of a prefix: one hash a match unit, each over all tokens before it.

The seed of the chain is the tenant's salt and the version of the weights, so that neither another tenant nor the
weights after an update can ever meet an old entry.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from perilune.errors import Error


@dataclass(frozen=True)
class Chain:
    """A document as the cache sees it. keys: one chained key a whole match unit. length: tokens.

    tokens is None where only the keys are known (a trace): then a prefix is known to whole units only. seed: what the
    first unit is chained to.
    """

    keys: Sequence[Hashable]
    length: int
    unit: int
    version: int = 0
    tokens: Sequence[int] | None = None
    seed: bytes = b""

    @classmethod
    def of(cls, tokens: Sequence[int], unit: int, salt: str = "", version: int = 0) -> Chain:
        """Hash token ids (each in [0, 2^63)) with 128-bit BLAKE2b. Raises Error for a unit < 1."""
        if unit < 1:
            raise Error(f"unit is {unit}; must be >= 1")
        return cls([], 0, unit, version, []).extended(tokens, _digest(f"{len(salt)}:{salt}:{version}".encode(), b""))

    def extended(self, tokens: Sequence[int], seed: bytes = b"") -> Chain:
        """The chain of `tokens`, of which this chain's are a prefix: only the units after its last are hashed."""
        keys, unit = list(self.keys), self.unit
        digest: Any = keys[-1] if keys else seed or self.seed
        data = array("q", tokens[len(keys) * unit : len(tokens) // unit * unit]).tobytes()
        for i in range(0, len(data), 8 * unit):
            digest = _digest(digest, data[i : i + 8 * unit])
            keys.append(digest)
        return Chain(keys, len(tokens), unit, self.version, tokens, seed or self.seed)

    def tail(self, end: int) -> bytes:
        """Digest of the tokens between the last whole unit before `end` and `end`; the keys cover what is before.

        The seed is part of it, because no key covers it where `end` lies in the first unit.
        """
        assert self.tokens is not None
        return _digest(b"tail" + self.seed, array("q", self.tokens[end - end % self.unit : end]).tobytes())


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=16).digest()


__all__ = ["Chain"]
