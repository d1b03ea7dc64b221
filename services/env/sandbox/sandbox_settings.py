"""The options of `use = "docker"`: what a sandbox may do, and what its engine must support."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from headrace.errors import UsageError
from headrace.services.processes.docker.hardened import Limits, Positive

ENFORCED = ("MemoryLimit", "PidsLimit", "CpuCfsQuota")
"""Limits that an engine must support. If it doesn't, its own API only gives a warning."""


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


def require_fit(info: Mapping[str, Any], runtime: str) -> None:
    """Raise UsageError unless the engine can enforce the limits of a sandbox."""
    runtimes = info.get("Runtimes") or {}
    if runtime and runtime not in runtimes:
        have = ", ".join(sorted(runtimes))
        raise UsageError(f"the Docker engine has no runtime {runtime!r}; it has {have}")
    missing = [limit for limit in ENFORCED if not info.get(limit)]
    if missing:
        raise UsageError(f"the Docker engine's kernel can't enforce: {', '.join(missing)}")
    security = " ".join(info.get("SecurityOptions") or ())
    if not runtime and not re.search(r"name=seccomp(?!,profile=unconfined)", security):
        raise UsageError("the Docker engine has no seccomp profile: set one, or runtime = 'runsc'")
