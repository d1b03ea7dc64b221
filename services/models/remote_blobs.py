"""Blobs in whatever fsspec reaches: `s3://bucket/prefix`, `gs://…`, `memory://` and more.

Named and laid out as in a folder: `<prefix>/<2 hex digits>/<62 more>`. What is got is kept in a
folder of this machine, verified, for as long as it is in use. An object store takes an object
whole or not at all; where another kind of store may leave a part of one, its size and digest give
it away, and the next `put` replaces it.

Every call has a time limit and is tried again a few times. Credentials, endpoints and the like are
fsspec's own settings (https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from headrace.errors import BlobError, DependencyError, UsageError
from headrace.schemas.events import Blob
from headrace.services.models.blobs import StoredBlob, file_digest

T = TypeVar("T")

ATTEMPTS = 4
RETRY_S = 0.5
"""Before the second attempt; twice as long before each further one."""
CALL_S = 30.0
"""Time limit of a call that moves no blob."""
SLOWEST_BYTES_PER_S = 1_000_000
"""A transfer slower than that is given up."""
UNUSED_S = 3600.0
"""What nobody got for so long is removed from the local folder."""


class RemoteBlobStore:
    """A BlobStore on any file system that fsspec knows."""

    def __init__(self, url: str, cache: Path) -> None:
        """`cache` is a folder of this machine. UsageError where fsspec can't serve the URL."""
        self._url = url
        self._cache = cache
        try:
            import fsspec  # type: ignore[import-untyped]

            self._files, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise UsageError(
                f"blob store {url!r} needs more packages: pip install 'headrace[remote]', and what "
                f"the scheme asks for, as 'fsspec[s3]': {error}"
            ) from error
        except ValueError as error:
            raise UsageError(f"blob store {url!r}: {error}") from error

    def put(self, data: bytes | Path, media: str = "") -> Blob:
        """See BlobStore. Always uploads: what is there may be damaged, or about to be pruned."""
        if isinstance(data, bytes):
            blob = Blob(sha256=hashlib.sha256(data).digest(), size=len(data), media=media)
        else:
            blob = Blob(sha256=file_digest(data), size=data.stat().st_size, media=media)
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

    def get(self, blob: Blob) -> Path:
        """See BlobStore. From the local folder, where it was got before and still is whole."""
        path = self._cache / blob.sha256.hex()
        with suppress(OSError):  # what can't be read here is got anew
            if path.stat().st_size == blob.size and file_digest(path) == blob.sha256:
                os.utime(path)
                return path
        self.verify(blob)
        self._make_room()
        handle, name = tempfile.mkstemp(dir=self._cache, prefix="get-")
        os.close(handle)
        temporary = Path(name)
        try:
            key = self._key(blob)
            self._call(f"read blob {key}", lambda: self._files.get_file(key, name), moves=blob.size)
            if file_digest(temporary) != blob.sha256:
                raise BlobError(f"blob {key} of {self._url} is damaged: other bytes than its name")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def holds(self, blob: Blob) -> bool:
        """See BlobStore."""
        key = self._key(blob)
        return self._call(f"look for blob {key}", lambda: self._size(key)) == blob.size

    def verify(self, blob: Blob) -> None:
        """See BlobStore. By name and size: the bytes stay where they are."""
        key = self._key(blob)
        size = self._call(f"look for blob {key}", lambda: self._size(key))
        if size is None:
            raise BlobError(
                f"blob {blob.sha256.hex()} is not in {self._url}: "
                "was it pruned, or is this another store than its writer's?"
            )
        if size != blob.size:
            raise BlobError(f"blob {key} of {self._url} is damaged: {size} of {blob.size} bytes")

    def stored(self) -> Iterator[StoredBlob]:
        """See BlobStore."""
        found: dict[str, dict[str, Any]] = self._call(
            f"list {self._url}",
            lambda: self._files.find(self._root, detail=True),
            moves=60 * SLOWEST_BYTES_PER_S,
        )
        for key, entry in sorted(found.items()):
            path = PurePosixPath(key)
            name = f"{path.parent.name}{path.name}"
            if len(name) == 64 and set(name) <= set("0123456789abcdef"):
                yield StoredBlob(name, int(entry["size"]), self._put_at(key, entry), path)

    def remove(self, blob: StoredBlob, put_before: float) -> bool:
        """See BlobStore. Most stores can't tell a put in the very moment of the removal."""
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

    def _put_at(self, key: str, entry: dict[str, Any]) -> float:
        """When an object was last written; now, where the store doesn't say: it is left alone."""
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
        return f"{self._root.rstrip('/')}/{name[:2]}/{name[2:]}"

    def _size(self, key: str) -> int | None:
        """Bytes of an object, past any listing that was kept; None where there is none."""
        self._files.invalidate_cache()
        try:
            return int(self._files.info(key)["size"])
        except FileNotFoundError:
            return None

    def _make_room(self) -> None:
        """Removes from the local folder what has not been got for long."""
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            for path in self._cache.iterdir():
                with suppress(FileNotFoundError):  # another process's doing
                    if path.stat().st_mtime < time.time() - UNUSED_S:
                        path.unlink()
        except OSError as error:
            raise DependencyError(f"can't keep blobs in {self._cache}: {error}") from error

    def _call(self, what: str, work: Callable[[], T], moves: int = 0) -> T:
        """Does work against the store, which moves so many bytes; a few times where it fails."""
        limit_s = CALL_S + moves / SLOWEST_BYTES_PER_S
        for attempt in range(ATTEMPTS):
            try:
                return _within(limit_s, work)
            except Exception as error:
                # Each backend raises what its own libraries do: there is no type for "failed".
                failed = error
            if attempt + 1 < ATTEMPTS:
                time.sleep(RETRY_S * 2**attempt)
        told = str(failed) or type(failed).__name__
        if isinstance(failed, TimeoutError):
            told = f"no answer within {limit_s:.0f} s"
        raise DependencyError(
            f"can't {what} of the blob store {self._url}, {ATTEMPTS} times: {told}. Is it "
            "reachable, and are the credentials right?"
        ) from failed


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Does work in a thread of its own. TimeoutError: then the thread is left to itself."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="blobs").start()
    return future.result(seconds)
