"""Settings of every test: one thread, fixed seeds, no network, no time limit inside hypothesis."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import threading
from collections.abc import Iterator

# Before torch starts its threads: tests run one process a core, and sums keep one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import settings

# Triton's interpreter is switched on before any test's imports load Triton, which other libraries do too.
if importlib.util.find_spec("triton"):
    import triton_cpu  # noqa: F401

settings.register_profile("perilune", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.load_profile("perilune")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The same random numbers in every run and in any order of the tests."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A process group that a test leaves behind would make later tests of its process wait for ranks that are gone."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # Beside ranks that are gone it may never end.
        leaving = threading.Thread(target=distributed.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(20)
        pytest.fail("a test of this module left a process group of torch.distributed behind")


@pytest.fixture(autouse=True)
def nothing_is_hoarded(request: pytest.FixtureRequest) -> Iterator[None]:
    """What torch keeps of a large GPU test would be missing to the tests of other processes."""
    yield
    if request.node.get_closest_marker("gpu"):
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized() and cuda.memory_reserved() > 4 << 30:
            cuda.empty_cache()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `gpu` says why it did not run instead of failing on a machine without a GPU."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
