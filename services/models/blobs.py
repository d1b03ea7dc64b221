"""Blobs: weights and other large data that events name by their SHA-256.

A blob is written before the event that names it, and either whole or not at all: into a temporary
file, which is synced and then renamed. All functions block. Call them with `asyncio.to_thread`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from headrace.errors import BlobError, DamagedBlob, DependencyError
from headrace.schemas.events import Blob
from headrace.services.base.files import describe_failure, file_digest, sync_path
from headrace.services.models.blob_owners import BlobOwners, SmallFiles, StoredBlob

COPIED_BYTES = 1 << 20
"""How many bytes of a file are copied at once."""
RECENT_S = 2.0
"""A file that was written this short a time ago may change once more without another time."""
_HEX = "[0-9a-f]"


class BlobStore(Protocol):
    """A store of blobs."""

    owners: BlobOwners
    """Who needs which blob."""

    def put(self, data: bytes | Path, media: str = "") -> Blob:
        """Marks a blob as needed by the store's owner, and stores it. Putting it again is harmless.

        A file is read in pieces, and must not change meanwhile. `media` is the media type that the
        returned Blob carries. The blob is durable on return. Raises DependencyError if the store
        can't take the blob; then no part of it remains.
        """

    def claim(self, blob: Blob) -> None:
        """Marks a blob that somebody has put as needed by the store's owner, too."""

    def get(self, blob: Blob) -> Path:
        """Returns a local file with the blob's bytes, verified. Do not write to it.

        Raises BlobError if the blob is absent, or if its bytes do not match its SHA-256.
        """

    def holds(self, blob: Blob) -> bool:
        """Whether the store has a blob of this name and size. Only `get` verifies the bytes."""

    def verify(self, blob: Blob) -> None:
        """Raises BlobError if `get` would, as far as the store can tell without a transfer."""

    def stored(self) -> Iterator[StoredBlob]:
        """Yields all blobs, and the unfinished files of writers that died."""

    def remove(self, blob: StoredBlob, put_before: float) -> bool:
        """Removes a blob. Returns False if it is gone, or was put at or after `put_before`.

        `put_before` is in seconds since the epoch. It ignores markers: call `owners.remove`.
        """


class LocalBlobStore(BlobStore):
    """Blobs as files of a folder that every worker can read: `<root>/<2 hex digits>/<62 more>`."""

    def __init__(self, root: Path, owner: str | None = None) -> None:
        """`owner` is who puts blobs here. With None, blobs get no marker."""
        self._root = root.absolute()
        self.owners = BlobOwners(LocalFiles(self._root), owner)
        self._verified: dict[bytes, tuple[int, ...]] = {}
        """What `verify` has read, by SHA-256: its size, and the size, time and inode of its file.
        Only trainers verify, at most three blobs for each version."""

    def put(self, data: bytes | Path, media: str = "") -> Blob:
        blob = describe(data, media)
        with disk_errors(f"write a blob to {self._root}"):
            self.claim(blob)
            if self._touch(blob):
                return blob
            self._root.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._root, prefix="put-")
            temporary = Path(name)
            try:
                with os.fdopen(handle, "wb") as file:
                    if isinstance(data, bytes):
                        file.write(data)
                    else:
                        with data.open("rb") as source:
                            shutil.copyfileobj(source, file, COPIED_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                self._move_in(temporary, self._path(blob))
            finally:
                temporary.unlink(missing_ok=True)
        return blob

    def claim(self, blob: Blob) -> None:
        with disk_errors(f"write a marker to {self._root}"):
            self.owners.add(blob.sha256.hex(), self._path(blob).exists)

    def get(self, blob: Blob) -> Path:
        path = self._path(blob)
        try:
            size, digest = path.stat().st_size, file_digest(path)
        except FileNotFoundError:
            raise absent(blob, self._root) from None
        except OSError as error:
            raise DependencyError(
                f"can't read blob {path}: {error}. Check the disk and the file's permissions"
            ) from error
        if (size, digest) != (blob.size, blob.sha256):
            raise DamagedBlob(
                f"blob {path} is damaged: it has {size} bytes of SHA-256 {digest.hex()}, but "
                f"should have {blob.size} bytes of SHA-256 {blob.sha256.hex()}. Remove the file",
                path,
            )
        return path

    def holds(self, blob: Blob) -> bool:
        path = self._path(blob)
        return path.is_file() and path.stat().st_size == blob.size

    def verify(self, blob: Blob) -> None:
        """Reads the whole blob, unless its file is as it was when this store last verified it."""
        try:
            status = self._path(blob).stat()
        except FileNotFoundError:
            raise absent(blob, self._root) from None
        seen = (blob.size, status.st_size, status.st_mtime_ns, status.st_ino)
        if self._verified.get(blob.sha256) != seen:
            self.get(blob)
            if time.time() - status.st_mtime > RECENT_S:
                self._verified[blob.sha256] = seen

    def stored(self) -> Iterator[StoredBlob]:
        blobs = [(at, f"{at.parent.name}{at.name}") for at in self._root.glob(f"{_HEX * 2}/*")]
        left = [(at, "") for prefix in ("put-", "gone-") for at in self._root.glob(f"{prefix}*")]
        for path, name in sorted(blobs + left):
            if len(name) not in (0, 64):
                continue  # not a file of this store
            with suppress(FileNotFoundError):  # it was removed or renamed meanwhile
                status = path.stat()
                yield StoredBlob(name, status.st_size, status.st_mtime, path)

    def remove(self, blob: StoredBlob, put_before: float) -> bool:
        with disk_errors(f"remove {blob.path}"):
            path, aside = Path(blob.path), self._root / f"gone-{blob.path.name}"
            try:
                if path.stat().st_mtime >= put_before:
                    return False
                path.rename(aside)
                if aside.stat().st_mtime >= put_before:  # put again after the first check
                    aside.replace(path)
                    return False
            except FileNotFoundError:
                return False
            aside.unlink()
            return True

    def _touch(self, blob: Blob) -> bool:
        """Records that a blob was put again. Returns False if it is absent or damaged."""
        path = self._path(blob)
        try:
            whole = file_digest(path) == blob.sha256
            if whole:
                os.utime(path)
        except FileNotFoundError:  # it may also be removed in between
            return False
        return whole

    def _path(self, blob: Blob) -> Path:
        name = blob.sha256.hex()
        return self._root / name[:2] / name[2:]

    def _move_in(self, temporary: Path, path: Path) -> None:
        new_folder = not path.parent.is_dir()
        path.parent.mkdir(exist_ok=True)
        temporary.replace(path)
        sync_path(path.parent)
        if new_folder:
            sync_path(self._root)


class LocalFiles(SmallFiles):
    """Small files of a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def touch(self, path: str) -> None:
        file = self._root / path
        if file.exists():
            file.touch()
            return
        missing = [one for one in file.parents if not one.exists()]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        for folder in [file.parent, *(one.parent for one in missing)]:
            sync_path(folder)

    def times(self, folder: str) -> dict[str, float]:
        found = {}
        for path in sorted((self._root / folder).rglob("*")):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                if not stat.S_ISDIR((status := path.stat()).st_mode):
                    found[path.relative_to(self._root).as_posix()] = status.st_mtime
        return found

    def delete(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)


def describe(data: bytes | Path, media: str) -> Blob:
    """Returns the reference to a blob with these bytes, or with those of a file.

    Raises DependencyError if the file can't be read.
    """
    if isinstance(data, Path):
        with disk_errors(f"read {data}"):
            return Blob(sha256=file_digest(data), size=data.stat().st_size, media=media)
    return Blob(sha256=hashlib.sha256(data).digest(), size=len(data), media=media)


def absent(blob: Blob, store: object) -> BlobError:
    """The error of a blob that a store does not have."""
    return BlobError(
        f"blob {blob.sha256.hex()} is not in {store}. It was pruned, or its writer uses another "
        "blob store: check that --blobs is the same for all processes"
    )


@contextmanager
def disk_errors(action: str) -> Iterator[None]:
    """Raises the error of `describe_failure` if the file system fails at `action`."""
    try:
        yield
    except OSError as error:
        raise describe_failure(f"can't {action}: {error}", error) from error
