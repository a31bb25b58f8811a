"""Root file systems out of image layouts and archives, as `skopeo copy` leaves them.

Three forms: a directory with `index.json` (oci:DIR), a tar file of one (oci-archive:FILE), and a tar file with
`manifest.json` (docker-archive:FILE). Layers are laid over each other; blobs are checked against their digests.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perilune.sandbox.assets import Assets, Template
from perilune.sandbox.image_config import of_image
from perilune.sandbox.packages import require
from perilune.sandbox.rootfs import PYTHON_MIB, pack
from perilune.sandbox.untar import require_filters

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def from_image(assets: Assets, name: str, image: Path, memory_mib: int = PYTHON_MIB) -> Template:
    """Make a template of an image, with what its configuration says about programs (image_config.py).

    Raises `ValueError` if it is no image, or if a layer leaves its root.
    Raises `Unavailable` before Python 3.11.4, as `unpack` does.
    """
    require_filters()
    with contextlib.ExitStack() as stack:
        files = image
        if not image.is_dir():
            files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-image-")))
            with tarfile.open(image) as archive:
                archive.extractall(files, filter="data")
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-root-"))) / "root"
        root.mkdir(mode=0o755)
        config = of_image(configuration(files))
        for layer in layers(files):
            unpack(layer, root)
        _inside(root, config.cwd).mkdir(parents=True, exist_ok=True)
        return pack(assets, name, root, memory_mib, config=config)


def layers(image: Path) -> Iterator[bytes]:
    """The layers' bytes, the lowest first."""
    if _is_layout(image):
        for entry in _manifest(image)["layers"]:
            yield _blob(image, entry["digest"])
    else:
        for name in _archived(image)["Layers"]:
            yield _member(image, name)


def configuration(image: Path) -> dict[str, Any]:
    """The image's configuration; empty if it has none."""
    if _is_layout(image):
        entry = _manifest(image).get("config")
        found = _blob(image, entry["digest"]) if entry else b"{}"
    else:
        name = _archived(image).get("Config")
        found = _member(image, name) if name else b"{}"
    parsed: dict[str, Any] = json.loads(found)
    return parsed


def _is_layout(image: Path) -> bool:
    return (image / "index.json").exists()


def _archived(image: Path) -> dict[str, Any]:
    path = image / "manifest.json"
    if not path.exists():
        raise ValueError(f"{image} is no image: it has neither index.json (OCI) nor manifest.json (docker-archive)")
    found: dict[str, Any] = json.loads(path.read_text())[0]
    return found


def _member(image: Path, name: str) -> bytes:
    path = (image / name).resolve()
    if not path.is_relative_to(image.resolve()):
        raise ValueError(f"{image}: its file {name!r} is outside of it")
    if not path.is_file():
        raise ValueError(f"{image} has no file {name!r}, which its manifest names")
    return path.read_bytes()


def _manifest(image: Path) -> dict[str, Any]:
    index = json.loads((image / "index.json").read_text())
    for _ in range(4):  # an index may name another one
        entries = [entry for entry in index["manifests"] if _ours(entry)]
        if not entries:
            raise ValueError(f"{image} has no manifest for linux/amd64")
        found: dict[str, Any] = json.loads(_blob(image, entries[0]["digest"]))
        if "layers" in found:
            return found
        index = found
    raise ValueError(f"{image}: its index leads to no manifest")


def _ours(entry: dict[str, Any]) -> bool:
    platform = entry.get("platform")
    return platform is None or (platform.get("os"), platform.get("architecture")) == ("linux", "amd64")


def _blob(image: Path, digest: str) -> bytes:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or len(value) != 64 or not value.isalnum():
        raise ValueError(f"{image}: digest {digest!r}; sha256 is what can be checked")
    data = (image / "blobs" / kind / value).read_bytes()
    if hashlib.sha256(data).hexdigest() != value:
        raise ValueError(f"{image}: blob {digest} does not match its digest")
    return data


def unpack(layer: bytes, root: Path) -> None:
    """Lay one layer over a root: its files, and what it removes."""
    require_filters()
    if layer.startswith(_GZIP):
        layer = gzip.decompress(layer)
    elif layer.startswith(_ZSTD):
        layer = subprocess.run([require("zstd"), "-dc"], input=layer, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        for member in archive:
            place, name = os.path.split(member.name)
            if name == _OPAQUE:
                for path in _inside(root, place).iterdir():
                    _remove(path)
            elif name.startswith(_WHITEOUT):
                _remove(_inside(root, place) / name.removeprefix(_WHITEOUT))
            else:
                target = _inside(root, place) / name
                if (name and target.is_symlink()) or (target.exists() and not (target.is_dir() and member.isdir())):
                    _remove(target)
                try:
                    archive.extract(member, root, filter="tar", numeric_owner=True)
                except tarfile.TarError as error:
                    raise ValueError(f"a layer was refused: {error}") from error


def _inside(root: Path, place: str) -> Path:
    path = (root / place.lstrip("/")).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ValueError(f"a layer has {place!r}, which leads out of its root")
    return path


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


__all__ = ["configuration", "from_image", "layers", "unpack"]
