"""Copies a workspace from one sandbox to another. Its archive is untrusted on the whole way.

`tar` packs in the one sandbox and unpacks in the other, as the sandboxes' user. Between them the
worker makes a new archive, with nothing but what a workspace may contain.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import IO

from headrace.errors import InfrastructureError, UsageError
from headrace.services.env.sandbox.command_start import KILLED, MIB, CommandStart, SandboxEnded
from headrace.services.processes.docker.hardened import USER, WORK

COPY_S = 60.0
"""Seconds that packing or unpacking may take."""
SPOOL_BYTES = 1 << 22
"""Larger archives are in a temporary file of the worker."""
HEADERS_MB = 32
"""Most MiB of an archive besides the files' bytes: the workspace has at most 16,384 inodes."""
MOST_ENTRIES = 1 << 15
MOST_NAME = 4096
"""Most characters of a path in an archive. No program could open a longer one."""
PACK = ("sh", "-c", "exec tar -cf - . 2>/dev/null")
"""Files that the user itself can't read are left out: they would be no use in the copy either."""
UNPACK = ("sh", "-c", f'head -c "$1" | tar -xpf - -C {WORK}', "sh")
"""Its argument is the archive's size: a connection by TLS can't be closed in one direction."""
FORMAT = tarfile.GNU_FORMAT
"""Busybox does not read long names in the format of POSIX."""
NO_PROGRAM = 127
"""Exit code of `sh` if there is no such program."""
UNCOPYABLE = "its files could not be copied"
UNREADABLE = (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError)
"""What `tarfile` raises for bytes that are no archive."""
OWNER, GROUP = map(int, USER.split(":"))


class UnsafeArchive(ValueError):
    """An archive is broken, too large, or contains what no workspace can contain."""


class SmallHeaders(tarfile.TarInfo):
    """A member of an untrusted archive. `tarfile` reads the headers of a member into memory as a
    whole, keeps them, and adds those of the whole archive to each member."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Refuse headers that no `tar` writes for a workspace."""
        if self.type == tarfile.XGLTYPE:
            raise UnsafeArchive("it has a header for all files")
        extended = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
        long_names = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if self.type in (*extended, *long_names) and not 0 <= self.size <= 4 * MOST_NAME:
            raise UnsafeArchive(f"a header has {self.size:,} bytes")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        member.pax_headers = {}
        return member


async def pack(start: CommandStart, disk_mb: int, archive: IO[bytes]) -> None:
    """Write a clean archive of the workspace in which `start` starts commands.

    Raises SandboxEnded if the policy made its files uncopyable, UsageError if the image can't pack.
    """
    with SpooledTemporaryFile(SPOOL_BYTES) as packed:
        await read_packed(start, PACK, disk_mb, packed)
        packed.seek(0)
        try:
            await asyncio.to_thread(clean_archive, packed, archive, disk_mb * MIB)
        except UnsafeArchive as error:
            raise SandboxEnded(f"{UNCOPYABLE}: {error}") from error


async def read_packed(
    start: CommandStart, command: Sequence[str], disk_mb: int, packed: IO[bytes]
) -> None:
    """Write what a command packs in a sandbox to `packed`. It is not checked. Raises as `pack`."""
    code, left = None, (disk_mb + HEADERS_MB) * MIB
    async with AsyncExitStack() as stack:
        run_id, output, chunk = await start.begin(stack, command)
        try:
            async with asyncio.timeout(COPY_S):
                while chunk or (chunk := await output.read()):
                    left -= len(chunk)
                    if left < 0:
                        raise SandboxEnded(f"{UNCOPYABLE}: they are too large")
                    packed.write(chunk)
                    chunk = b""
            code = await start.exit_code(run_id)
        except TimeoutError as error:
            raise SandboxEnded(f"{UNCOPYABLE} in {COPY_S:g} s") from error
    _check_code(code)
    if code is None or code >= KILLED:
        raise SandboxEnded(f"{UNCOPYABLE}: packing them was ended")


async def unpack(start: CommandStart, archive: IO[bytes]) -> None:
    """Unpack a clean archive in the workspace of a fresh sandbox. Raises as `pack` does."""
    size, said = archive.seek(0, 2), b""
    async with AsyncExitStack() as stack:
        run_id, output, _ = await start.begin(stack, (*UNPACK, str(size)), archive)
        try:
            async with asyncio.timeout(COPY_S):
                while chunk := await output.read():
                    said = (said + chunk)[-500:]
        except TimeoutError as error:
            message = f"files were not copied into a fresh sandbox in {COPY_S:g} s"
            raise InfrastructureError("engine_silent", message) from error
        code = await start.exit_code(run_id)
    _check_code(code)
    if code:
        raise SandboxEnded(f"{UNCOPYABLE}: {said.decode('utf-8', 'replace')}")


def _check_code(code: int | None) -> None:
    if code == NO_PROGRAM:
        raise UsageError(
            "the image has no `tar` or no `head`, which copy files into and out of sandboxes: add "
            "them"
        )


def clean_archive(source: IO[bytes], target: IO[bytes], most_bytes: int) -> None:
    """Copies an untrusted archive: directories, files and links below its root, and nothing else.

    Devices, pipes and sockets are left out. A sparse file counts with its whole length. Raises
    UnsafeArchive if the files have more than `most_bytes`, if a name or the target of a hard link
    leads out of the archive or through a symbolic link, or if a name occurs twice.
    """
    try:
        with (
            tarfile.open(
                fileobj=source, mode="r:", encoding="utf-8", tarinfo=SmallHeaders
            ) as packed,
            tarfile.open(fileobj=target, mode="w:", format=FORMAT, encoding="utf-8") as clean,
        ):
            _Cleaning(packed, clean, most_bytes).run()
    except UnsafeArchive:
        raise
    except UNREADABLE as error:
        raise UnsafeArchive(f"it is broken: {type(error).__name__}") from error


class _Cleaning:
    def __init__(self, packed: tarfile.TarFile, clean: tarfile.TarFile, most_bytes: int) -> None:
        self._packed = packed
        self._clean = clean
        self._most = self._left = most_bytes
        self._kinds: dict[PurePosixPath, str] = {PurePosixPath(): "directory"}
        """What each name is: `directory`, `file` or `symlink`."""

    def run(self) -> None:
        for number, member in enumerate(self._packed):
            if number >= MOST_ENTRIES:
                raise UnsafeArchive(f"it has more than {MOST_ENTRIES:,} entries")
            path = _path(member.name)
            if path.parts:
                self._add(path, member)

    def _add(self, path: PurePosixPath, member: tarfile.TarInfo) -> None:
        if path in self._kinds:
            raise UnsafeArchive("a name occurs twice")
        self._require_folder(path.parent)
        made = tarfile.TarInfo(str(path))
        made.uid, made.gid = OWNER, GROUP
        made.mode, made.mtime = member.mode & 0o777, member.mtime
        if member.isdir():
            self._kinds[path] = "directory"
            made.type, made.mode = tarfile.DIRTYPE, made.mode | 0o700  # else nothing fits into it
            self._clean.addfile(made)
        elif member.issym():
            self._kinds[path] = "symlink"
            made.type, made.linkname = tarfile.SYMTYPE, member.linkname
            self._clean.addfile(made)
        elif member.islnk():
            target = _path(member.linkname)
            if self._kinds.get(target) != "file":
                raise UnsafeArchive("a hard link's target is not a file before it")
            self._kinds[path] = "file"
            made.type, made.linkname = tarfile.LNKTYPE, str(target)
            self._clean.addfile(made)
        elif member.isreg():
            self._kinds[path] = "file"
            self._left -= member.size
            if member.size < 0 or self._left < 0:
                raise UnsafeArchive(f"its files have more than {self._most // MIB} MiB")
            made.size = member.size
            self._clean.addfile(made, self._packed.extractfile(member))

    def _require_folder(self, path: PurePosixPath) -> None:
        """Checks that a path is a folder. One that the archive does not name counts as one."""
        missing = []
        while (kind := self._kinds.get(path)) is None:
            missing.append(path)
            path = path.parent
        if kind != "directory":
            raise UnsafeArchive("a name leads through something that is not a directory")
        self._kinds.update(dict.fromkeys(missing, "directory"))


def _path(name: str) -> PurePosixPath:
    if len(name) > MOST_NAME:
        raise UnsafeArchive(f"a name has more than {MOST_NAME:,} characters")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UnsafeArchive("a name leads out of the workspace")
    return path
