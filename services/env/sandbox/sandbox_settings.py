"""The options of `use = "docker"`: what a sandbox may do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from headrace.services.processes.docker.hardened import Limits, Positive, read_limits


class SandboxSettings(Limits):
    """The options of a sandbox. Only the recipe sets them: no task can loosen them."""

    image: str
    """Image for tasks that name none. It needs `sh` and `sleep`, and `python3` for most tools."""
    images: tuple[str, ...] = ()
    """Further images that tasks may name."""
    tool: str = "shell"
    """What an action is: `shell`, `python`, `coding`, `repair`, or the import path of
    your own Tool."""
    tool_options: dict[str, Any] = Field(default={})
    """Keyword arguments of the tool."""
    network: str = "none"
    """A network of the engine. If it is not `none`, guarding what it reaches is up to you."""
    output_kb: Positive = 16
    """Most of a command's output that is kept, in KiB: its beginning and its end."""
    flood_kb: Positive = 4096
    """A command that writes more than this, in KiB, is killed."""
    command_s: float = Field(default=30.0, gt=0)
    """Seconds that a command may run."""
    lifetime_s: Positive = 3600
    """Seconds after which a persistent sandbox is not used again."""


def read_settings(options: Mapping[str, Any]) -> SandboxSettings:
    """Read the recipe's options. Raises UsageError, which names each wrong one."""
    return read_limits(SandboxSettings, options, "options of environment 'docker'")
