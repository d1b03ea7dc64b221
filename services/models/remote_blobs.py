"""A blob store on any file system that fsspec serves: `s3://bucket/prefix`, `gs://…`, `memory://`.

Blobs are named as in a local folder: `<prefix>/<2 hex digits>/<62 more>`. A blob that was read is
kept in a local folder, verified, for as long as it is in use. An object store takes an object whole
or not at all. Another kind of store may keep a part of a blob after a failed upload: then the size
and the digest show the damage, and the next `put` replaces the part.

Every call has a time limit and is tried several times. Credentials and endpoints are settings of
fsspec (https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

from headrace.errors import BlobError, DependencyError, UsageError
from headrace.schemas.events import Blob
from headrace.services.base.blob_cache import BlobCache
from headrace.services.base.concurrency import in_daemon_thread
from headrace.services.models.blob_owners import BlobOwners, SmallFiles, StoredBlob
from headrace.services.models.blobs import (
    BlobStore,
    LocalBlobStore,
    absent,
    describe,
    disk_errors,
)

T = TypeVar("T")

ATTEMPTS = 4
RETRY_S = 0.5
"""Wait before the second attempt. It doubles before each further attempt."""
CALL_S = 30.0
"""Time limit of a call that transfers no blob."""
SLOWEST_BYTES_PER_S = 1_000_000
"""A slower transfer fails."""
RANGE_BYTES = 64_000_000
"""How many bytes of a blob are fetched with one call. They are held in memory."""


def open_blob_store(url: str, cache: Path, owner: str | None) -> BlobStore:
    """Opens the store at a path, a `file://` URL, or any URL that fsspec serves.

    `cache` is a local folder for the blobs that a remote store sent. `owner` is who puts blobs
    here; with None, blobs get no marker. Raises UsageError if no store serves the URL.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return LocalBlobStore(Path(unquote(parts.path)), owner)
    if not url or parts.scheme == "file":
        raise UsageError(f"blob store {url!r}: give a folder, as a path or as file:///path")
    if "://" in url:
        return RemoteBlobStore(url, cache, owner)
    return LocalBlobStore(Path(url).expanduser(), owner)


class RemoteBlobStore(BlobStore, SmallFiles):
    """A BlobStore on any file system that fsspec serves. Its own markers are its small files."""

    def __init__(self, url: str, cache: Path, owner: str | None = None) -> None:
        """`cache` is a local folder. `owner` is who puts blobs here; with None, blobs get no
        marker. Raises UsageError if fsspec can't serve the URL.
        """
        self._url = url
        self.owners = BlobOwners(self, owner)
        self._cache = BlobCache(cache)
        try:
            # Imported here because the library comes with an extra.
            import fsspec  # type: ignore[import-untyped]

            self._files, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise UsageError(
                f"blob store {url!r} needs more packages: {error}. Run pip install "
                "'headrace[remote]', and fsspec's extra for the scheme, such as 'fsspec[s3]'"
            ) from error
        except ValueError as error:
            raise UsageError(f"blob store {url!r}: {error}") from error

    def put(self, data: bytes | Path, media: str = "") -> Blob:
        """Always uploads: an existing blob may be damaged."""
        blob = describe(data, media)
        self.claim(blob)
        key = self._key(blob)

        def upload() -> None:
            self._files.makedirs(key.rpartition("/")[0], exist_ok=True)
            if isinstance(data, bytes):
                self._files.pipe_file(key, data)
            else:
                self._files.put_file(str(data), key)
            if (size := self._size(key)) != blob.size:
                raise OSError(f"{size} of {blob.size} bytes arrived")

        self._call(f"write blob {key}", upload, moves=blob.size)
        return blob

    def claim(self, blob: Blob) -> None:
        self.owners.add(blob.sha256.hex(), lambda: self._stored_size(blob) is not None)

    def get(self, blob: Blob) -> Path:
        """Returns the local copy if there is one and it is undamaged.

        If several processes of a machine need a blob, one of them fetches it for all.
        """
        if path := self._cache.find(blob):
            return path
        self.verify(blob)
        with disk_errors(
            f"keep the {blob.size} bytes of blob {self._key(blob)} on the disk of this machine, in "
            f"{self._cache.folder}"
        ):
            self._cache.remove_unused()
            with self._cache.only_one(blob, CALL_S + blob.size / SLOWEST_BYTES_PER_S):
                return self._cache.find(blob) or self._fetch(blob)

    def keep(self, blob: Blob) -> None:
        """Counts the local copy of a blob as used now, without reading it."""
        self._cache.keep(blob)

    def _fetch(self, blob: Blob) -> Path:
        """Fetches one range after the other: if a call hangs, only its range is fetched again."""
        key = self._key(blob)

        def fetch(file: IO[bytes]) -> None:
            for start in range(0, blob.size, RANGE_BYTES):
                file.write(self._read(key, start, min(start + RANGE_BYTES, blob.size)))

        path = self._cache.add(blob, fetch)
        if path is None:
            raise BlobError(
                f"blob {key} of {self._url} is damaged: its bytes have another SHA-256 than "
                "its name. Remove it from the store"
            )
        return path

    def _read(self, key: str, start: int, end: int) -> bytes:
        """Returns the bytes `start` to `end` (exclusive) of an object."""

        def read() -> bytes:
            data: bytes = self._files.cat_file(key, start=start, end=end)
            if len(data) != end - start:
                raise OSError(f"{len(data)} of {end - start} bytes arrived")
            return data

        return self._call(f"read bytes {start} to {end} of blob {key}", read, moves=end - start)

    def holds(self, blob: Blob) -> bool:
        return self._stored_size(blob) == blob.size

    def verify(self, blob: Blob) -> None:
        """Compares name and size, and transfers no bytes."""
        key, size = self._key(blob), self._stored_size(blob)
        if size is None:
            raise absent(blob, self._url)
        if size != blob.size:
            raise BlobError(
                f"blob {key} of {self._url} is damaged: it has {size} of {blob.size} bytes. "
                "Remove it from the store"
            )

    def stored(self) -> Iterator[StoredBlob]:
        for key, entry in self._below(""):
            path = PurePosixPath(key)
            name = f"{path.parent.name}{path.name}"
            if len(name) == 64 and set(name) <= set("0123456789abcdef"):
                yield StoredBlob(name, int(entry["size"]), self._put_at(key, entry), path)

    def remove(self, blob: StoredBlob, put_before: float) -> bool:
        """Most stores do not notice a put at the very moment of the removal."""
        key = str(blob.path)

        def remove() -> bool:
            try:
                if self._put_at(key, self._files.info(key)) >= put_before:
                    return False
                self._files.rm_file(key)
            except FileNotFoundError:
                return False
            return True

        return self._call(f"remove blob {key}", remove)

    def touch(self, path: str) -> None:
        key = self._key_of(path)

        def write() -> None:
            self._files.makedirs(key.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(key, b"headrace\n")  # some stores do not take empty objects

        self._call(f"write {key}", write)

    def times(self, folder: str) -> dict[str, float]:
        root = self._key_of("")
        return {
            key.removeprefix(root): self._put_at(key, entry) for key, entry in self._below(folder)
        }

    def delete(self, path: str) -> None:
        key = self._key_of(path)

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(key)

        self._call(f"remove {key}", remove)

    def _below(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        """Returns the keys of all objects below a folder, each with what the store says of it."""

        def find() -> dict[str, dict[str, Any]]:
            self._files.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._files.find(self._key_of(folder), detail=True)
            return found

        return sorted(self._call(f"list {folder}", find, moves=60 * SLOWEST_BYTES_PER_S).items())

    def _put_at(self, key: str, entry: dict[str, Any]) -> float:
        """When an object was last written; now if the store does not say, so that it is kept."""
        for name in ("LastModified", "last_modified", "updated", "mtime", "created"):
            match entry.get(name):
                case datetime() as moment:
                    return moment.timestamp()
                case int() | float() as seconds:
                    return float(seconds)
                case str() as text:
                    return datetime.fromisoformat(text).timestamp()
        return time.time()

    def _key(self, blob: Blob) -> str:
        name = blob.sha256.hex()
        return self._key_of(f"{name[:2]}/{name[2:]}")

    def _key_of(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _stored_size(self, blob: Blob) -> int | None:
        key = self._key(blob)
        return self._call(f"look for blob {key}", lambda: self._size(key))

    def _size(self, key: str) -> int | None:
        """Bytes of an object, None if it does not exist. Ignores listings that fsspec cached."""
        self._files.invalidate_cache()
        try:
            return int(self._files.info(key)["size"])
        except FileNotFoundError:
            return None

    def _call(self, action: str, work: Callable[[], T], moves: int = 0) -> T:
        """Runs `work`, which transfers `moves` bytes. If it fails, tries again a few times."""
        limit_s = CALL_S + moves / SLOWEST_BYTES_PER_S
        for attempt in range(ATTEMPTS):
            try:
                # After a timeout the thread goes on, and its result is ignored.
                return in_daemon_thread(work, "blobs").result(limit_s)
            except Exception as error:
                # Each backend raises the errors of its own libraries: they have no common type.
                failed = error
            if attempt + 1 < ATTEMPTS:
                time.sleep(RETRY_S * 2**attempt)
        reason = str(failed) or type(failed).__name__
        if isinstance(failed, TimeoutError):
            reason = f"no answer within {limit_s:.0f} s"
        raise DependencyError(
            f"can't {action} of the blob store {self._url}, {ATTEMPTS} times: {reason}. Check that "
            "the store is reachable and that the credentials are right"
        ) from failed
