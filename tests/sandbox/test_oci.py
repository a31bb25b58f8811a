"""Templates of images in the three forms, with layers that add, replace and remove; and images that lie."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from perilune.sandbox import Assets, GuestError, Manager, Sandbox
from perilune.sandbox.image_config import ImageConfig, of_image
from perilune.sandbox.oci import configuration, from_image, layers, unpack
from perilune.sandbox.packages import find
from perilune.sandbox.qemu import QemuDriver
from perilune.sandbox.transfer import _unpack
from tests.sandbox.worlds import run


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


@pytest.mark.parametrize("bad", [{"..__evil": b"x"}, {"a__.wh...": b""}, {".wh..": b""}, {".wh.": b""}])
def test_layers_that_lead_out_are_refused(tmp_path: Path, bad: dict[str, bytes | str]) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (tmp_path / "other").write_text("kept")
    with pytest.raises(ValueError, match="layer"):
        unpack(layer(**bad), root)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "other", "root"]


def test_links_of_an_image_lead_nowhere_else(tmp_path: Path) -> None:
    """An absolute one begins at the image's root (Debian's /var/run is one), ".." ends there, both may be passed."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "other").write_text("kept")
    first = {"run__a": b"1", "var__run": "/run", "up": "../../..", "loop": "loop", "host": str(tmp_path)}
    unpack(layer(**first), root)
    second = {"var__run__b": b"2", "var__run__.wh.a": b"", "up__c": b"3", "up__.wh.other": b"", "host__d": b"4"}
    unpack(layer(**second), root)
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert found == {"run/b": b"2", "c": b"3", f"{str(tmp_path)[1:]}/d": b"4"}
    assert [path.name for path in tmp_path.iterdir() if path != root] == ["other"]
    with pytest.raises(ValueError, match="links"):
        unpack(layer(loop__x=b""), root)


def test_a_whiteout_is_of_the_layers_below(tmp_path: Path) -> None:
    """In whatever order a layer has them, its own files stay (OCI image spec, layer.md)."""
    unpack(layer(d__old=b"1", e=b"1"), tmp_path)
    unpack(
        layer(**{"d__new": b"2", "d__.wh..wh..opq": b"", "e": b"2", ".wh.e": b"", "none__.wh..wh..opq": b""}), tmp_path
    )
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"d/new": b"2", "e": b"2"}


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, data: bytes = b"") -> Any:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    info.devmajor, info.devminor = 1, 3
    return info, io.BytesIO(data)


def archived(*members: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for one in members:
            archive.addfile(*one)
    return buffer.getvalue()


def test_modes_hard_links_and_nodes_of_a_layer(tmp_path: Path) -> None:
    """Modes stay whole (/tmp, sudo); a hard link is of a file of any layer, whatever links are in its way; replacing
    one name leaves the other; devices are made where they may be."""
    unpack(
        archived(
            member("usr", tarfile.DIRTYPE, mode=0o755),
            member("bin", tarfile.SYMTYPE, "/usr"),
            member("usr/su", mode=0o4755, data=b"su"),
            member("tmp", tarfile.DIRTYPE, mode=0o1777),
            member("shut", tarfile.DIRTYPE, mode=0o555),
            member("shut/file", data=b"x"),
            member("pipe", tarfile.FIFOTYPE),
            member("null", tarfile.CHRTYPE, mode=0o666),
        ),
        tmp_path,
    )
    unpack(archived(member("other", tarfile.LNKTYPE, "bin/su"), member("ln", tarfile.LNKTYPE, "bin")), tmp_path)
    assert (tmp_path / "usr" / "su").stat().st_mode & 0o7777 == 0o4755
    assert (tmp_path / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert (tmp_path / "shut").stat().st_mode & 0o7777 == 0o555
    assert (tmp_path / "other").stat().st_ino == (tmp_path / "usr" / "su").stat().st_ino
    assert (tmp_path / "ln").readlink() == Path("/usr")
    assert (tmp_path / "pipe").is_fifo()
    assert os.geteuid() != 0 or not (tmp_path / "null").exists() or (tmp_path / "null").is_char_device()
    unpack(archived(member("other", data=b"new")), tmp_path)
    assert (tmp_path / "usr" / "su").read_bytes() == b"su"
    with pytest.raises(ValueError, match="not there"):
        unpack(archived(member("x", tarfile.LNKTYPE, "no/such")), tmp_path)
    (tmp_path / "shut").chmod(0o755)


# What a guest may send for a folder. Each is refused, and nothing is outside of the folder afterwards.
LIES = {
    "absolute link": [member("l", tarfile.SYMTYPE, "/etc")],
    "link up": [member("d/l", tarfile.SYMTYPE, "../..")],
    "link down and up": [member("d/s", tarfile.SYMTYPE, ".."), member("t", tarfile.SYMTYPE, "d/s/../x")],
    "through a link": [member("l", tarfile.SYMTYPE, "d"), member("l/f", data=b"x")],
    "up": [member("../f", data=b"x")],
    "hard link out": [member("h", tarfile.LNKTYPE, "../other")],
    "hard link to a link": [member("l", tarfile.SYMTYPE, "d"), member("h", tarfile.LNKTYPE, "l")],
    "hard link to nothing": [member("h", tarfile.LNKTYPE, "none")],
    "device": [member("n", tarfile.CHRTYPE)],
    "pipe": [member("p", tarfile.FIFOTYPE)],
    "a file in a folder's place": [member("kept", data=b"x")],
}


@pytest.mark.parametrize("lie", LIES)
def test_archives_that_lead_out_are_refused(tmp_path: Path, lie: str) -> None:
    folder = tmp_path / "folder"
    (folder / "kept").mkdir(parents=True)
    (tmp_path / "other").write_text("kept")
    with pytest.raises(GuestError, match="refused"):
        _unpack(archived(*LIES[lie]), folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "other"]
    assert (tmp_path / "other").stat().st_nlink == 1
    assert (folder / "kept").is_dir()


@pytest.mark.parametrize("data", [gzip.compress(bytes(10240)), b"no archive" * 100], ids=["compressed", "garbage"])
def test_what_is_no_plain_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    """A few compressed megabytes could be terabytes to look through: tar was asked for none."""
    with pytest.raises(GuestError, match="refused"):
        _unpack(data, tmp_path / "folder")


def test_a_chain_of_links_longer_than_a_path(tmp_path: Path) -> None:
    """CVE-2025-4517: names that cannot be resolved any more lead out of the folder; what is written stays inside."""
    folder = tmp_path / "folder"
    deep = "d" * 247
    members, place = [], ""
    for letter in "abcdefghijklmnop":
        members.append(member(f"{place}{deep}", tarfile.DIRTYPE, mode=0o755))
        members.append(member(f"{place}{letter}", tarfile.SYMTYPE, deep))
        place += f"{deep}/"
    chain = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    members.append(member(chain, tarfile.SYMTYPE, "../" * 16))
    members.append(member("escape", tarfile.SYMTYPE, f"{chain}/.."))
    members.append(member("flag", tarfile.LNKTYPE, "escape/other"))
    members.append(member("flag", data=b"written"))
    (tmp_path / "other").write_text("kept")
    with pytest.raises(GuestError, match="refused"):
        _unpack(archived(*members), folder)
    assert (tmp_path / "other").read_text() == "kept"


def test_a_folder_comes_as_it_was(tmp_path: Path) -> None:
    """Files, empty folders, links beside and below, hard links, an older file that is replaced and not written over."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "f").write_text("old")
    os.link(folder / "f", tmp_path / "other")
    _unpack(
        archived(
            member("./d/e", tarfile.DIRTYPE, mode=0o755),
            member("/f", data=b"1", mode=0o6777),
            member("d/up", tarfile.SYMTYPE, "../f"),
            member("down", tarfile.SYMTYPE, "./d"),
            member("h", tarfile.LNKTYPE, "./f"),
            member("h", tarfile.LNKTYPE, "h"),
        ),
        folder,
    )
    assert (tmp_path / "other").read_text() == "old"
    assert (folder / "f").read_text() == "1"
    assert (folder / "f").stat().st_mode & 0o7777 == 0o755
    assert (folder / "d" / "up").read_text() == "1"
    assert (folder / "down").readlink() == Path("d")
    assert (folder / "h").stat().st_ino == (folder / "f").stat().st_ino
    assert list((folder / "d" / "e").iterdir()) == []


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
