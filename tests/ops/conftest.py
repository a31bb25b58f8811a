"""The interpreter is switched on before any test's imports load Triton, which other libraries do too."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton"):
    import triton_cpu  # noqa: F401
