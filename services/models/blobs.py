"""Blobs: weights and other large data that events name by their SHA-256.

A blob is written before the event that names it, and either whole or not at all: into a temporary
file, which is synced and then renamed. All functions block. Call them with `asyncio.to_thread`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

from headrace.errors import BlobError, DependencyError
from headrace.schemas.events import Blob
from headrace.services.base.files import file_digest, sync_folder

_HEX = "[0-9a-f]"


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob that a store holds, or the unfinished file of a writer that died."""

    name: str
    """SHA-256 in hex; empty for an unfinished file."""
    size: int
    put_at: float
    """When it was last put, in seconds since the epoch."""
    path: PurePath
    """Its path in the store."""


class BlobStore(Protocol):
    """A store of blobs."""

    def put(self, data: bytes, media: str = "") -> Blob:
        """Stores bytes. To store the same content again is harmless.

        `media` is the media type that the returned Blob carries. The blob is durable on return.
        Raises DependencyError if the store can't take the blob; then no part of it remains.
        """

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

        `put_before` is in seconds since the epoch. A writer that puts the same content at the same
        moment does not lose it.
        """


class LocalBlobStore(BlobStore):
    """Blobs as files of a folder that every worker can read: `<root>/<2 hex digits>/<62 more>`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def put(self, data: bytes, media: str = "") -> Blob:
        blob = describe(data, media)
        with disk_errors(f"write a blob to {self._root}"):
            if self._touch(blob):
                return blob
            self._root.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._root, prefix="put-")
            temporary = Path(name)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                self._move_in(temporary, self._path(blob))
            finally:
                temporary.unlink(missing_ok=True)
        return blob

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
            raise BlobError(
                f"blob {path} is damaged: it has {size} bytes of SHA-256 {digest.hex()}, but "
                f"should have {blob.size} bytes of SHA-256 {blob.sha256.hex()}. Remove the file"
            )
        return path

    def holds(self, blob: Blob) -> bool:
        path = self._path(blob)
        return path.is_file() and path.stat().st_size == blob.size

    def verify(self, blob: Blob) -> None:
        """Reads the whole blob."""
        self.get(blob)

    def stored(self) -> Iterator[StoredBlob]:
        blobs = [(at, f"{at.parent.name}{at.name}") for at in self._root.glob(f"{_HEX * 2}/*")]
        left = [(at, "") for prefix in ("put-", "gone-") for at in self._root.glob(f"{prefix}*")]
        for path, name in sorted(blobs + left):
            if len(name) not in (0, 64):
                continue  # not a file of this store
            with suppress(FileNotFoundError):  # it was removed or renamed meanwhile
                stat = path.stat()
                yield StoredBlob(name, stat.st_size, stat.st_mtime, path)

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
        sync_folder(path.parent)
        if new_folder:
            sync_folder(self._root)


def describe(data: bytes, media: str) -> Blob:
    """Returns the reference to a blob with these bytes."""
    return Blob(sha256=hashlib.sha256(data).digest(), size=len(data), media=media)


def absent(blob: Blob, store: object) -> BlobError:
    """The error of a blob that a store does not have."""
    return BlobError(
        f"blob {blob.sha256.hex()} is not in {store}. It was pruned, or its writer uses another "
        "blob store: check that --blobs is the same for all processes"
    )


@contextmanager
def disk_errors(action: str) -> Iterator[None]:
    """Raises DependencyError if the file system fails at `action`, for example a full disk."""
    try:
        yield
    except OSError as error:
        raise DependencyError(
            f"can't {action}: {error}. Free some space, or repair the disk"
        ) from error
