"""What a sandbox may do: the options of `use = "docker"`, and the container that they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.errors import UsageError

Positive = Annotated[int, Field(gt=0)]

WORK = "/workspace"
"""The only folder besides /tmp that a command can write to."""
USER = "65534:65534"
"""Who runs the commands."""
KEEPER = "65533:65533"
"""Who runs the process that the container lives by: what a command starts can't touch it."""
FILES = 1024
"""Most files that one process holds open."""


class SandboxSettings(BaseModel):
    """A sandbox's options. They come from the recipe alone: no task can loosen them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    image: str
    """Image of a task that names none. It needs `sh` and `sleep`, and `python3` for `python`."""
    images: tuple[str, ...] = ()
    """Further images that tasks may name."""
    tool: str = "shell"
    """What an action is: `shell`, `python`, `coding`, or a Tool of your own by import path."""
    tool_options: dict[str, Any] = {}
    """Keyword arguments of the tool."""
    runtime: str = ""
    """The engine's runtime, as `runsc` (gVisor); empty takes its default."""
    network: str = "none"
    """A network of the engine. Anything but `none` is up to you to guard."""
    memory_mb: Positive = 256
    """Memory in MiB, what lies in /workspace and /tmp included. There is no swap."""
    cpus: float = Field(default=1.0, gt=0)
    pids: Positive = 64
    """Processes and threads."""
    disk_mb: Positive = 64
    """Of /workspace, and a quarter of it of /tmp, in MiB: both lie in memory."""
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
    try:
        return SandboxSettings.model_validate(options)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        )
        raise UsageError(f"options of environment 'docker': {problems}") from error


def container(
    settings: SandboxSettings, image: str, labels: Mapping[str, str], live_s: int
) -> dict[str, Any]:
    """The body of the engine's create call.

    The container lives by a `sleep` of `live_s` seconds: whoever may have died, it ends then, and
    the kernel kills all that is in it.
    """
    # By owner: where the image has the folder, its mode counts and not the mount's.
    owner, group = USER.split(":")
    mount = f"rw,exec,nosuid,nodev,uid={owner},gid={group},mode=0755"
    memory = settings.memory_mb * 2**20
    return {
        "Image": image,
        "Entrypoint": ["sleep"],
        "Cmd": [str(live_s)],
        "User": KEEPER,
        "WorkingDir": "/",
        "Env": [f"HOME={WORK}", "TMPDIR=/tmp", "PYTHONDONTWRITEBYTECODE=1", "LANG=C.UTF-8"],
        "Hostname": "sandbox",
        "Labels": dict(labels),
        "NetworkDisabled": settings.network == "none",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "NetworkMode": settings.network,
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true"],
            "Privileged": False,
            "IpcMode": "private",
            "Init": True,
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(settings.cpus * 1e9),
            "PidsLimit": settings.pids,
            "ShmSize": 2**20,
            "Tmpfs": {
                WORK: f"{mount},size={settings.disk_mb}m,nr_inodes=16k",
                "/tmp": f"{mount},size={max(1, settings.disk_mb // 4)}m,nr_inodes=4k",
            },
            "Ulimits": [
                {"Name": "nofile", "Soft": FILES, "Hard": FILES},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
            "LogConfig": {"Type": "none"},
            "RestartPolicy": {"Name": "no"},
            **({"Runtime": settings.runtime} if settings.runtime else {}),
        },
    }
