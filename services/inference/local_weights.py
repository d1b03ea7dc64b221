"""Keeps published weights in a file of this process, and updates that file with deltas."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import BlobError, DamagedBlob, DependencyError
from headrace.schemas.events import Adapter, Blob, PolicyPublished, WeightsDelta
from headrace.services.inference.engine import AdapterWeights, Weights
from headrace.services.models.blobs import BlobStore, disk_errors
from headrace.services.models.deltas import apply
from headrace.services.models.remote_blobs import RemoteBlobStore
from headrace.services.models.weights import (
    name_differences,
    read_digests,
    tensor_digests,
    weights_digest,
)

logger = logging.getLogger(__name__)


class LocalWeights:
    """One policy's weights. Deltas overwrite the file, so it holds only one version."""

    def __init__(self, blobs: BlobStore, folder: Path) -> None:
        self._blobs = blobs
        self._path = folder.with_name(f"{folder.name}.safetensors")
        self._version = -1
        """The version that the file holds; -1 if the file is missing or not verified."""
        self._digest = b""
        """The verified digest of the file's weights."""
        self._base: tuple[Blob, Path] | None = None
        """The base of the newest version, if that is an adapter: its blob and its file."""

    def weights(self, published: PolicyPublished) -> Weights:
        """Fetches a version, and the base if it is an adapter. Both are verified. Blocks."""
        adapter = published.adapter
        if adapter is None:
            return Weights(published.policy, published.version, self.fetch(published))
        weights = AdapterWeights(
            # Before the fetch of the version, which removes unused blobs from this machine.
            base=self._base_of(adapter, published),
            digest=adapter.base_digest,
            rank=adapter.rank,
            alpha=adapter.alpha,
            targets=adapter.targets,
        )
        return Weights(published.policy, published.version, self.fetch(published), weights)

    def fetch(self, published: PolicyPublished) -> Path:
        """Returns a local file with a version's verified weights, valid until the next call.

        Applies the deltas that the file lacks; if that fails, starts from the whole weights.
        Blocks. Raises BlobError if the store lacks a blob or holds a damaged one, and
        DependencyError if the store can't be reached.
        """
        if published.full is None:
            raise BlobError(
                f"version {published.version} of policy {published.policy!r} was published without "
                "whole weights: publish it again, whole"
            )
        if self._version >= 0 and self._digest == published.digest:
            return self._path
        if not published.deltas:
            try:
                path = self._blobs.get(published.full)
            except DamagedBlob as error:
                raise BlobError(f"{error}{self._differences(error.path, published)}") from error
            self._verify(path, published)
            return path
        missing = self._missing(published)
        if missing:
            try:
                return self._build(missing, published)
            except BlobError as error:
                logger.warning(
                    "policy %s: version %d can't be built from version %d, so it is built again "
                    "from the whole weights of version %d: %s",
                    *(published.policy, published.version, missing[0].from_version),
                    *(published.full_version, error),
                )
        self._begin(published.full)
        return self._build(published.deltas, published)

    def _base_of(self, adapter: Adapter, published: PolicyPublished) -> Path:
        """The verified file of the base. It is fetched only if it changed or is gone."""
        if self._base is None or self._base[0] != adapter.base or not self._base[1].exists():
            path = self._blobs.get(adapter.base)
            found = weights_digest(path)
            if found != adapter.base_digest:
                raise _wrong(path, found, adapter.base_digest, published, "is an adapter of")
            self._base = adapter.base, path
        elif isinstance(self._blobs, RemoteBlobStore):  # a folder's times say when a blob was put
            self._blobs.keep(adapter.base)
        return self._base[1]

    def _missing(self, published: PolicyPublished) -> Sequence[WeightsDelta]:
        """The deltas from the file's version on; empty if no delta starts at that version."""
        starts = [delta.from_version for delta in published.deltas]
        if self._version not in starts:
            return ()
        return published.deltas[starts.index(self._version) :]

    def _begin(self, full: Blob) -> None:
        self._version = -1
        whole = self._blobs.get(full)
        with disk_errors(f"write weights to {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(whole, self._path)

    def _build(self, deltas: Sequence[WeightsDelta], published: PolicyPublished) -> Path:
        self._version = -1  # until it is verified: a delta that fails damages the file
        for delta in deltas:
            apply(self._path, self._blobs.get(delta.blob))
        self._verify(self._path, published)
        self._version, self._digest = deltas[-1].to_version, published.digest
        return self._path

    def _verify(self, path: Path, published: PolicyPublished) -> None:
        """Raises BlobError, with the tensors that differ, if a file has not the version."""
        found = weights_digest(path)
        if found != published.digest:
            error = _wrong(path, found, published.digest, published, "was published as")
            raise BlobError(f"{error}{self._differences(path, published)}")

    def _differences(self, path: Path, published: PolicyPublished) -> str:
        """Returns which tensors of a file are not those of a version, as the end of an error."""
        table = published.tensor_digests
        if table is None:
            return ""
        try:
            expected = read_digests(self._blobs.get(table))
            return f". {name_differences(expected, tensor_digests(path))}"
        except (BlobError, DependencyError) as error:
            return f". Which of its tensors differ can't be told: {error}"


def _wrong(
    path: Path, found: bytes, digest: bytes, published: PolicyPublished, expected: str
) -> BlobError:
    return BlobError(
        f"the weights in {path} have the digest {found.hex()}, but version {published.version} of "
        f"policy {published.policy!r} {expected} {digest.hex()}"
    )


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Makes a folder in `parent` for this process, and removes it at the end.

    Also removes the folders that dead processes left in `parent`. Raises DependencyError if the
    disk can't take the folder.
    """
    with disk_errors(f"make a folder in {parent}"):
        folder, handle = _make_scratch(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _make_scratch(parent: Path) -> tuple[Path, int]:
    """Returns a new folder, and the handle that locks it."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob("at-*"):
        handle = _locked(left)
        if handle is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(handle)
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix="at-"))
        handle = _locked(folder)
        if handle is not None and folder.is_dir():
            return folder, handle


def _locked(folder: Path) -> int | None:
    """Locks a folder until the returned handle is closed or the process ends.

    Returns None if another process holds the lock, or if the folder is gone.
    """
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
