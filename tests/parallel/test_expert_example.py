"""The example runs, and prints the same on virtual ranks and on processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "balanced_ep.py"


def losses(*command: str) -> list[float]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr
    assert "-> 1.00 of the mean" in done.stdout
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_the_example_is_the_same_in_one_process_and_in_two() -> None:
    one = losses(str(EXAMPLE), "--steps", "3", "--ranks", "2")
    run = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    two = losses(*run, str(EXAMPLE), "--steps", "3")
    assert len(one) == len(two) == 3
    # fp32; the router's gradient is summed in another order.
    assert all(abs(a - b) <= 1e-5 for a, b in zip(one, two, strict=True))
