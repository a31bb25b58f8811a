"""The folder of a run: whose it is, and which settings it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from perilune.errors import Error
from perilune.train.checkpoint import list_checkpoints, read_settings, remove_incomplete
from perilune.train.config import TrainConfig
from perilune.train.write import TEMPORARY, lock_folder, naming, write_whole

# Settings that a continued run may change: they do not touch what is computed.
_FREE = ("eval_every", "checkpoint_every", "keep", "parallel", "memory")


def claim(config: TrainConfig) -> IO[bytes]:
    """Lock the run's folder, check that it is of this run, and write its settings; the lock.

    Raises Error for a folder that holds a run of another config, in which another one is at work, or that cannot be
    written; it is not locked then.
    """
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise Error(f"out is {str(out)!r}, which cannot be written: {cause.strerror}") from None
    lock = lock_folder(out)
    try:
        remove_incomplete(out / "steps")
        settings = json.loads(json.dumps(config.to_dict()))
        path = out / "config.json"
        if list_checkpoints(out / "steps"):
            _compare(settings, read_settings(path), out)
        data = (json.dumps(settings, indent=1) + "\n").encode()
        with naming(path):
            path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)
            if not path.is_file() or path.read_bytes() != data:
                write_whole(path, data)
    except BaseException:
        lock.close()
        raise
    return lock


def _compare(now: dict[str, Any], before: dict[str, Any], out: Path) -> None:
    for name in sorted(now.keys() | before.keys()):
        if name not in _FREE and name != "out" and now.get(name) != before.get(name):
            raise Error(
                f"{out} holds a run whose {name} is {before.get(name)!r}, not {now.get(name)!r}; "
                f"choose another out, or remove that folder"
            )


__all__ = ["claim"]
