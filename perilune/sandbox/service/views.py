"""Sandboxes and snapshots as the JSON that E2B's clients read; fields of our own come last."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from perilune.sandbox.assets import Template
from perilune.sandbox.manager import Manager
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.states import State
from perilune.sandbox.store import Record

# The release of E2B's guest daemon whose requests are understood.
ENVD = "0.5.7"
_NEVER = "9999-12-31T23:59:59+00:00"
EVERYWHERE = ("0.0.0.0/0",)


def when(seconds: float | None) -> str:
    """Seconds since 1970 as ISO 8601; the far end of time for None."""
    return _NEVER if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def public_state(manager: Manager, record: Record) -> str:
    """ "running" or "paused": what is on its way between them counts as where it came from."""
    if record.state is State.PAUSED:
        return "paused"
    if record.state in (State.RESUMING, State.FORKING) and record.id not in manager.machines.running:
        return "paused"
    return "running"


def created(manager: Manager, record: Record, domain: str) -> dict[str, Any]:
    """A sandbox with its secrets: what create, connect and fork answer."""
    return {
        "sandboxID": record.id,
        "templateID": record.template,
        "clientID": "perilune",
        "envdVersion": ENVD,
        "envdAccessToken": manager.token(record.id, "access"),
        "trafficAccessToken": manager.token(record.id, "traffic"),
        "domain": domain,
    }


def listed(manager: Manager, records: Iterable[Record]) -> list[dict[str, Any]]:
    """Sandboxes in a list. Templates are read once for all: there may be thousands of sandboxes."""
    assets = manager.machines.assets
    least = assets.kernel().least_memory_mib
    known = {template.name: template for template in assets.templates()}
    return [_listed(manager, record, known.get(record.template), least) for record in records]


def _listed(manager: Manager, record: Record, template: Template | None, least_mib: int) -> dict[str, Any]:
    """phase: its exact state. reason: why it is in it. Sizes are 0 where the template has been removed."""
    memory = record.spec.get("memory_mib") or (max(template.memory_mib, least_mib) if template else 0)
    disk = record.spec.get("disk_mib") or (template.disk_mib if template else 0)
    return {
        "sandboxID": record.id,
        "templateID": record.template,
        "clientID": "perilune",
        "startedAt": when(record.created),
        "endAt": when(record.expires),
        "cpuCount": 1,
        "memoryMB": memory,
        "diskSizeMB": disk,
        "metadata": dict(record.metadata),
        "state": public_state(manager, record),
        "envdVersion": ENVD,
        "owner": record.owner,
        "phase": record.state.value,
        "reason": record.reason,
        "snapshotID": record.snapshot,
    }


def detail(manager: Manager, record: Record, domain: str) -> dict[str, Any]:
    """All that is known of a sandbox."""
    network = record.spec.get("network") or {}
    allow = list(network.get("allow", ()))
    (row,) = listed(manager, [record])
    return row | {
        "envdAccessToken": manager.token(record.id, "access"),
        "domain": domain,
        "allowInternetAccess": tuple(allow) == EVERYWHERE,
        "network": {"allowOut": allow, "denyOut": list(network.get("deny", ()))},
        "lifecycle": {
            "autoResume": bool(record.spec.get("auto_resume")),
            "onTimeout": record.spec.get("on_timeout", "pause"),
        },
    }


def snapshot(node: Snapshot) -> dict[str, Any]:
    """A snapshot; its label is its name."""
    return {
        "snapshotID": node.id,
        "names": [node.label] if node.label else [],
        "sandboxID": node.box,
        "templateID": node.template,
        "parentID": node.parent,
        "createdAt": when(node.created),
        "bytes": node.bytes,
        "label": node.label,
        "barrierID": node.barrier,
    }


__all__ = ["ENVD", "EVERYWHERE", "created", "detail", "listed", "public_state", "snapshot", "when"]
