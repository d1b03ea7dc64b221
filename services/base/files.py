"""Creates private files, hashes files, reads the end of logs, and makes a folder's entries durable.

All of it blocks. `describe_failure` says what to do if the file system refuses.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from headrace.errors import DependencyError, HeadraceError, UsageError

LOG_LINES = 20
"""Lines of a log that an error message shows."""
TAIL_BYTES = 16_384
"""Bytes at the end of a log in which its last lines are looked for."""

DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The numbers of errors that mean: this user may not do that."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The numbers of errors that mean: the disk or this user's part of it is full."""


def describe_failure(what: str, error: OSError) -> HeadraceError:
    """Returns an error that begins with `what`, and says what to do if the file system refuses.

    It is a UsageError if this user has no permission: a restart does not help.
    """
    if error.errno in DENIED:
        return UsageError(
            f"{what}. This user may not write there: change the owner or the permissions of the "
            "folder, or name another one"
        )
    return DependencyError(f"{what}. Free some space, or repair the disk")


def private_folder(path: Path) -> None:
    """Creates a folder and its missing parents for this user alone, and leaves an existing one.

    Its files may hold answers of models, data of tasks, or what programs print.
    """
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def private(path: str, flags: int) -> int:
    """The `opener` of a file that only this user can read, if `open` creates it."""
    return os.open(path, flags, 0o600)


def known_to_all(path: Path, mode: int) -> bool:
    """Returns whether every user of this machine can read a file that has this mode.

    That is no error by itself: Kubernetes mounts secrets so that all users of a container can.
    """
    folders = path.resolve().parents
    return bool(mode & stat.S_IROTH) and all(
        folder.stat().st_mode & stat.S_IXOTH for folder in folders
    )


def file_digest(path: Path) -> bytes:
    """Returns the SHA-256 of a file's bytes: 32 bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def sync_path(path: Path) -> None:
    """Makes a file durable, or the names that were created, renamed or removed in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def last_lines(log: Path, count: int) -> list[str]:
    """Returns at most `count` lines of a log's last 16 KiB, or none if the log is missing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-count:]


def describe_log(log: Path) -> str:
    """Returns the last lines of a log, for an error message."""
    lines = last_lines(log, LOG_LINES) or ["(nothing)"]
    return f"the last lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)
