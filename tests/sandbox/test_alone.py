"""The sandbox is usable alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "triton", "rich", "tyro", "fastapi"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import perilune.sandbox
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("perilune.")}
assert rooms == {"sandbox", "errors"}, rooms
"""


def test_nothing_else_is_imported() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", BLOCK], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
