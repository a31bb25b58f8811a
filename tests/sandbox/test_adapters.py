"""Adapters keep the contracts of the classes that they implement: what SWE-ReX's own local runtime does, ours does in
a guest; Harbor's base class finds in ours what it asks of every environment."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perilune.sandbox.assets import Assets
from perilune.sandbox.manager import Manager
from perilune.sandbox.options import Limits
from perilune.sandbox.qemu import QemuDriver
from tests.sandbox.served import ServedDriver
from tests.sandbox.worlds import run

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def guests(assets: Assets, accel: str) -> AsyncIterator[Manager]:
    manager = await Manager.open(assets, QemuDriver(assets.confine, accel), Limits(memory=2 << 30))
    try:
        yield manager
    finally:
        await manager.close()


# SWE-ReX


def rex() -> Any:
    return pytest.importorskip("swerex.runtime.abstract", reason="SWE-ReX is not installed: pip install swe-rex")


def lines(observation: Any) -> list[str]:
    """Lines of output that are not empty: SWE-ReX's own terminal adds empty ones."""
    return [line.strip() for line in observation.output.split("\n") if line.strip()]


async def _sessions(runtime: Any, place: str) -> None:
    """What a session promises, as SWE-ReX's own runtime keeps it."""
    rex_, errors = rex(), __import__("swerex.exceptions").exceptions
    assert await runtime.is_alive()

    async def sh(command: str, **fields: Any) -> Any:
        return await runtime.run_in_session(rex_.BashAction(command=command, **{"timeout": 20, **fields}))

    with pytest.raises(errors.SessionDoesNotExistError):
        await sh("true")
    await runtime.create_session(rex_.CreateBashSessionRequest(startup_timeout=10))
    with pytest.raises(errors.SessionExistsError):
        await runtime.create_session(rex_.CreateBashSessionRequest())
    said = await sh("echo hello; echo also >&2")
    assert sorted(said.output.split()) == ["also", "hello"]
    assert said.exit_code == 0
    await sh(f"mkdir -p {place}/d && cd {place}/d && export A='b c'")
    assert lines(await sh("pwd; echo $A")) == [f"{place}/d", "b c"]
    with pytest.raises(errors.NonZeroExitCodeError, match="it failed"):
        await sh("(exit 3)", error_msg="it failed")
    assert (await sh("(exit 3)", check="silent")).exit_code == 3
    assert (await sh("(exit 3)", check="ignore")).exit_code is None
    assert (await sh("for i in 1 2 3\ndo echo $i\ndone")).output.split() == ["1", "2", "3"]
    assert lines(await sh("cat << 'EOF'\na\n$b 'c'\nEOF")) == ["a", "$b 'c'"]
    assert (await sh('echo "\'\\"é"')).output.strip() == "'\"é"
    with pytest.raises(errors.BashIncorrectSyntaxError):
        await sh("if true; then (")
    assert (await sh("echo still here")).output.strip() == "still here"
    with pytest.raises(errors.CommandTimeoutError):
        await sh("sleep 30", timeout=0.4)
    interrupted = await runtime.run_in_session(rex_.BashInterruptAction(timeout=2, n_retry=5))
    assert interrupted.exit_code == 0
    assert (await sh("echo after")).output.strip() == "after"
    # Two sessions do not mix.
    await runtime.create_session(rex_.CreateBashSessionRequest(session="two", startup_timeout=10))
    assert (await sh("echo [$A]", session="two")).output.strip() == "[]"
    await runtime.close_session(rex_.CloseBashSessionRequest(session="two"))
    with pytest.raises(errors.SessionDoesNotExistError):
        await sh("true", session="two")
    # A program that asks, and is answered.
    asked = await sh("sh -c 'printf \"name? \"; read n; echo hi $n'", is_interactive_command=True, expect=[r"name\? "])
    assert asked.expect_string == r"name\? "
    answered = await sh("Bob", is_interactive_command=True)
    assert answered.output.strip().endswith("hi Bob")
    await runtime.close()


async def _programs_and_files(runtime: Any, place: str, here: Path) -> None:
    rex_, errors = rex(), __import__("swerex.exceptions").exceptions
    command = rex_.Command
    said = await runtime.execute(command(command=["sh", "-c", "echo out; echo err >&2; exit 4"]))
    assert (said.stdout, said.stderr, said.exit_code) == ("out\n", "err\n", 4)
    assert (await runtime.execute(command(command="echo $((1 + 1))", shell=True))).stdout == "2\n"
    env = {"A": "b", "PATH": "/usr/bin:/bin"}
    assert (await runtime.execute(command(command="echo $A; pwd", shell=True, env=env, cwd="/"))).stdout == "b\n/\n"
    merged = await runtime.execute(command(command=["sh", "-c", "echo 1; echo 2 >&2"], merge_output_streams=True))
    assert (merged.stdout, merged.stderr) == ("1\n2\n", "")
    with pytest.raises(errors.NonZeroExitCodeError, match="bad"):
        await runtime.execute(command(command=["false"], check=True, error_msg="bad"))
    with pytest.raises(errors.CommandTimeoutError):
        await runtime.execute(command(command=["sleep", "30"], timeout=0.3))
    await runtime.write_file(rex_.WriteFileRequest(path=f"{place}/x/y", content="text é"))
    assert (await runtime.read_file(rex_.ReadFileRequest(path=f"{place}/x/y"))).content == "text é"
    latin = await runtime.read_file(rex_.ReadFileRequest(path=f"{place}/x/y", encoding="latin-1"))
    assert latin.content == "text é".encode().decode("latin-1")
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(rex_.ReadFileRequest(path=f"{place}/none"))
    (here / "folder" / "in").mkdir(parents=True)
    (here / "folder" / "in" / "f").write_text("deep")
    for name, target in (("folder", "up"), ("folder/in/f", "one")):
        await runtime.upload(rex_.UploadRequest(source_path=str(here / name), target_path=f"{place}/{target}"))
    for path in ("up/in/f", "one"):
        assert (await runtime.read_file(rex_.ReadFileRequest(path=f"{place}/{path}"))).content == "deep"


Contract = Callable[..., Awaitable[None]]


def test_the_contract_is_what_swe_rexs_own_runtime_does(tmp_path: Path) -> None:
    """Else the tests below would ask for something that SWE-ReX does not promise."""
    rex()
    from swerex.runtime.local import LocalRuntime

    async def work() -> None:
        await _programs_and_files(LocalRuntime(), str(tmp_path / "place"), tmp_path)
        await _sessions(LocalRuntime(), str(tmp_path / "place"))

    run(work())


def test_swe_rex_in_a_guest(request: pytest.FixtureRequest, qemu_root: Assets, tmp_path: Path) -> None:
    rex()
    from swerex.exceptions import DeploymentNotStartedError

    from perilune.sandbox.adapters.swerex import SandboxDeployment

    async def work() -> None:
        async with guests(qemu_root, request.config.getoption("--accel", "tcg")) as manager:
            deployment = SandboxDeployment(template="busybox", manager=manager)
            with pytest.raises(DeploymentNotStartedError):
                _ = deployment.runtime
            await deployment.start()
            try:
                await _programs_and_files(deployment.runtime, "/root/place", tmp_path)
                await _sessions(deployment.runtime, "/root/place")
                await _over_a_pause(deployment)
            finally:
                await deployment.stop()
            await deployment.stop()
            assert manager.store.boxes() == []

    run(work(), 100.0)


async def _over_a_pause(deployment: Any) -> None:
    """A session goes on after its sandbox was paused."""
    rex_ = rex()
    runtime = deployment.runtime
    await runtime.create_session(rex_.CreateBashSessionRequest())
    await runtime.run_in_session(rex_.BashAction(command="A=kept", timeout=20))
    await deployment.box.pause()
    assert not await runtime.is_alive()
    await deployment.box.resume()
    said = await runtime.run_in_session(rex_.BashAction(command="echo $A", timeout=20))
    assert said.output.strip() == "kept"


def test_swe_rexs_classes_are_implemented_whole() -> None:
    rex_ = rex()
    from swerex.deployment.abstract import AbstractDeployment

    from perilune.sandbox.adapters.swerex import SandboxDeployment, SandboxRuntime

    for ours, theirs in ((SandboxRuntime, rex_.AbstractRuntime), (SandboxDeployment, AbstractDeployment)):
        assert not inspect.isabstract(ours)
        for name in theirs.__abstractmethods__:
            if inspect.isfunction(getattr(theirs, name)):
                wanted = list(inspect.signature(getattr(theirs, name)).parameters)
                assert list(inspect.signature(getattr(ours, name)).parameters) == wanted, name


# Harbor


@pytest.mark.skipif(
    sys.version_info < (3, 12) or importlib.util.find_spec("harbor") is None,
    reason="Harbor needs Python 3.12 and `pip install harbor`",
)
def test_harbor_in_a_guest(fake_root: Assets, tmp_path: Path) -> None:
    """Its base class accepts ours, and every verb does what its words say, over the fake driver."""
    from harbor.environments.base import BaseEnvironment
    from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
    from harbor.models.trial.paths import TrialPaths

    from perilune.sandbox.adapters.harbor import SandboxEnvironment

    assert not inspect.isabstract(SandboxEnvironment)
    for name in BaseEnvironment.__abstractmethods__:
        wanted = list(inspect.signature(getattr(BaseEnvironment, name)).parameters)
        assert list(inspect.signature(getattr(SandboxEnvironment, name)).parameters) == wanted, name
    (tmp_path / "environment").mkdir()

    def made(manager: Manager | None, **options: Any) -> Any:
        return SandboxEnvironment(
            environment_dir=tmp_path / "environment",
            environment_name="task",
            session_id="task__1__env",
            trial_paths=TrialPaths(tmp_path / "trial"),
            task_env_config=EnvironmentConfig(),
            manager=manager,
            network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
            **options,
        )

    with pytest.raises(FileNotFoundError, match="neither `template` nor"):
        made(None)

    async def work() -> None:
        manager = await Manager.open(fake_root, ServedDriver(), Limits(memory=1 << 40))
        environment = made(manager, template="busybox", persistent_env={"A": "1"})
        with pytest.raises(RuntimeError, match="not started"):
            await environment.exec("true")
        await environment.start(force_build=False)
        await environment.start(force_build=True)
        assert len(manager.store.boxes()) == 1
        said = await environment.exec("echo hello; cat /none")
        assert (said.stdout, said.return_code) == ("hello\n", 1)
        assert "No such file" in said.stderr
        assert (await environment.exec("sleep 30", timeout_sec=1)).return_code == 124
        heard: list[tuple[str, str]] = []

        async def hear(text: str, stream: str) -> None:
            heard.append((stream, text))

        with environment.scoped_output_callback(hear):
            await environment.exec("echo heard")
        assert heard == [("stdout", "heard\n")]
        (tmp_path / "f").write_bytes(b"\x00data")
        await environment.upload_file(tmp_path / "f", "/g")
        await environment.download_file("/g", tmp_path / "new" / "h")
        assert (tmp_path / "new" / "h").read_bytes() == b"\x00data"
        with pytest.raises(FileNotFoundError):
            await environment.download_file("/none", tmp_path / "i")
        with pytest.raises(FileNotFoundError):
            await environment.upload_file(tmp_path / "none", "/g")
        base = await environment.checkpoint("base")
        await environment.exec("echo changed > /g")
        await environment.restore(base)
        assert (await environment.exec("cat /g")).stdout == "\x00data"
        await environment.set_network_policy(
            NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["1.1.1.1", "*.example.org"])
        )
        assert manager.store.boxes()[0].spec["network"]["allow"] == ["1.1.1.1", "*.example.org"]
        await environment.stop(delete=False)
        assert [record.state.value for record in manager.store.boxes()] == ["paused"]
        await environment.stop(delete=True)
        await manager.close()

    asyncio.run(asyncio.wait_for(work(), 60))
