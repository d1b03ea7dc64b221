"""Bytes named by their SHA-256: weights and other large things that records only name.

A blob is written whole or not at all (a temporary file, fsync, atomic rename), before the event
that names it. All functions block: call them with `asyncio.to_thread`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from headrace.errors import BlobError, DependencyError, UsageError
from headrace.schemas.events import Blob

CHUNK_BYTES = 1 << 20
_HEX = "[0-9a-f]"


class BlobStore(Protocol):
    """Bytes named by their SHA-256."""

    def put(self, data: bytes | Path, media: str = "") -> Blob:
        """Stores bytes, or a file's content; the same content again changes nothing.

        Durable on return. DependencyError where the store can't take it: nothing partial stays.
        """

    def get(self, blob: Blob) -> Path:
        """A local file with the blob's bytes, verified; not to be written to.

        BlobError where the blob is absent, or is not what its name says.
        """

    def holds(self, blob: Blob) -> bool:
        """Whether the blob is there, by name and size alone: `get` verifies its bytes."""

    def verify(self, blob: Blob) -> None:
        """BlobError where `get` would raise it, as far as the store tells without moving bytes."""

    def stored(self) -> Iterator[StoredBlob]:
        """All blobs, and what writers that died have left."""

    def remove(self, blob: StoredBlob, put_before: float) -> bool:
        """Removes a blob. False where it was put again after that time (epoch s), or is gone.

        A writer that puts the same content at the same moment does not lose it.
        """


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """What a store holds."""

    name: str
    """SHA-256 in hex; empty for what a writer left unfinished."""
    size: int
    put_at: float
    """When it was last put, in epoch seconds."""
    path: PurePath
    """Where the store has it."""


def open_blob_store(url: str, cache: Path) -> BlobStore:
    """The store at a path, a `file://` URL, or any URL that fsspec serves.

    `cache` is a folder for what is got from afar. UsageError for a URL that nothing here serves.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return LocalBlobStore(Path(unquote(parts.path)))
    if not url or parts.scheme == "file":
        raise UsageError(f"blob store {url!r}: give a folder, as a path or as file:///path")
    if "://" in url:
        from headrace.services.models.remote_blobs import (
            RemoteBlobStore,  # its library comes with an extra
        )

        return RemoteBlobStore(url, cache)
    return LocalBlobStore(Path(url).expanduser())


class LocalBlobStore:
    """Blobs as files of a folder that every worker can read: `<root>/<2 hex digits>/<62 more>`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def put(self, data: bytes | Path, media: str = "") -> Blob:
        """See BlobStore."""
        with _unreachable(f"write a blob to {self._root}"):
            self._root.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._root, prefix="put-")
            temporary = Path(name)
            try:
                with os.fdopen(handle, "wb") as file:
                    blob = _copy(data, file, media)
                    if self._holds_whole(blob) and self._touch(blob):
                        return blob
                    file.flush()
                    os.fsync(file.fileno())
                self._place(temporary, self._path(blob))
            finally:
                temporary.unlink(missing_ok=True)
        return blob

    def get(self, blob: Blob) -> Path:
        """See BlobStore."""
        path = self._path(blob)
        try:
            size, digest = path.stat().st_size, file_digest(path)
        except FileNotFoundError:
            raise BlobError(
                f"blob {blob.sha256.hex()} is not in {self._root}: "
                "was it pruned, or is this another store than its writer's?"
            ) from None
        except OSError as error:
            raise DependencyError(f"can't read blob {path}: {error}") from error
        if (size, digest) != (blob.size, blob.sha256):
            raise BlobError(
                f"blob {path} has {size} bytes of SHA-256 {digest.hex()}, but should have "
                f"{blob.size} bytes of {blob.sha256.hex()}: the file is damaged, remove it"
            )
        return path

    def holds(self, blob: Blob) -> bool:
        """See BlobStore."""
        path = self._path(blob)
        return path.is_file() and path.stat().st_size == blob.size

    def verify(self, blob: Blob) -> None:
        """See BlobStore. Reads the blob whole."""
        self.get(blob)

    def stored(self) -> Iterator[StoredBlob]:
        """See BlobStore."""
        blobs = [(at, f"{at.parent.name}{at.name}") for at in self._root.glob(f"{_HEX * 2}/*")]
        left = [(at, "") for prefix in ("put-", "gone-") for at in self._root.glob(f"{prefix}*")]
        for path, name in sorted(blobs + left):
            if len(name) not in (0, 64):
                continue  # none of ours
            with suppress(FileNotFoundError):  # just removed, or put in its place
                stat = path.stat()
                yield StoredBlob(name, stat.st_size, stat.st_mtime, path)

    def remove(self, blob: StoredBlob, put_before: float) -> bool:
        """See BlobStore."""
        with _unreachable(f"remove {blob.path}"):
            path, aside = Path(blob.path), self._root / f"gone-{blob.path.name}"
            try:
                if path.stat().st_mtime >= put_before:
                    return False
                path.rename(aside)
                if aside.stat().st_mtime >= put_before:  # put again in this very moment
                    aside.replace(path)
                    return False
            except FileNotFoundError:
                return False
            aside.unlink()
            return True

    def _touch(self, blob: Blob) -> bool:
        """Says that a blob was put again. False where it was removed in this very moment."""
        try:
            os.utime(self._path(blob))
        except FileNotFoundError:
            return False
        return True

    def _path(self, blob: Blob) -> Path:
        name = blob.sha256.hex()
        return self._root / name[:2] / name[2:]

    def _holds_whole(self, blob: Blob) -> bool:
        """Whether the blob is there and whole; a damaged one is to be written again."""
        return self.holds(blob) and file_digest(self._path(blob)) == blob.sha256

    def _place(self, temporary: Path, path: Path) -> None:
        new_folder = not path.parent.is_dir()
        path.parent.mkdir(exist_ok=True)
        temporary.replace(path)
        sync_folder(path.parent)
        if new_folder:
            sync_folder(self._root)


def sync_folder(folder: Path) -> None:
    """Makes a folder's entries (names made, renamed, removed) durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy(data: bytes | Path, target: BinaryIO, media: str) -> Blob:
    sha256, size = hashlib.sha256(), 0
    for chunk in [data] if isinstance(data, bytes) else _chunks(data):
        sha256.update(chunk)
        target.write(chunk)
        size += len(chunk)
    return Blob(sha256=sha256.digest(), size=size, media=media)


def file_digest(path: Path) -> bytes:
    """The SHA-256 of a file's bytes."""
    sha256 = hashlib.sha256()
    for chunk in _chunks(path):
        sha256.update(chunk)
    return sha256.digest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


@contextmanager
def _unreachable(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DependencyError(f"can't {action}: {error}. Free space or mend it") from error
