"""Looks at this machine: its packages, disks, memory and GPU. All functions block briefly."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.apply import PACKAGES
from headrace.services.operate.doctor.finding import Finding
from headrace.services.operate.waits.side_watch import FULL_BYTES, STATE, free_bytes

LOW_DISK = 2 * 2**30
"""Less free space than this, in bytes, is a warning."""
LOW_MEMORY = 2**30
"""Less available memory than this, in bytes, is a warning."""
SMI_S = 5.0
"""Longest time that `nvidia-smi` may take."""


def packages(recorded: Mapping[str, str]) -> Finding:
    """Compares the installed packages with those that the run's start recorded, if there is one."""
    found = {name: installed for name in PACKAGES if (installed := _installed(name))}
    listed = ", ".join(f"{name} {number}" for name, number in found.items())
    other = [
        f"{name} {found[name]} (the run began with {recorded[name]})"
        for name in found.keys() & recorded.keys()
        if found[name] != recorded[name]
    ]
    if other:
        return Finding(
            "versions", "warning", "other packages than the run began with: " + ", ".join(other),
            "Install the versions of the run on hosts that serve it, or start a new run",
        )  # fmt: skip
    return Finding("versions", "ok", listed)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def disks(folders: Mapping[str, Path]) -> Iterator[Finding]:
    """Looks at the disk of each folder, by what the folder is."""
    for what, folder in folders.items():
        free = free_bytes(folder)
        if free is None:
            continue
        text = f"{what} {folder}: {_spell(free)} free"
        if what == STATE and not _writable(folder):
            yield Finding("disk", "problem", f"{what} {folder}: this user can't write there",
                          "Change its owner or permissions, or name another --state")  # fmt: skip
        elif free < FULL_BYTES:
            yield Finding("disk", "problem", f"{text}: it is full", "Free space there. `headrace "
                          "prune` removes what no run needs")  # fmt: skip
        elif free < LOW_DISK:
            yield Finding("disk", "warning", text, "Free space before it is full")
        else:
            yield Finding("disk", "ok", text)


def _writable(folder: Path) -> bool:
    """Returns whether this user can write into a folder, or make it."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def memory(meminfo: Path = Path("/proc/meminfo")) -> Finding | None:
    """Looks at the available memory. None where the system does not say it."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    fields = {line.partition(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    if not {"MemAvailable", "MemTotal"} <= fields.keys():
        return None
    free, total = (int(fields[name]) * 1024 for name in ("MemAvailable", "MemTotal"))
    text = f"{_spell(free)} of {_spell(total)} are available"
    if free < LOW_MEMORY:
        return Finding("memory", "warning", text, "The system may kill processes. End what is not "
                       "needed, or serve fewer workers on this host")  # fmt: skip
    return Finding("memory", "ok", text)


def gpu(recipe: Recipe | None) -> Finding:
    """Looks for GPUs, and whether the recipe demands one."""
    listed = _gpus()
    wanted = [] if recipe is None else _wants_cuda(recipe)
    if listed:
        return Finding("gpu", "ok", "; ".join(listed))
    if wanted:
        return Finding(
            "gpu", "warning", f"this machine has none, and {', '.join(wanted)} wants one",
            "Serve these on a host with a GPU, or set the device to cpu",
        )  # fmt: skip
    return Finding("gpu", "ok", "this machine has none: models run on its CPU")


def _wants_cuda(recipe: Recipe) -> list[str]:
    devices = {}
    for name, policy in recipe.policies.items():
        devices[f"policies.{name}.engine"] = policy.engine.device
        if policy.training is not None and not policy.training.external:
            devices[f"policies.{name}.training"] = policy.training.device
    return [table for table, device in devices.items() if device.startswith("cuda")]


def _gpus() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _spell(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
