"""A hardened container: what it may do, in the form of the engine's create call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from headrace.errors import UsageError
from headrace.schemas.problems import problems_of

Positive = Annotated[int, Field(gt=0)]

WORK = "/workspace"
"""The only folder besides /tmp that a command can write to."""
USER = "65534:65534"
"""The user that runs the commands."""
KEEPER = "65533:65533"
"""The user that runs the container's first process, so that no command can end that."""
SHM_MB = 1
"""Size of /dev/shm in MiB."""
SPARE_MB = 16
"""Least MiB of memory that files must leave for processes."""
FILES = 1024
"""Most files that one process can have open."""


class Limits(BaseModel):
    """What a container may use."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    runtime: str = ""
    """The engine's runtime, for example `runsc` (gVisor). Empty means its default. It must apply
    the engine's seccomp filter, or isolate by itself."""
    memory_mb: Positive = 256
    """Memory in MiB, including the files in /workspace and /tmp. There is no swap."""
    cpus: float = Field(default=1.0, gt=0)
    """Number of CPUs, which may be a fraction."""
    pids: Positive = 64
    """Processes and threads."""
    disk_mb: Positive = 64
    """Size of /workspace in MiB. /tmp has a quarter of it. Both are in memory."""

    @field_validator("disk_mb")
    @classmethod
    def _leave_memory_beside_files(cls, disk_mb: int, info: ValidationInfo) -> int:
        """No kill frees the memory of files. If they could use all, no command could start."""
        memory_mb = info.data.get("memory_mb")
        files_mb = disk_mb + _tmp_mb(disk_mb) + SHM_MB
        if memory_mb is not None and files_mb + SPARE_MB > memory_mb:
            raise ValueError(
                f"files may take {files_mb} MiB of memory_mb = {memory_mb}, which leaves less than "
                f"{SPARE_MB} MiB for processes: lower disk_mb or raise memory_mb"
            )
        return disk_mb


def _tmp_mb(disk_mb: int) -> int:
    return max(1, disk_mb // 4)


L = TypeVar("L", bound=Limits)


def read_limits(kind: type[L], options: Mapping[str, Any], whose: str) -> L:
    """Returns options as a `kind`. Raises UsageError with `whose` they are and all problems."""
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        raise UsageError(f"{whose}: {'; '.join(problems_of(error))}") from error


def container(
    limits: Limits,
    image: str,
    labels: Mapping[str, str],
    live_s: int,
    network: str = "none",
    root_bytes: int = 0,
) -> dict[str, Any]:
    """Returns the body of the engine's create call. `image` is a digest.

    It asks for no user namespace mode, so the engine's own applies. If `root_bytes` is not 0, the
    root file system is writable up to this limit of the engine's storage driver.

    The container's first process is a `sleep` of `live_s` seconds. When that ends, the kernel kills
    everything in the container, whatever has happened to the worker.
    """
    # Set the owner: if the image has the folder, its mode counts and not the mount's.
    owner, group = USER.split(":")
    mount = f"rw,exec,nosuid,nodev,uid={owner},gid={group},mode=0755"
    memory = limits.memory_mb * 2**20
    return {
        "Image": image,
        "Entrypoint": ["sleep"],
        "Cmd": [str(live_s)],
        "User": KEEPER,
        "WorkingDir": "/",
        "Env": [f"HOME={WORK}", "TMPDIR=/tmp", "PYTHONDONTWRITEBYTECODE=1", "LANG=C.UTF-8"],
        "Hostname": "sandbox",
        "Labels": dict(labels),
        "NetworkDisabled": network == "none",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "NetworkMode": network,
            "ReadonlyRootfs": not root_bytes,
            **({"StorageOpt": {"size": str(root_bytes)}} if root_bytes else {}),
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true"],
            "Privileged": False,
            "IpcMode": "private",
            "Init": True,
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(limits.cpus * 1e9),
            "PidsLimit": limits.pids,
            "ShmSize": SHM_MB * 2**20,
            "Tmpfs": {
                WORK: f"{mount},size={limits.disk_mb}m,nr_inodes=16k",
                "/tmp": f"{mount},size={_tmp_mb(limits.disk_mb)}m,nr_inodes=4k",
            },
            "Ulimits": [
                {"Name": "nofile", "Soft": FILES, "Hard": FILES},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
            "LogConfig": {"Type": "none"},
            "RestartPolicy": {"Name": "no"},
            **({"Runtime": limits.runtime} if limits.runtime else {}),
        },
    }
