"""Copies the files of a task into a workspace, and the files that it collects out of it.

What comes out is untrusted: `tar` packs it as the sandbox's user, and the worker takes plain files
of it, within limits.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import IO

from headrace.errors import UsageError
from headrace.schemas.recipe.task_settings import Artifacts
from headrace.schemas.untrusted.artifact_names import BadName, check_name, matches
from headrace.services.base.types import TaskFile
from headrace.services.env.sandbox.command_start import MIB, CommandStart, SandboxEnded
from headrace.services.env.sandbox.workspace_copy import (
    FORMAT,
    GROUP,
    MOST_ENTRIES,
    OWNER,
    SPOOL_BYTES,
    UNCOPYABLE,
    UNREADABLE,
    SmallHeaders,
    UnsafeArchive,
    read_packed,
    unpack,
)

PACK_SOME = ("sh", "-c", 'exec tar -cf - "$@" 2>/dev/null', "sh")
"""Its arguments are what it packs. What does not exist is left out."""
GLOB = frozenset("*?[")


class CollectedFiles(Mapping[str, bytes]):
    """Files in a temporary file of the worker: name to bytes. Each is read when it is asked for."""

    def __init__(self, spool: IO[bytes], locations: Mapping[str, tuple[int, int]]) -> None:
        """`locations` are the offset and the size of each file in `spool`, in bytes."""
        self._spool = spool
        self._locations = locations

    def __getitem__(self, name: str) -> bytes:
        offset, size = self._locations[name]
        self._spool.seek(offset)
        return self._spool.read(size)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __del__(self) -> None:
        self._spool.close()  # nobody else knows when the files are stored


async def write_files(start: CommandStart, files: Mapping[str, TaskFile], disk_mb: int) -> None:
    """Write files into the workspace of a fresh sandbox. Only their owner may write to them.

    Raises UsageError if they do not fit, and InfrastructureError if they can't be fetched.
    """
    total = sum(file.size for file in files.values())
    if total > disk_mb * MIB:
        raise UsageError(
            f"the task's files have {total:,} bytes, and the sandbox has disk_mb = {disk_mb}. "
            "Raise disk_mb, or submit the task with smaller files"
        )
    paths = {name: await file.path() for name, file in files.items()}
    with SpooledTemporaryFile(SPOOL_BYTES) as archive:
        await asyncio.to_thread(_pack_files, paths, archive)
        try:
            await unpack(start, archive)
        except SandboxEnded as error:  # nothing of the policy ran before
            raise UsageError(f"the task's files do not fit into the sandbox: {error}") from error


async def collect_files(
    start: CommandStart, patterns: Sequence[str], limits: Artifacts, disk_mb: int
) -> tuple[CollectedFiles, list[str]]:
    """Return the plain files of a workspace that match, and what was left out, with reasons.

    Raises SandboxEnded if the policy made them uncopyable, UsageError if the image has no `tar`.
    """
    tops = {pattern.partition("/")[0] for pattern in patterns}
    tops = {"."} if any(GLOB & set(top) for top in tops) else {f"./{top}" for top in tops}
    with SpooledTemporaryFile(SPOOL_BYTES) as packed:
        await read_packed(start, (*PACK_SOME, *sorted(tops)), disk_mb, packed)
        packed.seek(0)
        try:
            return await asyncio.to_thread(choose_files, packed, patterns, limits)
        except UnsafeArchive as error:
            raise SandboxEnded(f"{UNCOPYABLE}: {error}") from error


def choose_files(
    packed: IO[bytes], patterns: Sequence[str], limits: Artifacts
) -> tuple[CollectedFiles, list[str]]:
    """Takes the plain files that match out of an untrusted archive, in the order of their names.

    Links, devices and pipes are left out, and what exceeds a limit. A sparse file counts with its
    whole length. Raises UnsafeArchive if the archive is broken.
    """
    spool = SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - it lives as long as its files
    locations: dict[str, tuple[int, int]] = {}
    left_out: list[str] = []
    left = limits.episode_mb * MIB
    try:
        with tarfile.open(
            fileobj=packed, mode="r:", encoding="utf-8", tarinfo=SmallHeaders
        ) as archive:
            for name, member in sorted(_matching(archive, patterns).items()):
                if why := _excess(name, member, limits, len(locations), left):
                    left_out.append(f"{name[:255]}: {why}")
                    continue
                file = archive.extractfile(member)
                data = file.read(member.size) if file is not None else b""
                locations[name] = (spool.tell(), len(data))
                spool.write(data)
                left -= len(data)
    except UnsafeArchive:
        spool.close()
        raise
    except UNREADABLE as error:
        spool.close()
        raise UnsafeArchive(f"the archive is broken: {type(error).__name__}") from error
    return CollectedFiles(spool, locations), left_out


def _matching(archive: tarfile.TarFile, patterns: Sequence[str]) -> dict[str, tarfile.TarInfo]:
    """Returns the members that match, without folders. The first one of a name counts."""
    found: dict[str, tarfile.TarInfo] = {}
    for number, member in enumerate(archive):
        if number >= MOST_ENTRIES:
            raise UnsafeArchive(f"there are more than {MOST_ENTRIES:,} files")
        name = str(PurePosixPath(member.name))
        if not member.isdir() and matches(name, patterns):
            found.setdefault(name, member)
    return found


def _excess(name: str, member: tarfile.TarInfo, limits: Artifacts, files: int, left: int) -> str:
    """Returns why a file is left out, or an empty text."""
    try:
        check_name(name)
    except BadName as error:
        return str(error)
    if not member.isreg():
        return "it is a link, a device or a pipe"
    if not 0 <= member.size <= limits.file_mb * MIB:
        return f"it has {member.size:,} bytes, and artifacts.file_mb is {limits.file_mb}"
    if member.size > left:
        return f"all files have more than artifacts.episode_mb, {limits.episode_mb} MiB"
    if files >= limits.files:
        return f"there are more than artifacts.files, {limits.files}"
    return ""


def _pack_files(paths: Mapping[str, Path], archive: IO[bytes]) -> None:
    with tarfile.open(fileobj=archive, mode="w:", format=FORMAT, encoding="utf-8") as packed:
        folders = {parent for name in paths for parent in PurePosixPath(name).parents}
        for folder in sorted(folders - {PurePosixPath()}):
            made = _owned(str(folder), 0o755)
            made.type = tarfile.DIRTYPE
            packed.addfile(made)
        for name, path in paths.items():
            made = _owned(name, 0o644)
            made.size = path.stat().st_size
            with open(path, "rb") as file:
                packed.addfile(made, file)


def _owned(name: str, mode: int) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.uid, made.gid, made.mode = OWNER, GROUP, mode
    return made
