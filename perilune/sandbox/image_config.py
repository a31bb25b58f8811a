"""What a template says about its programs: their environment, directory and user, and which one it is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from perilune.sandbox.driver import Command


@dataclass(frozen=True)
class ImageConfig:
    """Defaults of every program of a template. user: USER or USER:GROUP, by name or number. argv: its own program."""

    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "root"
    argv: tuple[str, ...] = ()

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> ImageConfig:
        """From plain JSON, as `plain` writes it."""
        return cls(**{**stored, "argv": tuple(stored.get("argv", ()))})

    def plain(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "argv": list(self.argv)}


def of_image(config: Mapping[str, Any]) -> ImageConfig:
    """The part of an image's configuration that programs see (OCI image spec, config.md: Env, WorkingDir, User,
    Entrypoint and Cmd); raises `ValueError` naming a field of another form."""
    given = config.get("config") or {}
    env = {}
    for entry in _texts(given, "Env"):
        name, sign, value = entry.partition("=")
        if not (name and sign):
            raise ValueError(f"the image's Env has {entry!r}; it must be NAME=VALUE")
        env[name] = value
    cwd, user = (given.get(name) or default for name, default in (("WorkingDir", "/"), ("User", "root")))
    for name, value in (("WorkingDir", cwd), ("User", user)):
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"the image's {name} is {value!r}; it must be text")
    if not cwd.startswith("/"):
        raise ValueError(f"the image's WorkingDir is {cwd!r}; it must begin with '/'")
    return ImageConfig(env, cwd, user, (*_texts(given, "Entrypoint"), *_texts(given, "Cmd")))


def _texts(config: Mapping[str, Any], name: str) -> list[str]:
    found = config.get(name) or []
    if not isinstance(found, list) or not all(isinstance(text, str) and "\0" not in text for text in found):
        raise ValueError(f"the image's {name} is {found!r}; it must be a list of texts")
    return found


def with_defaults(command: Command, image: ImageConfig, env: Mapping[str, str]) -> Command:
    """A command as a guest runs it: what it leaves open is the sandbox's `env`, then the template's.

    Raises `ValueError` if neither the command nor the template names a program.
    """
    argv = command.argv if isinstance(command.argv, str) else tuple(command.argv)
    if argv == ():
        if not image.argv:
            raise ValueError("argv is empty, and the template has no program of its own")
        argv = image.argv
    return replace(
        command,
        argv=argv,
        env={**image.env, **env, **command.env},
        cwd=command.cwd or image.cwd,
        user=command.user or image.user,
    )


__all__ = ["ImageConfig", "of_image", "with_defaults"]
