"""Stores a policy's versions in the blob store: full weights, or deltas since full weights.

Between two full versions lies a chain of deltas (`services/models/deltas.py`). A version is stored
in full if its delta would not be smaller, if the chain would cost as much as full weights, after
`full_every` versions, and if a blob of the chain is missing. Versions of an adapter are stored in
the same way; their base is stored once.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from headrace.errors import BlobError
from headrace.schemas.events import Blob, PolicyPublished, WeightsDelta
from headrace.services.models.blobs import BlobStore, describe, disk_errors
from headrace.services.models.deltas import diff, write_diff
from headrace.services.models.weights import WeightsFile, tensor_digests, weights_digest

logger = logging.getLogger(__name__)

SAFETENSORS = "application/vnd.safetensors"


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version's weights in the blob store."""

    digest: bytes
    """`weights_digest` of the version's weights."""
    full: Blob
    """The weights of `full_version`."""
    full_version: int
    deltas: tuple[WeightsDelta, ...] = ()
    """What to apply to `full`, in this order."""
    tensors: Blob | None = None
    """The table of `tensor_digests`, as JSON. None if an older release stored the version. It is
    stored again if it is lost, but only an error about other blobs needs it."""

    @classmethod
    def of(cls, published: PolicyPublished) -> StoredVersion | None:
        """Returns what a publication names; None if it names no weights."""
        if published.full is None:
            return None
        full, deltas, tensors = published.full, published.deltas, published.tensor_digests
        return cls(published.digest, full, published.full_version, deltas, tensors)

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """All blobs that a reader of this version needs to have its weights."""
        return (self.full, *(delta.blob for delta in self.deltas))


class VersionStore:
    """Stores one policy's versions one after the other. All methods block.

    Keeps the newest weights: the next delta starts from them, and they are stored again if the blob
    store loses them. Weights that are a file on disk stay there, and the store removes the file
    once it has newer weights. So it never holds them in memory. Methods that store raise
    DependencyError if the store can't.
    """

    def __init__(self, blobs: BlobStore, full_every: int = 1) -> None:
        """Every `full_every` versions the weights are stored in full."""
        self._blobs = blobs
        self._full_every = full_every
        self._version = -1
        self._weights: WeightsFile = b""
        self._stored: StoredVersion | None = None
        self._base: tuple[Blob, Callable[[], bytes]] | None = None

    def keep_base(self, file: Callable[[], bytes]) -> Blob:
        """Stores the weights that all versions are adapters of, and repairs them from then on."""
        data = file()
        blob = describe(data, SAFETENSORS)
        self._blobs.claim(blob)
        try:
            self._blobs.verify(blob)
        except BlobError:
            self._blobs.put(data, SAFETENSORS)
        self._base = blob, file
        return blob

    def keep_logprobs(self, packed: bytes) -> Blob:
        """Stores what `pack_logprobs` returned."""
        return self._blobs.put(packed, "application/octet-stream")

    def add(self, version: int, weights: WeightsFile) -> StoredVersion:
        """Stores the next version. A file on disk belongs to this object from then on."""
        digest = weights_digest(weights)
        stored = self._following(version, weights, digest)
        return self._keep(version, weights, stored or self._in_full(version, weights, digest))

    def resume(self, newest: PolicyPublished, weights: WeightsFile) -> StoredVersion:
        """Continues from a published version with these weights, and stores them if need be.

        If the result is not what the publication names, the version must be published again.
        """
        digest, published = weights_digest(weights), StoredVersion.of(newest)
        for blob in published.blobs if published is not None else ():
            self._blobs.claim(blob)  # An older release may have put it, without a marker.
        if published is None or published.digest != digest:
            stored = self._in_full(newest.version, weights, digest)
        else:
            stored = self._repaired(newest.version, weights, published)
        return self._keep(newest.version, weights, stored)

    def full_file(self, published: PolicyPublished) -> Path | None:
        """Returns the file of the full weights that a published version builds on, which have its
        tensors' names, dtypes and shapes. None if the store has lost them."""
        stored = StoredVersion.of(published)
        try:
            return None if stored is None else self._blobs.get(stored.full)
        except BlobError as error:
            logger.warning("version %d can't be compared: %s", published.version, error)
            return None

    def repair(self) -> tuple[StoredVersion, bool]:
        """Stores the newest weights again if the store has lost or damaged them.

        Also returns whether other blobs hold them now. Then the version must be published again.
        """
        before = self._stored
        assert before is not None, "no version is stored yet"
        self._repair_base()
        after = self._repaired(self._version, self._weights, before)
        self._stored = after
        return after, after != before

    def _keep(self, version: int, weights: WeightsFile, stored: StoredVersion) -> StoredVersion:
        before, self._weights = self._weights, weights
        self._version, self._stored = version, stored
        if isinstance(before, Path) and before != weights:
            before.unlink(missing_ok=True)
        if self._base is not None and not self._blobs.holds(self._base[0]):
            self._repair_base()
        return stored

    def _following(self, version: int, weights: WeightsFile, digest: bytes) -> StoredVersion | None:
        """Stores a version as a delta. Returns None if it must be stored in full."""
        before = self._stored
        if before is None:
            return None
        if digest == before.digest:
            return self._repaired(version, weights, before)
        if version - before.full_version >= self._full_every:
            return None
        if not all(self._blobs.holds(blob) for blob in before.blobs):
            logger.warning(
                "version %d is stored in full because a blob of its delta chain is missing", version
            )
            return None
        chain = sum(delta.blob.size for delta in before.deltas)
        blob = self._put_delta(weights, before.full.size - chain)
        if blob is None:
            return None
        link = WeightsDelta(blob=blob, from_version=self._version, to_version=version)
        deltas, tensors = (*before.deltas, link), self._put_digests(weights)
        return StoredVersion(digest, before.full, before.full_version, deltas, tensors)

    def _put_delta(self, weights: WeightsFile, limit: int) -> Blob | None:
        """Stores the delta to these weights. Returns None if it has `limit` bytes or more."""
        if isinstance(weights, bytes):
            delta = diff(self._weights, weights, limit)
            return None if delta is None else self._blobs.put(delta, SAFETENSORS)
        with (
            disk_errors(f"write a delta beside {weights}"),
            tempfile.NamedTemporaryFile(dir=weights.parent) as file,
        ):
            if not write_diff(self._weights, weights, limit, cast("BinaryIO", file)):
                return None
            file.flush()
            return self._blobs.put(Path(file.name), SAFETENSORS)

    def _repaired(self, version: int, weights: WeightsFile, stored: StoredVersion) -> StoredVersion:
        """Returns `stored` if the store has all its blobs; else stores the weights in full, or the
        digests of their tensors if only these are lost."""
        if self._has_lost("the newest weights", *stored.blobs):
            again = self._in_full(version, weights, stored.digest)
            return stored if (again.full, ()) == (stored.full, stored.deltas) else again
        if stored.tensors is not None and self._has_lost("the tensors' digests", stored.tensors):
            return replace(stored, tensors=self._put_digests(weights))
        return stored

    def _has_lost(self, what: str, *blobs: Blob) -> bool:
        try:
            for blob in blobs:
                self._blobs.verify(blob)
        except BlobError as error:
            logger.error("%s are stored again: %s", what, error)
            return True
        return False

    def _repair_base(self) -> None:
        if self._base is None:
            return
        blob, file = self._base
        try:
            self._blobs.verify(blob)
        except BlobError as error:
            logger.error("the base weights of the adapters are stored again: %s", error)
            self._blobs.put(file(), SAFETENSORS)

    def _in_full(self, version: int, weights: WeightsFile, digest: bytes) -> StoredVersion:
        full = self._blobs.put(weights, SAFETENSORS)
        return StoredVersion(digest, full, version, tensors=self._put_digests(weights))

    def _put_digests(self, weights: WeightsFile) -> Blob:
        table = json.dumps(tensor_digests(weights))
        return self._blobs.put(table.encode(), "application/json")
