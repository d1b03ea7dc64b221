"""A blob store that a real network and real disks would give: late, torn, full, cut off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import BlobError, DependencyError
from headrace.schemas.events import Blob
from headrace.services.models.blob_owners import StoredBlob, owner_name
from headrace.services.models.blobs import LocalBlobStore
from tests.simulation.chronicle import Chronicle
from tests.simulation.virtual_time import loop


@dataclass(eq=False)
class BlobFaults:
    """Shares of writes."""

    late: float = 0.0
    """Readable only after some seconds."""
    torn: float = 0.0
    """Damaged for some seconds, then whole again."""
    refused: float = 0.0
    """The disk is full."""

    def heal(self) -> None:
        """From now on nothing fails."""
        self.late = self.torn = self.refused = 0.0


class SharedBlobs:
    """A BlobStore that several processes share."""

    def __init__(self, root: Path, faults: BlobFaults, chronicle: Chronicle) -> None:
        self._root = root
        self._store = LocalBlobStore(root, owner_name("memory", "simulated"))
        self.owners = self._store.owners
        self._faults = faults
        self._chronicle = chronicle
        self._readable_at: dict[bytes, float] = {}
        self._torn: dict[Path, bytes] = {}

    def put(self, data: bytes | Path, media: str = "") -> Blob:
        """See BlobStore."""
        chance = loop().random
        if chance.random() < self._faults.refused:
            self._chronicle.fault("a blob is refused", "blobs")
            raise DependencyError("the blob store is full, by chance")
        blob = self._store.put(data, media)
        seconds = chance.uniform(0.2, 6.0)
        if chance.random() < self._faults.late:
            self._chronicle.fault(f"a blob is late by {seconds:.1f} s", "blobs")
            self._readable_at.setdefault(blob.sha256, loop().time() + seconds)
        elif chance.random() < self._faults.torn:
            self._tear(blob, seconds)
        return blob

    def claim(self, blob: Blob) -> None:
        """See BlobStore."""
        self._store.claim(blob)

    def get(self, blob: Blob) -> Path:
        """See BlobStore."""
        if loop().time() < self._readable_at.get(blob.sha256, 0.0):
            raise BlobError("not there yet, by chance")
        return self._store.get(blob)

    def holds(self, blob: Blob) -> bool:
        """See BlobStore."""
        late = loop().time() < self._readable_at.get(blob.sha256, 0.0)
        return not late and self._store.holds(blob)

    def verify(self, blob: Blob) -> None:
        """See BlobStore."""
        self.get(blob)

    def stored(self) -> Iterator[StoredBlob]:
        """See BlobStore."""
        return self._store.stored()

    def remove(self, blob: StoredBlob, put_before: float) -> bool:
        """See BlobStore."""
        return self._store.remove(blob, put_before)

    def _tear(self, blob: Blob, seconds: float) -> None:
        name = blob.sha256.hex()
        path = self._root / name[:2] / name[2:]
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        self._chronicle.fault(f"a blob is torn for {seconds:.1f} s", "blobs")
        self._torn[path] = whole
        loop().call_later(seconds, path.write_bytes, whole)

    def repair(self) -> None:
        """Does at once what the coming seconds would: a short run ends before a blob is whole."""
        self._readable_at.clear()
        for path, whole in self._torn.items():
            if path.exists():
                path.write_bytes(whole)
