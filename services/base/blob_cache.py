"""Keeps the blobs that a remote store sent in a local folder, for all processes of the machine.

All functions block. They raise OSError if the disk fails or is full.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from headrace.schemas.events import Blob
from headrace.services.base.files import file_digest, private_folder

LOCKED_S = 0.05
"""Wait before another process's fetch of the same blob is looked at again."""
UNUSED_S = 3600.0
"""A blob that was not used for this long is removed."""
PART = "get-"
"""Begins the names of files that are not whole yet."""
LOCK = ".lock"
"""Ends the names of files that say which blobs are being fetched."""


class BlobCache:
    """Blobs as files of a folder: `<folder>/<64 hex digits>`. Unused ones are removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, blob: Blob) -> Path | None:
        """Returns the file of a blob if it is there and undamaged. Then it counts as used now."""
        path = self._path(blob)
        with suppress(OSError):  # if the file can't be read, the blob is fetched again
            if path.stat().st_size == blob.size and file_digest(path) == blob.sha256:
                os.utime(path)
                return path
        return None

    def keep(self, blob: Blob) -> None:
        """Counts a blob as used now, without reading it."""
        with suppress(OSError):  # if it is gone, it is fetched again
            os.utime(self._path(blob))

    @contextmanager
    def only_one(self, blob: Blob, wait_s: float) -> Iterator[None]:
        """Lets the other processes that fetch a blob to this machine wait until the block ends.

        They wait for `wait_s`, and then go on. It may be fetched twice.
        """
        path = self.folder / f"{blob.sha256.hex()}{LOCK}"
        with path.open("w") as lock:
            until_s = time.monotonic() + wait_s
            while time.monotonic() < until_s:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(LOCKED_S)
                except OSError:  # some file systems have no locks
                    break
            yield
            # Who waits at the removed file looks for the blob first, and finds it.
            path.unlink(missing_ok=True)

    def add(self, blob: Blob, fetch: Callable[[IO[bytes]], None]) -> Path | None:
        """Adds a blob, whose bytes `fetch` writes to a file. If the disk is full, removes unused
        blobs and tries once more.

        Returns None if the bytes have another SHA-256. Errors of `fetch` pass through.
        """
        try:
            return self._add(blob, fetch)
        except OSError:
            if not self.remove_unused():
                raise
            return self._add(blob, fetch)

    def _add(self, blob: Blob, fetch: Callable[[IO[bytes]], None]) -> Path | None:
        """Raises OSError if the disk is full, if possible before anything is fetched."""
        free = shutil.disk_usage(self.folder).free
        if free < blob.size:
            raise OSError(errno.ENOSPC, f"the disk is full, only {free} bytes are free")
        with self._new_part() as file:
            fetch(file)
            file.flush()
            if file_digest(Path(file.name)) != blob.sha256:
                return None
            return Path(file.name).replace(self._path(blob))

    @contextmanager
    def _new_part(self) -> Iterator[IO[bytes]]:
        """Opens a new file, and removes it at the end unless it was renamed.

        It is locked while this process lives, so that no other takes it for one of a dead process.
        """
        while True:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=PART, delete=False) as file:
                try:
                    with suppress(OSError):  # some file systems have no locks
                        fcntl.flock(file, fcntl.LOCK_EX)
                    if os.fstat(file.fileno()).st_nlink:  # it was not removed before the lock
                        yield file
                        return
                finally:
                    Path(file.name).unlink(missing_ok=True)

    def remove_unused(self) -> int:
        """Removes blobs that were not used for UNUSED_S, and files of killed processes.

        Creates the folder if it is missing. Returns how many bytes became free. No blob that was
        used since then is removed, because a process may still load it.
        """
        freed = 0
        private_folder(self.folder)
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process removed it
                status = path.lstat()
                if self._remove_if_unused(path, status.st_mtime < time.time() - UNUSED_S):
                    freed += status.st_size
        return freed

    def _remove_if_unused(self, path: Path, old: bool) -> bool:
        if path.name.endswith(LOCK):
            # The lock of a fetch is as old as the fetch, which may take hours.
            return old and _remove_left(path)
        if old and not path.is_dir():
            path.unlink()
            return True
        return path.name.startswith(PART) and _remove_left(path)

    def _path(self, blob: Blob) -> Path:
        return self.folder / blob.sha256.hex()


def _remove_left(left: Path) -> bool:
    """Removes an unfinished file or a lock if its process has died. Returns whether it did."""
    try:
        with left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    except OSError:  # its process lives, or the file system has no locks
        return False
    return True
