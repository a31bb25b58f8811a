"""What happens to named tensors and regions between the forward and the backward pass: an ordered table, pure data.

    "kda.u"       = "fp8+host"
    "*.stream"    = "keep"
    "layers.0.*"  = "keep"

The first pattern that matches decides; patterns are those of a shell (* ? []), over `kda.u` and `layers.7.kda.u` alike.
A rule passes over names that it cannot be done to: regions cannot be moved, tensors without a recipe not recomputed.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from perilune.errors import Error

Where = Literal["device", "recompute", "host", "nvme", "peer"]
PLACEMENTS = ("keep", "recompute", "fp8", "host", "nvme", "peer", "fp8+host", "fp8+nvme", "fp8+peer")


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies between the passes, and whether as FP8 blocks. `device` without fp8 leaves it alone."""

    where: Where = "device"
    fp8: bool = False

    @staticmethod
    def parse(text: str, name: str = "placement") -> Placement:
        """Raises Error for anything but `PLACEMENTS`."""
        if text not in PLACEMENTS:
            raise Error(f"{name} is {text!r}; allowed: {', '.join(PLACEMENTS)}")
        *codec, where = text.split("+")
        fp8 = "fp8" in (*codec, where)
        return Placement("device" if where in ("keep", "fp8") else where, fp8)  # type: ignore[arg-type]

    def __str__(self) -> str:
        where = {"device": "" if self.fp8 else "keep"}.get(self.where, self.where)
        return "+".join(word for word in ("fp8" if self.fp8 else "", where) if word)


KEEP = Placement()


@dataclass(frozen=True)
class Rule:
    """required: a name must match, or the plan is an error."""

    pattern: str
    placement: Placement
    required: bool = True

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern) or fnmatchcase(short(name), self.pattern)


@dataclass(frozen=True)
class Plan:
    """Rules in order of precedence; what no rule matches is kept."""

    rules: tuple[Rule, ...] = ()

    @staticmethod
    def of(table: Mapping[str, str], required: bool = True) -> Plan:
        """From {pattern: placement}. Raises Error as `Placement.parse`."""
        return Plan(tuple(Rule(p, Placement.parse(t, f"placement of {p!r}"), required) for p, t in table.items()))

    def optional(self) -> Plan:
        """The same, with no rule that must match."""
        return Plan(tuple(replace(rule, required=False) for rule in self.rules))

    def placement(self, name: str, again: bool, movable: bool) -> Placement:
        """Of the first rule that matches and can be done; again: the name can be computed again, movable: it is a
        tensor."""
        for rule in self.rules:
            if rule.matches(name) and possible(rule.placement, again, movable):
                return rule.placement
        return KEEP

    def keeps(self, name: str) -> bool:
        """Whether a rule says so of a region that is computed again by default."""
        able = (rule for rule in self.rules if rule.matches(name) and possible(rule.placement, True, False))
        rule = next(able, None)
        return rule is not None and rule.placement == KEEP

    def check(self, names: Mapping[str, tuple[bool, bool]]) -> None:
        """Raises Error for a required rule that applies to none of the names, given with (again, movable)."""
        for rule in self.rules:
            if not rule.required:
                continue
            possibly = [name for name, kind in names.items() if possible(rule.placement, *kind)]
            if not any(map(rule.matches, possibly)):
                able = sorted(set(map(short, possibly)))
                near = difflib.get_close_matches(rule.pattern, able, 3, 0.3) or able
                raise Error(
                    f"memory plan: pattern {rule.pattern!r} matches no name that can be {rule.placement}; "
                    f"nearest: {', '.join(near)}"
                )


def possible(placement: Placement, again: bool, movable: bool) -> bool:
    """Regions cannot be moved, and tensors without a recipe not be computed again; anything can be kept."""
    if placement == KEEP:
        return True
    return again if placement.where == "recompute" else movable


@cache
def short(name: str) -> str:
    """A name without its layer."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


# Cheap to make again from what is kept anyway.
_ELEMENTWISE = {"norm": "recompute", "kda.qkv": "recompute", "kda.normed": "recompute", "*mlp.a": "recompute"}
_ELEMENTWISE |= {"mla.open": "recompute", "mla.gated": "recompute", "moe.normed": "recompute"}

PRESETS: dict[str, dict[str, str]] = {
    "none": {},
    # The residual stream is kept, and nothing of a sublayer.
    "full-recompute": {"norm": "recompute", "attn": "recompute", "ffn": "recompute"},
    "k3": {
        **_ELEMENTWISE,
        # Made again from rows that are a small part of their size.
        "kda.g": "recompute",
        "mla.q": "recompute",
        "mla.k": "recompute",
        "mla.kv": "recompute",
        # K3's one dense MLP: its inner tensors are five times a shared expert's, and more than its layer hides.
        "layers.0.ffn": "recompute",
        # Moved as they are, so that gradients have the bits of no plan: in FP8 none of these meets 2e-2 at K3's width.
        "kda.u": "host",
        "kda.o": "host",
        "kda.gate": "host",
        "mla.o": "host",
        "mla.gate": "host",
        "mla.latent": "host",
        "mlp.gate": "host",
        "mlp.up": "host",
        "moe.y": "host",
        "moe.z": "host",
        # The sums inside a block; those that end one ("block") stay, as every later sublayer mixes them.
        "stream": "host",
    },
}


def load_plan(text: str) -> Plan:
    """A preset's name, or the path of a TOML file with one table [plan] of pattern = "placement".

    Raises Error for an unknown preset, a file that cannot be read, and placements that do not exist.
    """
    if text in PRESETS:
        return Plan.of(PRESETS[text], required=False)
    path = Path(text)
    if path.suffix != ".toml":
        raise Error(f"memory plan is {text!r}; allowed: {', '.join(PRESETS)}, fit, or the path of a .toml file")
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
        raise Error(f"memory plan {text} cannot be read: {cause}") from cause
    table = values.get("plan")
    if list(values) != ["plan"] or not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise Error(f'memory plan {text} must hold one table [plan] of "pattern" = "placement"')
    return Plan.of(table)


__all__ = ["KEEP", "PLACEMENTS", "PRESETS", "Placement", "Plan", "Rule", "Where", "load_plan", "short"]
