"""`perilune sandbox setup`: everything that machines need, from Debian's packages, with a word at every step."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.sandbox import kernel, rootfs
from perilune.sandbox.assets import Assets
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.packages import PROGRAMS, Apt, Progress, missing

TEMPLATES = ("busybox", "python")


def setup(assets: Assets, progress: Progress, templates: Sequence[str] = TEMPLATES, kernel_name: str = "tiny") -> None:
    """Install missing packages, build helpers, kernel and templates. What is there already is left as it is."""
    for name in templates:
        if name not in TEMPLATES:
            raise SandboxError(f"template {name!r} cannot be built; there are: {', '.join(TEMPLATES)}")
    assets.root.mkdir(parents=True, exist_ok=True, mode=0o711)
    apt = Apt(assets.root / "apt")
    packages = missing(PROGRAMS)
    if packages:
        apt.install(packages, progress)
    progress("building the guest's agent")
    assets.compile()
    installed = kernel.install(assets, kernel_name, apt, progress)
    progress(f"kernel {installed.name} {installed.version}")
    known = {template.name for template in assets.templates()}
    if "busybox" in templates and "busybox" not in known:
        rootfs.busybox(assets, progress)
    if "python" in templates and "python" not in known:
        rootfs.python(assets, apt, progress)
    for template in assets.templates():
        assets.disk(template.disk_mib)


__all__ = ["TEMPLATES", "setup"]
