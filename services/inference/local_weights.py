"""Published weights as a file of this process's own, brought from version to version by deltas."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import BlobError, DependencyError
from headrace.schemas import events
from headrace.schemas.events import Blob, PolicyPublished, WeightsDelta
from headrace.services.inference.engine import AdapterWeights, Weights
from headrace.services.models.blobs import BlobStore
from headrace.services.models.deltas import apply
from headrace.services.models.weights import weights_digest

logger = logging.getLogger(__name__)


class LocalWeights:
    """One policy's weights. A delta changes the file in place: only one version is kept."""

    def __init__(self, blobs: BlobStore, folder: Path) -> None:
        self._blobs = blobs
        self._path = folder.with_name(f"{folder.name}.safetensors")
        self._version = -1
        """What the file holds; -1 where that is nothing of use."""
        self._digest = b""
        """Its weights', verified."""
        self._base: tuple[Blob, Path] | None = None
        """What the newest version is an adapter of."""

    def weights(self, published: PolicyPublished) -> Weights:
        """What an engine needs of a version, verified: `fetch`, and the base of an adapter."""
        path = self.fetch(published)
        if published.adapter is None:
            return Weights(published.policy, published.version, path)
        said = published.adapter
        base = self._base_of(said, published)
        adapter = AdapterWeights(base, said.base_digest, said.rank, said.alpha, said.targets)
        return Weights(published.policy, published.version, path, adapter)

    def fetch(self, published: PolicyPublished) -> Path:
        """A local file of a version's weights, verified. Valid until the next call. Blocks.

        Applies the deltas that are missing here; where that fails, begins with the whole weights.
        BlobError where the store can't give them, DependencyError where it can't be reached.
        """
        if published.full is None:
            raise BlobError(f"version {published.version} was published without its whole weights")
        if self._version >= 0 and self._digest == published.digest:
            return self._path
        if not published.deltas:
            path = self._blobs.get(published.full)
            _verify(path, published)
            return path
        missing = self._missing(published)
        if missing:
            try:
                return self._build(missing, published)
            except BlobError as error:
                logger.warning(
                    "policy %s: version %d can't be made of version %d, and is made anew of the "
                    "whole weights of version %d: %s",
                    *(published.policy, published.version, missing[0].from_version),
                    *(published.full_version, error),
                )
        self._begin(published.full)
        return self._build(published.deltas, published)

    def _base_of(self, adapter: events.Adapter, published: PolicyPublished) -> Path:
        """The base's file. It is read whole only where it is another than before, or gone."""
        if self._base is None or self._base[0] != adapter.base or not self._base[1].exists():
            path = self._blobs.get(adapter.base)
            digest = weights_digest(path)
            if digest != adapter.base_digest:
                raise BlobError(
                    f"the base in {path} has the digest {digest.hex()}, but version "
                    f"{published.version} of policy {published.policy!r} is an adapter of "
                    f"{adapter.base_digest.hex()}"
                )
            self._base = adapter.base, path
        return self._base[1]

    def _missing(self, published: PolicyPublished) -> Sequence[WeightsDelta]:
        """The deltas from the file's version on; none where it is not on the way."""
        starts = [delta.from_version for delta in published.deltas]
        if self._version not in starts:
            return ()
        return published.deltas[starts.index(self._version) :]

    def _begin(self, full: Blob) -> None:
        """Makes the file anew of the whole weights."""
        self._version = -1
        whole = self._blobs.get(full)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(whole, self._path)
        except OSError as error:
            raise DependencyError(f"can't write weights to {self._path}: {error}") from error

    def _build(self, deltas: Sequence[WeightsDelta], published: PolicyPublished) -> Path:
        self._version = -1  # until it is verified: a delta that fails spoils the file
        for delta in deltas:
            apply(self._path, self._blobs.get(delta.blob))
        _verify(self._path, published)
        self._version, self._digest = deltas[-1].to_version, published.digest
        return self._path


def _verify(path: Path, published: PolicyPublished) -> None:
    digest = weights_digest(path)
    if digest != published.digest:
        raise BlobError(
            f"the weights in {path} have the digest {digest.hex()}, but version "
            f"{published.version} was published as {published.digest.hex()}"
        )


class ScratchFolder:
    """A folder for one process, which the next one removes where this one could not."""

    def __init__(self, parent: Path) -> None:
        """Makes it under `parent`, and clears away what processes that died have left there.

        DependencyError where the disk can't take it.
        """
        try:
            self._handle = self._make(parent)
        except OSError as error:
            raise DependencyError(f"can't make a folder in {parent}: {error}") from error

    def _make(self, parent: Path) -> int:
        """Returns the handle that locks it."""
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob("at-*"):
            handle = _locked(left)
            if handle is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
        while True:
            self.path = Path(tempfile.mkdtemp(dir=parent, prefix="at-"))
            handle = _locked(self.path)
            if handle is not None and self.path.is_dir():
                return handle

    def remove(self) -> None:
        """Removes it, with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def _locked(folder: Path) -> int | None:
    """A handle of the folder, locked until it is closed or its process ends; None: another's."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
