"""Writable root file systems, on engines whose storage driver limits their size."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from headrace.errors import InfrastructureError, UsageError
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.docker_errors import NotThere

MIB = 2**20
COUNTS_IMAGE = {"overlay2": False, "btrfs": True}
"""Storage drivers with a limit, and whether the image's own files count against it."""
PROGRAMS = "/ /bin /sbin /usr /usr/bin /usr/sbin /usr/local/bin /lib /lib64 /usr/lib /etc"
WRITABLE = f"""
for path in {PROGRAMS} "$(command -v sh)" "$(command -v sleep)"; do
  if [ -w "$path" ]; then echo "$path"; fi
done
"""
"""Prints what must not be writable: the worker's own commands in the container are found there."""


async def root_bytes(engine: DockerEngine, root_mb: int | None, image: Mapping[str, Any]) -> int:
    """Returns the limit to ask for, so that a container of `image` may write `root_mb` MiB.

    0 means a root that is read-only. Raises UsageError if the engine's storage driver is unknown.
    """
    if not root_mb:
        return 0
    driver = str((await engine.info()).get("Driver"))
    if driver not in COUNTS_IMAGE:
        raise UsageError(
            f"root_mb needs an engine whose storage driver limits containers: overlay2 on xfs with "
            f"`pquota`, or btrfs. The engine at {engine.host} has {driver}"
        )
    own = int(image.get("Size") or 0) if COUNTS_IMAGE[driver] else 0
    return root_mb * MIB + own


async def require_limit(engine: DockerEngine, body: Mapping[str, Any], whose: str) -> None:
    """Raises UsageError if the engine refuses to make a container with this limit."""
    name = f"headrace-probe-{uuid.uuid4().hex}"
    try:
        await engine.prepare(name, body)
    except NotThere:
        raise
    except InfrastructureError as error:
        if "storage-opt" not in error.message:
            raise
        raise UsageError(
            f"{whose}: root_mb: the engine at {engine.host} can't limit a root file system: "
            f"{error.message}. Use an engine on overlay2 over xfs mounted with `pquota`, or on "
            "btrfs, or leave root_mb out"
        ) from error
    finally:
        await engine.remove(name)
