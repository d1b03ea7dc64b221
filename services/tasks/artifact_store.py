"""Stores the files of tasks and episodes in the blob store, and fetches them.

A file is stored before the event that names it. Only the event knows the file's name: in the store,
equal bytes are one blob.
"""

from __future__ import annotations

import asyncio
import mimetypes
import os
import stat
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from headrace.errors import BlobError, DependencyError, InfrastructureError, UsageError
from headrace.schemas.events import Blob
from headrace.schemas.recipe.task_settings import Artifacts
from headrace.schemas.untrusted.artifact_names import BadName, by_name, check_names
from headrace.services.base.types import TaskFile
from headrace.services.models.blobs import BlobStore, describe, disk_errors

AT_ONCE = 4
"""Files that a process stores or verifies at the same time: each is in memory as a whole."""
CLAIMED = 4096
"""Blobs of which a process remembers that its namespace has marked them."""
UNAVAILABLE = "artifacts_unavailable"
"""Code of the failure of an episode whose files can't be stored or fetched."""
LATE_S = 10.0
"""Seconds in which the store is asked again for a file that it can't give or take. One on a network
may show a file a while after it was stored."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
Content = bytes | Path
"""The bytes of a file, or a file that has them."""
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Stored:
    """Files that are in the blob store."""

    artifacts: tuple[Blob, ...] = ()
    left_out: tuple[str, ...] = ()
    """What was not stored because it exceeds a limit: the names, each with the reason."""


class ArtifactStore:
    """The files of one namespace, within the limits of its recipe."""

    def __init__(self, blobs: BlobStore, limits: Artifacts) -> None:
        self.limits = limits
        self._blobs = blobs
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._claimed: OrderedDict[bytes, None] = OrderedDict()

    def files_of(self, artifacts: Iterable[Blob]) -> dict[str, TaskFile]:
        """Returns the files of a task by name. Nothing is fetched yet.

        Raises UsageError if a name is not the name of a file.
        """
        try:
            found = by_name(artifacts)
        except BadName as error:
            raise UsageError(f"the files of the task: {error}") from error
        return {
            name: TaskFile(name, blob.size, partial(self.fetch, blob))
            for name, blob in found.items()
        }

    async def fetch(self, blob: Blob) -> Path:
        """Returns a local file with the bytes of an artifact, and marks the blob as needed.

        Raises InfrastructureError if the store can't give it for LATE_S.
        """
        return await self._patiently(blob.name, partial(self._fetch, blob))

    async def _patiently(self, name: str, call: Callable[[], Awaitable[R]]) -> R:
        """Asks the store again for LATE_S, with pauses.

        Otherwise an episode would spend all its attempts before a file is there, or can be stored.
        """
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        until = loop.time() + LATE_S
        while True:
            try:
                return await call()
            except (BlobError, DependencyError) as error:
                if loop.time() + pause_s > until:
                    raise InfrastructureError(UNAVAILABLE, f"file {name!r}: {error}") from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _fetch(self, blob: Blob) -> Path:
        async with self._turns:
            if blob.sha256 not in self._claimed:
                await asyncio.to_thread(self._blobs.claim, blob)
                self._claimed[blob.sha256] = None
                while len(self._claimed) > CLAIMED:
                    self._claimed.popitem(last=False)
            return await asyncio.to_thread(self._blobs.get, blob)

    async def put(self, files: Mapping[str, Content], earlier: Mapping[str, int]) -> Stored:
        """Stores the files that an observation gives out, as far as the limits allow.

        `earlier` has the sizes in bytes of those that the attempt gave out before. Raises BadName
        for a wrong name, and InfrastructureError if the store can't take a file for LATE_S.
        """
        check_names(files)
        sizes, stored, left_out = dict(earlier), [], []
        for name in sorted(files):
            found = await self._patiently(name, partial(self._put, files, name, sizes))
            if isinstance(found, str):
                left_out.append(f"{name}: {found}")
            else:
                stored.append(found)
                sizes[name] = found.size
        return Stored(tuple(stored), tuple(left_out))

    async def _put(
        self, files: Mapping[str, Content], name: str, sizes: Mapping[str, int]
    ) -> Blob | str:
        """Stores a file, or returns which limit it exceeds. Others have their turn meanwhile if the
        store refuses it: it is read again then."""
        async with self._turns:
            data = await asyncio.to_thread(self._read, files, name)
            why = self._excess(sizes, name, data)
            if why or isinstance(data, int):
                return why
            return await asyncio.to_thread(self._store, name, data)

    def _read(self, files: Mapping[str, Content], name: str) -> bytes | int:
        """Returns the bytes of a file, or its size in bytes if it is too large to be read."""
        content, most = files[name], self.limits.file_mb << 20
        if isinstance(content, bytes):
            return content
        with disk_errors(f"read {content}"):
            # A file that grows meanwhile is not read on without an end.
            with open(content, "rb", opener=_without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise BadName(f"{name!r} is not a plain file")
                data = file.read(most + 1)
            return data if len(data) <= most else content.stat().st_size

    def _excess(self, sizes: Mapping[str, int], name: str, data: bytes | int) -> str:
        """Returns which limit a file exceeds, or an empty text."""
        limits, size = self.limits, data if isinstance(data, int) else len(data)
        others = {other: of for other, of in sizes.items() if other != name}
        if size > limits.file_mb << 20:
            return f"it has {size:,} bytes, and artifacts.file_mb is {limits.file_mb}"
        if sum(others.values()) + size > limits.episode_mb << 20:
            return f"all files have more than artifacts.episode_mb, {limits.episode_mb} MiB"
        if len(others) >= limits.files:
            return f"there are more than artifacts.files, {limits.files}"
        return ""

    def _store(self, name: str, data: bytes) -> Blob:
        blob = self._blobs.put(data, mimetypes.guess_type(name)[0] or "")
        return blob.model_copy(update={"name": name})


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file. That of a pipe would wait for a writer, which may never come."""
    return os.open(path, flags | os.O_NONBLOCK)


def store_task_files(
    blobs: BlobStore | None, limits: Artifacts, files: Mapping[str, Content | Blob]
) -> tuple[Blob, ...]:
    """Stores the files of a task that is to be submitted. Blocks.

    With None instead of a store, it only checks and describes them. A Blob is a file that is in the
    store already, such as one that an episode gave out. Raises UsageError if a file can't be read
    or is too large, or if a name is wrong, and DependencyError if the store can't take a file.
    """
    try:
        check_names(files)
    except BadName as error:
        raise UsageError(f"artifacts: {error}") from error
    if len(files) > limits.files:
        raise UsageError(
            f"artifacts: {len(files)} files; artifacts.files of the recipe allows {limits.files}"
        )
    left, stored = limits.task_mb << 20, []
    for name, content in files.items():
        media = mimetypes.guess_type(name)[0] or ""
        if isinstance(content, Blob):
            blob = content if blobs is None else _known(blobs, content)
        else:
            data = _content(name, content, limits)
            blob = describe(data, media) if blobs is None else blobs.put(data, media)
        left -= blob.size
        if left < 0 or blob.size > limits.file_mb << 20:
            raise UsageError(
                f"artifacts.{name}: the recipe allows {limits.file_mb} MiB for a file "
                f"(artifacts.file_mb) and {limits.task_mb} MiB for all of a task "
                "(artifacts.task_mb)"
            )
        stored.append(blob.model_copy(update={"name": name}))
    return tuple(stored)


def _known(blobs: BlobStore, blob: Blob) -> Blob:
    blobs.claim(blob)  # before it is looked for: then no prune removes it in between
    if not blobs.holds(blob):
        raise UsageError(
            f"the blob store has no file {blob.sha256.hex()} of {blob.size} bytes. Check that "
            "--blobs names the store of the run that made it"
        )
    return blob


def _content(name: str, content: Content, limits: Artifacts) -> bytes:
    if isinstance(content, bytes):
        return content
    try:
        with open(content, "rb") as file:
            return file.read((limits.file_mb << 20) + 1)
    except OSError as error:
        raise UsageError(f"artifacts.{name}: can't read {content}: {error.strerror}") from error


def write_artifacts(blobs: BlobStore, artifacts: Sequence[Blob], folder: Path) -> dict[str, Path]:
    """Writes artifacts below a folder, each under its name. Returns the files by name. Blocks.

    A file that exists is replaced. Raises UsageError if a name would lead out of the folder,
    BlobError if the store does not have a file, and DependencyError if it can't be written.
    """
    try:
        found = by_name(artifacts)
    except BadName as error:
        raise UsageError(f"the log has a wrong name of a file: {error}") from error
    written = {}
    for name, blob in found.items():
        path = folder / name
        with disk_errors(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.parent.resolve().is_relative_to(folder.resolve()):
                raise UsageError(f"{path.parent} is a link out of {folder}. Choose another folder")
            data = blobs.get(blob).read_bytes()
            temporary = path.with_name(f".part-{uuid.uuid4().hex}")
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        written[name] = path
    return written
