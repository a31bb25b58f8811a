"""Templates of images in the three forms, with layers that add, replace and remove; and images that lie."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from perilune.sandbox import Assets, GuestError, Manager, Sandbox, Unavailable
from perilune.sandbox.image_config import ImageConfig, of_image
from perilune.sandbox.oci import configuration, from_image, layers, unpack
from perilune.sandbox.packages import find
from perilune.sandbox.qemu import QemuDriver
from perilune.sandbox.transfer import _unpack
from perilune.sandbox.untar import require_filters
from tests.sandbox.worlds import run

needs_filters = pytest.mark.skipif(
    not hasattr(tarfile, "data_filter"), reason="Python before 3.11.4 cannot unpack archives safely"
)


def layer(**files: bytes | str) -> bytes:
    """A tar file: bytes are files, text is where a link points to; `__` stands for a slash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.mode = 0o755
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def blob(place: Path, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    folder = place / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / digest).write_bytes(data)
    return f"sha256:{digest}"


CONFIG = {
    "Env": ["PATH=/usr/games:/bin", "GREETING=hello world", "EMPTY="],
    "WorkingDir": "/srv/app",
    "User": "1000:users",
    "Entrypoint": ["/bin/sh", "-c"],
    "Cmd": ["echo $GREETING from $(pwd)"],
}


def layout(place: Path, *parts: bytes, config: object = CONFIG) -> Path:
    """An OCI layout, its manifest behind a second index as buildx writes it."""
    place.mkdir()
    manifest: dict[str, object] = {"layers": [{"digest": blob(place, gzip.compress(part))} for part in parts]}
    manifest["config"] = {"digest": blob(place, json.dumps({"config": config}).encode())}
    platform = {"os": "linux", "architecture": "amd64"}
    inner = {"manifests": [{"digest": blob(place, json.dumps(manifest).encode()), "platform": platform}]}
    outer = {"manifests": [{"digest": blob(place, json.dumps(inner).encode())}]}
    (place / "index.json").write_text(json.dumps(outer))
    return place


@needs_filters
def test_layers_add_replace_and_remove(tmp_path: Path) -> None:
    """Whiteouts of files and of whole folders; a link that is replaced is not followed."""
    root = tmp_path / "root"
    root.mkdir()
    first = {"etc__a": b"1", "etc__b": b"1", "opt__x": b"1", "opt__y": b"1", "link": "/etc/a"}
    unpack(layer(**first), root)
    unpack(
        layer(**{"etc__a": b"2", "etc__.wh.b": b"", "opt__.wh..wh..opq": b"", "opt__z": b"2", "link": b"file"}), root
    )
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert found == {"etc/a": b"2", "opt/z": b"2", "link": b"file"}


@needs_filters
@pytest.mark.parametrize("bad", [{"..__evil": b"x"}, {"d": "/tmp", "d__evil": b"x"}, {"d": "..", "d__.wh.other": b""}])
def test_layers_that_lead_out_are_refused(tmp_path: Path, bad: dict[str, bytes | str]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "other").write_text("kept")
    with pytest.raises(ValueError, match="layer"):
        unpack(layer(**bad), root)
    assert (tmp_path / "other").exists()
    assert not (tmp_path / "evil").exists()
    assert not Path("/tmp/evil").exists()


def test_blobs_are_checked(tmp_path: Path) -> None:
    image = layout(tmp_path / "image", layer(a=b"1"))
    for path in (image / "blobs" / "sha256").iterdir():
        if path.read_bytes().startswith(b"\x1f\x8b"):
            path.write_bytes(gzip.compress(layer(a=b"2")))
    with pytest.raises(ValueError, match="does not match its digest"):
        list(layers(image))
    with pytest.raises(ValueError, match="no image"):
        list(layers(tmp_path))
    (tmp_path / "manifest.json").write_text('[{"Config": "c.json", "Layers": ["../l.tar"]}]')
    with pytest.raises(ValueError, match=r"no file 'c\.json'"):
        configuration(tmp_path)
    with pytest.raises(ValueError, match="outside"):
        list(layers(tmp_path))


async def said_by_its_config(box: Sandbox) -> None:
    """Its own program; its defaults; what the sandbox and the call say comes before them."""
    assert (await box.exec()).text == "hello world from /srv/app\n"
    seen = "echo $PATH $GREETING $EMPTY; pwd; busybox id -u; busybox id -g"
    shown = (await box.exec(seen)).text
    assert shown == "/usr/games:/bin hello world 2\n/srv/app\n1000\n100\n"
    given = await box.exec(seen, env={"GREETING": "hi", "EMPTY": "3"}, cwd="/etc", user="root")
    assert given.text == "/usr/games:/bin hi 3\n/etc\n0\n0\n"
    assert (await box.exec(["/bin/busybox", "id", "-u"], user="7")).text == "7\n"
    for user in ("nobody-there", "1000:nobody-there"):
        with pytest.raises(GuestError, match=user):
            await box.exec("true", user=user)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"Env": ["A"]}, "Env has 'A'"),
        ({"Env": "A=1"}, "Env is 'A=1'"),
        ({"WorkingDir": "app"}, "WorkingDir is 'app'"),
        ({"User": 7}, "User is 7"),
        ({"Cmd": "run"}, "Cmd is 'run'"),
        ({"Entrypoint": [1]}, "Entrypoint is"),
    ],
)
def test_a_configuration_says_what_is_wrong(config: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of_image({"config": config})


def test_a_configuration_may_be_empty() -> None:
    for empty in ({}, {"config": None}, {"config": {"Env": None, "Cmd": None, "User": "", "WorkingDir": ""}}):
        assert of_image(empty) == ImageConfig()
    full = of_image({"config": CONFIG})
    assert ImageConfig.of(json.loads(json.dumps(full.plain()))) == full


@needs_filters
def test_an_image_becomes_a_template(qemu_root: Assets, place: Path) -> None:
    """A layout, and archives of both kinds, boot and show their files."""
    busybox = find("busybox")
    assert busybox is not None
    base = layer(**{"bin__busybox": Path(busybox).read_bytes(), "bin__sh": "/bin/busybox", "bin__cat": "/bin/busybox"})
    top = layer(etc__who=b"image\n", etc__group=b"root:x:0:\nusers:x:100:\n")
    image = layout(place / "image", base, top)
    archive = place / "image.tar"
    with tarfile.open(archive, "w") as file:
        file.add(image, arcname=".")
    docker = place / "docker"
    docker.mkdir()
    (docker / "one.tar").write_bytes(base)
    (docker / "two.tar").write_bytes(top)
    (docker / "c.json").write_text(json.dumps({"config": {"Env": ["WHO=docker"], "User": ""}}))
    (docker / "manifest.json").write_text(json.dumps([{"Config": "c.json", "Layers": ["one.tar", "two.tar"]}]))
    with tarfile.open(place / "docker.tar", "w") as file:
        file.add(docker, arcname=".")
    templates = qemu_root.root / "templates"
    shared = templates.resolve()
    templates.unlink()
    shutil.copytree(shared, templates)
    least = qemu_root.kernel().least_memory_mib
    names = {"layout": image, "archive": archive, "docker": place / "docker.tar"}
    for name, path in names.items():
        from_image(qemu_root, name, path, memory_mib=max(least, 128))

    async def test() -> None:
        manager = await Manager.open(qemu_root, QemuDriver(qemu_root.confine))
        try:
            async with Sandbox.create("docker", manager=manager) as box:
                assert (await box.exec("cat /etc/who; echo $WHO; pwd")).text == "image\ndocker\n/\n"
                with pytest.raises(ValueError, match="no program of its own"):
                    await box.exec()
            async with Sandbox.create("layout", manager=manager, env={"EMPTY": "2"}) as box:
                await said_by_its_config(box)
                await box.pause()
                await box.resume()
                (kid,) = await box.fork(1)
                await said_by_its_config(kid)
                await kid.checkpoint("of-an-image")
                await kid.kill()
            async with Sandbox.create(snapshot="of-an-image", manager=manager, env={"EMPTY": "2"}) as box:
                await said_by_its_config(box)
        finally:
            await manager.close()

    run(test())
    digests = {name: qemu_root.template(name).digest for name in names}
    assert len(digests) == 3


def test_without_safe_unpacking_nothing_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    for call in (require_filters, lambda: unpack(b"", tmp_path), lambda: _unpack(b"", tmp_path / "new")):
        with pytest.raises(Unavailable, match=r"needs Python 3\.11\.4"):
            call()
    assert list(tmp_path.iterdir()) == []
