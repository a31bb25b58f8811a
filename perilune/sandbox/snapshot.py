"""A snapshot: a manifest that names the layers of one instant, and is named by its own checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from perilune.sandbox.errors import BadSnapshot

VERSION = "1"


@dataclass(frozen=True)
class Snapshot:
    """memory, disks: ids of layers, oldest first. format: what the machine must be like to resume it.

    parent: the snapshot that this one was taken after. label, barrier: the caller's, to pair it with something else.
    bytes: size of the layers that are its own. created: seconds since 1970.
    """

    box: str
    parent: str | None
    template: str
    format: Mapping[str, str]
    memory: tuple[str, ...]
    disks: tuple[str, ...]
    state: str
    clean: bool
    created: float
    bytes: int
    label: str | None = None
    barrier: str | None = None
    id: str = ""

    def sealed(self) -> Snapshot:
        """With its id: the checksum of all the rest."""
        return replace(self, id=_digest(self))

    def layers(self) -> tuple[str, ...]:
        """Every layer that must be there."""
        return (*self.memory, *self.disks, self.state)


def _digest(snapshot: Snapshot) -> str:
    fields = {**asdict(snapshot), "version": VERSION}
    del fields["id"]
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def to_json(snapshot: Snapshot) -> str:
    """The manifest as text."""
    return json.dumps({**asdict(snapshot), "version": VERSION}, sort_keys=True)


def from_json(text: str) -> Snapshot:
    """Read a manifest; `BadSnapshot` if it is of another version or was changed."""
    fields = json.loads(text)
    version = fields.pop("version", None)
    if version != VERSION:
        raise BadSnapshot(f"snapshot {fields.get('id')}: its manifest has version {version}; this is {VERSION}")
    snapshot = Snapshot(**{**fields, "memory": tuple(fields["memory"]), "disks": tuple(fields["disks"])})
    if _digest(snapshot) != snapshot.id:
        raise BadSnapshot(f"snapshot {snapshot.id}: its manifest does not match its checksum")
    return snapshot


def check_format(snapshot: Snapshot, here: Mapping[str, str]) -> None:
    """Raise `BadSnapshot` with every fact that differs between where it was taken and here."""
    names = sorted({*snapshot.format, *here})
    differ = [
        f"{name} {snapshot.format.get(name)!r} (here {here.get(name)!r})"
        for name in names
        if not _same(name, snapshot.format.get(name), here.get(name))
    ]
    if differ:
        raise BadSnapshot(f"snapshot {snapshot.id} cannot be resumed here: it was taken with " + ", ".join(differ))


def _same(name: str, there: str | None, here: str | None) -> bool:
    if there is None or here is None or not name.endswith("_mhz"):
        return there == here
    return abs(int(there) - int(here)) <= 1  # a measured value


__all__ = ["Snapshot", "check_format", "from_json", "to_json"]
