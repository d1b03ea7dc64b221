"""What a sandbox may do: the options of `use = "docker"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from headrace.services.processes.docker.hardened import Limits, Positive, read_limits


class SandboxSettings(Limits):
    """A sandbox's options. They come from the recipe alone: no task can loosen them."""

    image: str
    """Image of a task that names none. It needs `sh` and `sleep`, and `python3` for `python`."""
    images: tuple[str, ...] = ()
    """Further images that tasks may name."""
    tool: str = "shell"
    """What an action is: `shell`, `python`, `calculator`, `coding`, `repair`, or a Tool of
    your own by import path."""
    tool_options: dict[str, Any] = Field(default={})
    """Keyword arguments of the tool."""
    network: str = "none"
    """A network of the engine. Anything but `none` is up to you to guard."""
    output_kb: Positive = 16
    """Most of a command's output that is kept, in KiB: its beginning and its end."""
    flood_kb: Positive = 4096
    """A command that writes more is ended."""
    command_s: float = Field(default=30.0, gt=0)
    """Seconds that a command has."""
    lifetime_s: Positive = 3600
    """Seconds after which a persistent sandbox is not used again."""


def read_settings(options: Mapping[str, Any]) -> SandboxSettings:
    """The recipe's options. UsageError names each that is wrong."""
    return read_limits(SandboxSettings, options, "options of environment 'docker'")
