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
import stat
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
from perilune.sandbox.untar import extract, inside, put, remove

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def from_image(assets: Assets, name: str, image: Path, memory_mib: int = PYTHON_MIB) -> Template:
    """Make a template of an image, with what its configuration says about programs (image_config.py).

    Raises `ValueError` if it is no image, or if a layer leaves its root.
    """
    with contextlib.ExitStack() as stack:
        files = image
        if not image.is_dir():
            files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-image-")))
            with tarfile.open(image) as archive:
                extract(archive, files)
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-root-"))) / "root"
        root.mkdir(mode=0o755)
        config = of_image(configuration(files))
        for layer in layers(files):
            unpack(layer, root)
        inside(root, config.cwd).mkdir(parents=True, exist_ok=True)
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
    """Lay one layer over a root: first what it removes of the layers below (OCI image spec, layer.md), then its files.

    Links that are in the way are followed as in the image itself, where "/" is `root`. Devices are left out where
    they may not be made. Raises `ValueError` for a name with "..".
    """
    if layer.startswith(_GZIP):
        layer = gzip.decompress(layer)
    elif layer.startswith(_ZSTD):
        layer = subprocess.run([require("zstd"), "-dc"], input=layer, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        members = archive.getmembers()
        for member in members:
            if ".." in member.name.split("/"):
                raise ValueError(f"a layer has {member.name!r}, which leads out of its root")
            _hide(root, member.name)
        folders = []
        for member in members:
            place, name = os.path.split(member.name)
            if name.startswith(_WHITEOUT) or name in ("", "."):
                continue
            target = inside(root, place) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = None
            if member.islnk():
                folder, file = os.path.split(member.linkname)
                source = inside(root, folder) / file
                if not os.path.lexists(source):
                    raise ValueError(f"a layer has {member.name!r}, a link to {member.linkname!r}, which is not there")
            _make_node(member, target)
            if not member.isdev():
                put(archive, member, target, source)
            if member.isdir():
                folders.append((member, target))
            elif source is None and os.path.lexists(target):
                _give(member, target)
        # Last: one that its owner may not write must take its files first.
        for member, target in reversed(folders):
            _give(member, target)


def _hide(root: Path, name: str) -> None:
    """What a whiteout of this name removes."""
    place, last = os.path.split(name)
    if not last.startswith(_WHITEOUT):
        return
    folder, hidden = inside(root, place), last.removeprefix(_WHITEOUT)
    if last == _OPAQUE:
        for path in folder.iterdir() if folder.is_dir() else ():
            remove(path)
    elif hidden in ("", ".", ".."):
        raise ValueError(f"a layer has {name!r}, which removes no file")
    else:
        remove(folder / hidden)


def _make_node(member: tarfile.TarInfo, target: Path) -> None:
    if not member.isdev():
        return
    remove(target)
    kind = stat.S_IFIFO if member.isfifo() else stat.S_IFCHR if member.ischr() else stat.S_IFBLK
    with contextlib.suppress(PermissionError):
        os.mknod(target, kind | 0o600, os.makedev(member.devmajor, member.devminor))


def _give(member: tarfile.TarInfo, target: Path) -> None:
    """Owner and mode as the image has them."""
    if os.geteuid() == 0:
        os.chown(target, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        target.chmod(member.mode & 0o7777)


__all__ = ["configuration", "from_image", "layers", "unpack"]
