"""Owner markers: who needs a blob, so that `prune` never removes what another team needs.

Several namespaces, of one or more Kafka clusters, may share a blob store, and equal bytes are one
blob. So the store has a small file for each blob and owner, the marker:

    owners/<2 hex digits>/<62 more>.<cluster id>.<namespace>

A writer renews its marker before it puts a blob. A prune removes the markers of its own namespaces
only, and a blob only if no marker is left. No store that we support can check and remove in one
step, so two more rules exclude that a prune removes a blob that a writer has just marked:

- Before a prune looks at markers, it writes a notice, `removals/<2 hex digits>.<random>`, which is
  about all blobs whose names begin with these digits. It removes the notice when it has finished.
- After a writer has renewed its marker, it looks for notices. If there is one, the prune may have
  looked before. So the writer waits until the notice is gone, and renews its marker again. It does
  the same if there is no notice but its marker is gone, because a prune has just ended.

So the prune sees the new marker, or the writer sees what the prune has done. If a prune dies, its
notice stays. A writer waits DEAD_S for it at most, and a prune removes nothing later than REMOVAL_S
after it has written its notice. This needs a store whose lists show all that was written before, as
those of local folders, S3, Google Cloud Storage and Azure do, and requests that take effect within
DEAD_S - REMOVAL_S.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, Protocol
from urllib.parse import quote

from headrace.errors import DependencyError

OWNERS, REMOVALS = "owners", "removals"
UNKNOWN = "unknown"
"""The owner of a blob that was in the store before there were markers."""
REMOVAL_S = 60.0
"""A prune that has written a notice removes nothing after this time."""
DEAD_S = 300.0
"""A notice that a writer has seen for this time belongs to a prune that died."""
GIVE_UP_S = 4 * DEAD_S
"""A writer that could not be sure of its marker for this time gives up."""
POLL_S = 0.2


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


@dataclass(frozen=True, slots=True)
class Marker:
    """A file which says that an owner needs a blob."""

    name: str
    """SHA-256 of the blob in hex. The store need not have the blob yet."""
    owner: str
    """See `owner_name`; or UNKNOWN."""
    put_at: float
    """When the owner last put the blob, in seconds since the epoch."""

    @property
    def path(self) -> str:
        """The marker's path in the store."""
        return _marker_path(self.name, self.owner)


@dataclass(frozen=True, slots=True)
class Removal:
    """Markers that nobody needs any more, and their blob."""

    name: str
    """SHA-256 of the blob in hex."""
    markers: frozenset[Marker]
    """They are removed unless they were renewed meanwhile."""
    blob: StoredBlob | None = None
    """It is removed if it has no other marker. None if it is needed or absent."""
    put_before: float = 0.0
    """A blob that was put at this time or later stays. In seconds since the epoch."""


Removed = Literal["blob", "marker"]
"""What was removed: a blob with its markers, or only markers."""


class SmallFiles(Protocol):
    """Small files of a store. Paths are relative to the store's root."""

    def touch(self, path: str) -> None:
        """Writes a file, or renews its time. It is durable on return."""

    def times(self, folder: str) -> dict[str, float]:
        """Returns the paths of all files below a folder, each with when it was written."""

    def delete(self, path: str) -> None:
        """Removes a file if it exists."""


class BlobOwners:
    """The markers of one store. All methods block."""

    def __init__(
        self,
        files: SmallFiles,
        owner: str | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`owner` is who puts blobs here. With None, blobs get no marker."""
        self._files = files
        self._owner = owner
        self._clock = clock
        self._sleep = sleep

    def add(self, name: str, holds: Callable[[], bool]) -> None:
        """Marks a blob as needed by this owner. Call it before the blob is put or named.

        `holds` says whether the store has the blob. Raises DependencyError if the store fails, or
        if prunes do not end.
        """
        if self._owner is None:
            return
        # The order matters: a blob that has no marker although it was there before has no writer
        # that could still write one.
        if holds() and not self._of(name):
            self._files.touch(_marker_path(name, UNKNOWN))
        path, begun = _marker_path(name, self._owner), self._clock()
        first_seen: dict[str, float] = {}
        while True:
            self._files.touch(path)
            noticed = self._notices(name, first_seen)
            # A prune that began before the marker was renewed may have removed it, and ended.
            if not noticed and self._owner in {one.owner for one in self._of(name)}:
                return
            if self._clock() - begun > GIVE_UP_S:
                why = (
                    "`headrace prune` has been removing blobs. Check that no prune is repeated "
                    "without a pause"
                    if noticed
                    else f"the store has not listed {path}. It must list every file that was "
                    "written before"
                )
                raise DependencyError(f"blob {name} can't be put: for {GIVE_UP_S:.0f} s {why}")
            self._sleep(POLL_S)

    def markers(self) -> Iterator[Marker]:
        """Yields all markers."""
        return self._below(OWNERS)

    def remove(
        self, removals: Sequence[Removal], remove_blob: Callable[[StoredBlob, float], bool]
    ) -> list[Removed | None]:
        """Removes markers, and blobs without markers. All names must begin with the same 2 digits.

        Returns what was removed for each of them, in the same order. `remove_blob` is the store's
        `remove`.
        """
        (folder,) = {removal.name[:2] for removal in removals}
        notice = f"{REMOVALS}/{folder}.{uuid.uuid4().hex}"
        until = self._clock() + REMOVAL_S
        self._files.touch(notice)
        try:
            there: dict[str, set[Marker]] = {}
            for marker in self._below(f"{OWNERS}/{folder}"):
                there.setdefault(marker.name, set()).add(marker)
            return [
                self._remove(one, there.get(one.name, set()), until, remove_blob)
                for one in removals
            ]
        finally:
            self._files.delete(notice)

    def _remove(
        self,
        removal: Removal,
        there: set[Marker],
        until: float,
        remove_blob: Callable[[StoredBlob, float], bool],
    ) -> Removed | None:
        stale = there & removal.markers
        removed: Removed | None = None
        if there != stale and stale:
            removed, stale = self._delete(stale, until), set()
            if removal.blob is not None:
                # Another prune may have removed the other markers at the same time.
                there = set(self._of(removal.name))
        if there != stale:
            return removed
        if removal.blob is None:
            return self._delete(stale, until)
        # The blob goes first: a marker without a blob is found again, and a blob without a marker
        # could be anybody's.
        if self._clock() >= until or not remove_blob(removal.blob, removal.put_before):
            return removed
        self._delete(stale, until)
        return "blob"

    def _delete(self, markers: set[Marker], until: float) -> Removed | None:
        deleted: Removed | None = None
        for marker in markers:
            if self._clock() < until:
                self._files.delete(marker.path)
                deleted = "marker"
        return deleted

    def _of(self, name: str) -> list[Marker]:
        """Returns all markers of a blob."""
        return [one for one in self._below(f"{OWNERS}/{name[:2]}") if one.name == name]

    def _below(self, folder: str) -> Iterator[Marker]:
        for path, put_at in self._files.times(folder).items():
            digits, _, rest = path.removeprefix(f"{OWNERS}/").partition("/")
            more, _, owner = rest.partition(".")
            if owner:
                yield Marker(digits + more, owner, put_at)

    def _notices(self, name: str, first_seen: dict[str, float]) -> bool:
        """Whether a prune may be removing this blob. Removes the notices of prunes that died."""
        now, found = self._clock(), False
        for path in self._files.times(REMOVALS):
            if path.startswith(f"{REMOVALS}/{name[:2]}."):
                if now - first_seen.setdefault(path, now) < DEAD_S:
                    found = True
                else:
                    self._files.delete(path)
        return found


def owner_name(cluster_id: str, namespace: str) -> str:
    """Returns the owner of the blobs that a namespace of a Kafka cluster puts."""
    return f"{quote(cluster_id, safe='')}.{namespace}"


def _marker_path(name: str, owner: str) -> str:
    return f"{OWNERS}/{name[:2]}/{name[2:]}.{owner}"
