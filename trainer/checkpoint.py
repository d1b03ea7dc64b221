"""Checkpoints: a version, its offset in the log and the learner's state, in one atomic unit.

A checkpoint is a folder `v<version>` with the state and `manifest.json`, which holds the state's
SHA-256. The state is `state.safetensors`, or the folder `state` if several processes have written
it, each its shards. All of it is written under another name, synced to disk and renamed. So if a
process or the machine dies at any moment, either the complete checkpoint exists or the one before
it does.

Only the learner's state itself has to be written before training goes on. The rest, which is
hashing and syncing, reads no memory of the learner, so `Checkpoints.write` returns it as work for
another thread. This module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import DependencyError
from headrace.services.base.files import file_digest, sync_path
from headrace.services.models.blobs import disk_errors

logger = logging.getLogger(__name__)

STATE = "state.safetensors"
SHARDS = "state"
MANIFEST = "manifest.json"
HASHING_THREADS = 8
"""How many files of one checkpoint are hashed at the same time."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A version, and where training continues after it."""

    version: int
    offset: int
    """The next batch is at this offset of its topic, or later."""
    digest: bytes
    """`weights_digest` of the version's weights."""
    processes: int = 1
    """How many processes wrote it. Any number can continue from it."""

    def to_tree(self) -> dict[str, Any]:
        """Returns the checkpoint as JSON values."""
        return {
            "version": self.version,
            "offset": self.offset,
            "digest": self.digest.hex(),
            "processes": self.processes,
        }

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Checkpoint:
        """Returns what `to_tree` wrote. Raises ValueError, KeyError or TypeError for others."""
        version, offset = int(tree["version"]), int(tree["offset"])
        processes = int(tree.get("processes", 1))
        return cls(version, offset, bytes.fromhex(tree["digest"]), processes)


class Checkpoints:
    """The checkpoints of one policy, in a folder that no other process writes to."""

    def __init__(self, folder: Path, keep: int) -> None:
        """The newest `keep` checkpoints stay; `save` removes older ones."""
        self._folder = folder
        self._keep = keep

    def remove_partial(self) -> None:
        """Removes what interrupted calls of `save` have left. Call it when the writer starts.

        Raises DependencyError if the disk fails.
        """
        with disk_errors(f"remove interrupted checkpoints from {self._folder}"):
            for folder in self._folder.glob("partial-*"):
                shutil.rmtree(folder)

    def save(self, checkpoint: Checkpoint, write_state: Callable[[Path], None]) -> None:
        """Does what `write` does, and then what it returns."""
        self.write(checkpoint, write_state)()

    def write(
        self, checkpoint: Checkpoint, write_state: Callable[[Path], None]
    ) -> Callable[[], None]:
        """Removes what interrupted saves have left, and writes the state of a checkpoint.

        `write_state` writes the learner's state to the path that it is given: a file, or a folder
        if there are several processes. Returns what completes the checkpoint and then removes old
        ones. Only when that has returned is the checkpoint there. Any thread may call it, once, and
        before the next `write`. Both raise DependencyError if the disk can't take the checkpoint.
        """
        with self._full_disk():
            self._folder.mkdir(parents=True, exist_ok=True)
            self.remove_partial()  # It may take the room that this checkpoint needs.
            partial = Path(tempfile.mkdtemp(dir=self._folder, prefix="partial-"))
            try:
                write_state(partial / (STATE if checkpoint.processes == 1 else SHARDS))
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        return functools.partial(self._complete, checkpoint, partial)

    def _complete(self, checkpoint: Checkpoint, partial: Path) -> None:
        folder = self._folder / f"v{checkpoint.version:012d}"
        with self._full_disk():
            try:
                _write_manifest(checkpoint, partial)
                self._install(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            self._prune(folder)

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DependencyError(
                f"can't write a checkpoint to {self._folder}: {error}. Free space on that disk, or "
                f"make the folder writable"
            ) from error

    def newest(self, accept: Callable[[Checkpoint], bool]) -> tuple[Checkpoint, Path] | None:
        """Returns the newest complete checkpoint that `accept` accepts, and its state's path.

        Skips a checkpoint that is damaged or not accepted, with a warning. Returns None if no
        checkpoint is left.
        """
        for folder in self._folders():
            try:
                checkpoint = _read(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("checkpoint %s is damaged and is skipped: %s", folder, error)
                continue
            if accept(checkpoint):
                return checkpoint, _state_of(folder)
            logger.warning("checkpoint %s is not of this log and is skipped", folder)
        return None

    def versions(self) -> list[int]:
        """Returns the versions that have a checkpoint, complete or not, the newest first."""
        names = [folder.name.removeprefix("v") for folder in self._folders()]
        return [int(name) for name in names if name.isdigit()]

    def _folders(self) -> Iterator[Path]:
        yield from sorted(self._folder.glob("v*"), reverse=True)

    def _install(self, partial: Path, folder: Path) -> None:
        sync_path(partial)
        if folder.exists():
            # It was skipped as damaged or foreign; otherwise its version would not be made again.
            shutil.rmtree(folder)
        partial.rename(folder)
        sync_path(self._folder)

    def _prune(self, newest: Path) -> None:
        # A checkpoint of a higher version is damaged or foreign. It must not count, or it would
        # push out the complete ones.
        kept = [folder for folder in self._folders() if folder <= newest]
        for folder in kept[self._keep :]:
            shutil.rmtree(folder)


def _write_manifest(checkpoint: Checkpoint, folder: Path) -> None:
    state = _state_of(folder)
    manifest = {
        **checkpoint.to_tree(),
        "state": _state_digest(state),
    }
    for path in (*state.iterdir(), state) if state.is_dir() else (state,):
        sync_path(path)
    with (folder / MANIFEST).open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())


def _state_of(folder: Path) -> Path:
    """Returns the folder of the shards if there is one, else the file of the state."""
    shards = folder / SHARDS
    return shards if shards.is_dir() else folder / STATE


def _state_digest(state: Path) -> str:
    """Returns the SHA-256 of the state's file, or of the names and the SHA-256 of its files."""
    if not state.is_dir():
        return file_digest(state).hex()
    paths = list(state.iterdir())
    # hashlib releases the interpreter's lock, so the files are hashed at the same time.
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        digests = list(threads.map(file_digest, paths))
    files = {path.name: digest.hex() for path, digest in zip(paths, digests, strict=True)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> Checkpoint:
    manifest = json.loads((folder / MANIFEST).read_text())
    state = _state_of(folder)
    if _state_digest(state) != manifest["state"]:
        raise ValueError(f"{state.name} has another SHA-256 than {MANIFEST} states")
    return Checkpoint.of_tree(manifest)
