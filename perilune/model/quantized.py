"""Which modules of a checkpoint are MXFP4: the file, its config and this library must mean the same ones.

A file's tensors say it (`.weight_packed`); its config's ignore list leaves modules out by name. A pattern that takes in
more than was meant would have a server compute some experts in other numbers than the trainer, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from perilune.errors import Error
from perilune.model.names import Entry

_CODES, _PLAIN = ".weight_packed", ".weight"
_LISTED = 5


def check_quantized(source: str, wanted: Iterable[Entry], stored: Collection[str], ignore: Sequence[str]) -> None:
    """Compare the modules that `wanted` has in MXFP4 with those of the tensor names `stored`, as sets.

    ignore: of the file's quantization_config, as compressed-tensors reads it: a module's whole name, or `re:` and an
    expression that matches from its start. Raises Error, listing both differences, or the modules that `ignore` leaves
    out. A module that is not stored at all is not this function's.
    """
    ours = {name.removesuffix(_CODES) for entry in wanted if entry.packed for name in entry.stored() if _codes(name)}
    theirs = {name.removesuffix(_CODES) for name in stored if _codes(name)}
    plain = {module for module in ours - theirs if module + _PLAIN in stored}
    if theirs - ours or plain:
        raise Error(
            f"{source} and its config.json disagree on which modules are MXFP4; only in the file: "
            f"{_some(theirs - ours)}; only in the config: {_some(plain)}"
        )
    for rule in ignore:
        left_out = {module for module in ours if _matches(rule, module)}
        if left_out:
            raise Error(
                f"{source} has {_some(left_out)} in MXFP4, which {rule!r} in quantization_config.ignore leaves out"
            )


def _matches(rule: str, module: str) -> bool:
    if rule.startswith("re:"):
        return re.match(rule.removeprefix("re:"), module) is not None
    return rule == module


def _codes(name: str) -> bool:
    return name.endswith(_CODES)


def _some(names: Collection[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return (", ".join(listed[:_LISTED]) or "none") + more


__all__ = ["check_quantized"]
