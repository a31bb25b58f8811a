"""`perilune sandbox` against a service over the fake driver."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from perilune.cli import main, sandbox
from perilune.sandbox.assets import Assets
from perilune.sandbox.doctor import Check
from tests.sandbox.served import KEY, served

pytestmark = pytest.mark.timeout(60)
Say = Callable[..., str]


@pytest.fixture
def client(fake_root: Assets, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    with served(fake_root) as client:
        monkeypatch.setenv("PERILUNE_SANDBOX_URL", str(client.base_url))
        monkeypatch.setenv("PERILUNE_SANDBOX_KEY", KEY)
        yield client


@pytest.fixture
def say(client: httpx.Client, capfd: pytest.CaptureFixture[str]) -> Say:
    """Run a command that succeeds; returns what it prints."""

    def run(*words: str) -> str:
        code = main(["sandbox", *words])
        captured = capfd.readouterr()
        assert code == 0, captured.err
        return captured.out.strip()

    return run


def test_a_life(say: Say, client: httpx.Client) -> None:
    box = say("create", "--timeout", "90", "--metadata", "run=7", "--env", "A=1")
    assert say("exec", box, "--", "echo hello > /f; cat /f") == "hello"
    assert re.search(rf"^{box} +busybox +running +128 .* run=7$", say("ls"), re.M)
    say("pause", box)
    assert "paused" in say("ls")
    say("resume", box)
    assert say("exec", box, "--", "cat", "/f") == "hello"
    snapshot = say("snapshot", box, "--label", "one", "--barrier", "b")
    assert [row["snapshotID"] for row in json.loads(say("ls", "--snapshots", "--json"))] == [snapshot]
    kids = say("fork", box, "--count", "3").split()
    assert [say("exec", kid, "--", "cat /f") for kid in kids] == ["hello"] * 3
    assert json.loads(say("ls", "--json", "--metadata", "parent=" + box)) != []
    top = say("top", "--once")
    assert all(name in top for name in ("dirty MiB", "shared MiB", "private MiB", box, "4 in all"))
    say("rm", box, *kids)
    say("rm", "--snapshot", "one")
    assert json.loads(say("ls", "--json")) == []


def test_exit_codes_and_streams(say: Say, client: httpx.Client, capfd: pytest.CaptureFixture[str]) -> None:
    box = say("create")
    assert main(["sandbox", "exec", box, "--", "echo no >&2; exit 3"]) == 3
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "no\n")
    assert main(["sandbox", "exec", box, "--timeout", "0.2", "--", "sleep 9"]) == 137
    assert "the program's time was up" in capfd.readouterr().err
    # The program's own flags stay its own.
    assert say("exec", box, "--", "echo", "--debug", "--help") == "--debug --help"


def test_what_goes_wrong_is_one_line(client: httpx.Client, capfd: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["fly"], r"sandbox command 'fly' is unknown; allowed: create, ls, .* serve"),
        (["exec", "none", "--", "true"], r"no sandbox 'none'"),
        (["exec", "none"], r"command is missing; give it after `--`"),
        (["create", "windows"], r"no template 'windows'; there are: busybox"),
        (["create", "--metadata", "a"], r"--metadata is 'a'; it must be NAME=VALUE"),
        (["fork", "none", "--count", "99"], r"count: .* less than or equal to 16"),
        (["pause"], r"no sandbox is named"),
        (["ls", "--url", "ftp://x"], r"url is 'ftp://x'; it must begin with http"),
        (["ls", "--url", "http://127.0.0.1:1"], r"no service answers at .*perilune sandbox serve"),
        (["ls", "--", "x"], r"`--` is for the command of `sandbox exec`"),
        (["shell", "none"], r"stdin is no terminal"),
        (["serve", "--host", "0.0.0.0", "--pool", "-1"], r"--pool is -1; it must be 0 or more"),
    ):
        assert main(["sandbox", *words]) == 2, words
        err = capfd.readouterr().err.strip()
        assert "\n" not in err
        assert re.search(said, err), err


def test_the_key_is_needed(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERILUNE_SANDBOX_KEY", "wrong")
    assert main(["sandbox", "ls"]) == 2
    assert "X-API-Key" in capfd.readouterr().err


def test_doctor_prints_every_check(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    async def examine(assets: Assets) -> list[Check]:
        return [Check("qemu", True, "/usr/bin/qemu 10.0.2"), Check("network", False, "needs root")]

    monkeypatch.setattr("perilune.sandbox.doctor.examine", examine)
    assert main(["sandbox", "doctor"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^yes +qemu +/usr", out, re.M)
    assert re.search(r"^no +network +needs root", out, re.M)
    assert main(["sandbox", "doctor", "--json"]) == 0
    assert [row["works"] for row in json.loads(capfd.readouterr().out)] == [True, False]


def test_serve_before_setup_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERILUNE_SANDBOX", str(tmp_path))
    assert main(["sandbox", "serve", "--port", "0"]) == 2
    assert "perilune sandbox setup" in capfd.readouterr().err


def test_the_documented_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandbox-service.md").read_text("utf-8")
    lines = re.findall(r"^perilune sandbox (.*)$", page, re.M)
    assert len(lines) > 10
    for line in lines:
        ran: list[object] = []
        words = shlex.split(line)
        kind = sandbox.COMMANDS[words[0]]
        monkeypatch.setattr(kind, "run", lambda self, ran=ran: ran.append(self))
        sandbox.run(words)
        assert isinstance(ran[0], kind), line


def test_the_documented_program_runs(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("e2b", reason="E2B's SDK is not installed: pip install e2b")
    page = (Path(__file__).parents[2] / "docs" / "sandbox-service.md").read_text("utf-8")
    url = str(client.base_url)
    for name, value in (("API_URL", url), ("SANDBOX_URL", url), ("API_KEY", KEY)):
        monkeypatch.setenv(f"E2B_{name}", value)
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(compile(block, "sandbox-service.md", "exec"), {})
    assert client.get("/v2/sandboxes").json() == []
    assert 'route="/sandboxes/{sandbox_id}/fork",status="201"' in client.get("/metrics").text


BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "triton", "fastapi", "uvicorn", "prometheus_client", "pydantic"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from perilune.cli import main
sys.exit(main(["sandbox", *sys.argv[1:]]))
"""


def test_without_torch_and_without_the_services_packages(say: Say, client: httpx.Client) -> None:
    """All in a real process, its stdin a pipe that ends."""
    box = say("create")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "exec", box, "--", "cat"],
        input=b"through",
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"through"), done.stderr


def test_a_shell_in_a_terminal(say: Say, client: httpx.Client) -> None:
    """The terminal is raw while the shell runs, its size is the guest's, and it is as before at the end."""
    box = say("create")
    # The fake guest's shell ends with its input: what was typed is in its answer.
    leader, follower = pty.openpty()
    code = "from perilune.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "sandbox", "shell", box, "--program", "/bin/sh"]
    shell = subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=subprocess.PIPE)
    os.close(follower)
    try:
        deadline = time.monotonic() + 50
        while not client.get(f"/sandboxes/{box}/exec").json():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (one,) = client.get(f"/sandboxes/{box}/exec").json()
        assert one["cmd"] == ["/bin/sh", "-l"]
        os.write(leader, b"\x03")  # Ctrl-C is the guest's, not ours
        time.sleep(0.3)
        assert shell.poll() is None
        client.post(f"/sandboxes/{box}/exec/{one['pid']}/signal", json={"signal": 15})
        assert shell.wait(50) == 143
    finally:
        shell.kill()
        os.close(leader)
