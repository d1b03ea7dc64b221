"""A policy's versions in the blob store: whole weights, or what has changed since the last ones.

Between two whole ones lies a chain of deltas (`services/models/deltas.py`). A version is whole
where a delta would not be smaller, where the chain would come to cost as much as whole weights,
after `full_every` versions, and wherever a blob of the chain is gone. Versions of an adapter are
stored in the same way, and beside them the base, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import BlobError
from headrace.schemas.events import Blob, PolicyPublished, WeightsDelta
from headrace.services.models.blobs import BlobStore
from headrace.services.models.deltas import diff
from headrace.services.models.weights import weights_digest

logger = logging.getLogger(__name__)

SAFETENSORS = "application/vnd.safetensors"


@dataclass(frozen=True, slots=True)
class Stored:
    """A version's weights in the blob store."""

    digest: bytes
    full: Blob
    full_version: int
    deltas: tuple[WeightsDelta, ...] = ()

    @classmethod
    def of(cls, published: PolicyPublished) -> Stored | None:
        """What a publication says; None where it names no weights."""
        if published.full is None:
            return None
        return cls(published.digest, published.full, published.full_version, published.deltas)

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """All that a reader of this version needs."""
        return (self.full, *(delta.blob for delta in self.deltas))


class VersionStore:
    """Stores one policy's versions in turn. Keeps the newest weights in memory: the next delta's
    base, and what is stored again where the store has lost them. All methods block."""

    def __init__(self, blobs: BlobStore, full_every: int = 1) -> None:
        """`full_every` versions lie between two whole ones."""
        self._blobs = blobs
        self._full_every = full_every
        self._version = -1
        self._weights = b""
        self._stored: Stored | None = None
        self._base: tuple[Blob, Callable[[], bytes]] | None = None

    def keep_base(self, file: Callable[[], bytes]) -> Blob:
        """Stores what all versions are adapters of, and looks after it with them."""
        blob = self._blobs.put(file(), SAFETENSORS)
        self._base = blob, file
        return blob

    def add(self, version: int, weights: bytes) -> Stored:
        """Stores the next version, a safetensors file. DependencyError where the store can't."""
        digest = weights_digest(weights)
        stored = self._following(version, weights, digest)
        if stored is None:
            stored = self._whole(version, weights, digest)
        return self._keep(version, weights, stored)

    def adopt(self, newest: PolicyPublished, weights: bytes) -> Stored:
        """Goes on from a version of the log with these weights, and sees to it that they are there.

        Where what comes back is not what the log says, the version must be published again.
        """
        digest, said = weights_digest(weights), Stored.of(newest)
        if said is None or said.digest != digest:
            stored = self._whole(newest.version, weights, digest)
        else:
            stored = self._repaired(newest.version, weights, said)
        return self._keep(newest.version, weights, stored)

    def mend(self) -> tuple[Stored, bool]:
        """Stores the newest weights again where the store has lost or damaged them.

        Also says whether they must be published again: by other blobs than before.
        """
        before = self._stored
        assert before is not None, "no version is stored yet"
        self._repair_base()
        after = self._repaired(self._version, self._weights, before)
        self._stored = after
        return after, after != before

    def _keep(self, version: int, weights: bytes, stored: Stored) -> Stored:
        self._version, self._weights, self._stored = version, weights, stored
        if self._base is not None and not self._blobs.holds(self._base[0]):
            self._repair_base()
        return stored

    def _following(self, version: int, weights: bytes, digest: bytes) -> Stored | None:
        """The version by those before it; None where it must be stored whole."""
        before = self._stored
        if before is None:
            return None
        if digest == before.digest:
            return self._repaired(version, weights, before)
        if version - before.full_version >= self._full_every:
            return None
        if not all(self._blobs.holds(blob) for blob in before.blobs):
            logger.warning("version %d is stored whole: a blob of those before it is gone", version)
            return None
        chain = sum(delta.blob.size for delta in before.deltas)
        delta = diff(self._weights, weights, limit=before.full.size - chain)
        if delta is None:
            return None
        link = WeightsDelta(
            blob=self._blobs.put(delta, SAFETENSORS),
            from_version=self._version,
            to_version=version,
        )
        return Stored(digest, before.full, before.full_version, (*before.deltas, link))

    def _repaired(self, version: int, weights: bytes, stored: Stored) -> Stored:
        """The same, if the store has all of it; else whole weights, put again."""
        try:
            for blob in stored.blobs:
                self._blobs.verify(blob)
        except BlobError as error:
            logger.error("the newest weights are stored again: %s", error)
            again = self._whole(version, weights, stored.digest)
            return stored if (again.full, ()) == (stored.full, stored.deltas) else again
        return stored

    def _repair_base(self) -> None:
        if self._base is None:
            return
        blob, file = self._base
        try:
            self._blobs.verify(blob)
        except BlobError as error:
            logger.error("the base of the adapters is stored again: %s", error)
            self._blobs.put(file(), SAFETENSORS)

    def _whole(self, version: int, weights: bytes, digest: bytes) -> Stored:
        return Stored(digest, self._blobs.put(weights, SAFETENSORS), version)
