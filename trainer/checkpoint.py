"""Checkpoints: a version, its place in the log and the learner's state, whole or not at all.

A checkpoint is a folder `v<version>` of `state.safetensors` and `manifest.json`, which names the
state's SHA-256. It is written under another name, made durable, and renamed: whatever dies when,
either the whole checkpoint is there or the one before. No torch here.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import DependencyError
from headrace.services.base.files import file_digest, sync_folder

logger = logging.getLogger(__name__)

STATE = "state.safetensors"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where training stood."""

    version: int
    offset: int
    """Of the next batch's record, at the earliest."""
    digest: bytes
    """Of the version's weights."""


class Checkpoints:
    """The checkpoints of one policy, in one folder that no other process writes to."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep` is how many of the newest stay."""
        self._folder = folder
        self._keep = keep

    def save(self, checkpoint: Checkpoint, write_state: Callable[[Path], None]) -> None:
        """Writes a checkpoint, then removes old ones. DependencyError where the disk can't.

        `write_state` writes the learner's state to the path it is given.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=self._folder, prefix="partial-"))
            try:
                write_state(partial / STATE)
                _write_manifest(checkpoint, partial)
                folder = self._folder / f"v{checkpoint.version:012d}"
                self._place(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            self._prune(folder)
        except OSError as error:
            raise DependencyError(
                f"can't write a checkpoint to {self._folder}: {error}. Free space or mend it"
            ) from error

    def newest(self, accept: Callable[[Checkpoint], bool]) -> tuple[Checkpoint, Path] | None:
        """The newest whole checkpoint that `accept` takes, and its state's path; None without one.

        One that is damaged or not accepted is skipped, with a warning.
        """
        for folder in self._folders():
            try:
                checkpoint = _read(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("checkpoint %s is damaged, and skipped: %s", folder, error)
                continue
            if accept(checkpoint):
                return checkpoint, folder / STATE
            logger.warning("checkpoint %s is not of this log, and skipped", folder)
        return None

    def versions(self) -> list[int]:
        """The versions that have a checkpoint, whole or not; the newest first."""
        names = [folder.name.removeprefix("v") for folder in self._folders()]
        return [int(name) for name in names if name.isdigit()]

    def _folders(self) -> Iterator[Path]:
        yield from sorted(self._folder.glob("v*"), reverse=True)

    def _place(self, partial: Path, folder: Path) -> None:
        sync_folder(partial)
        if folder.exists():
            # It was skipped as damaged or foreign, else its version would not be made again.
            shutil.rmtree(folder)
        partial.rename(folder)
        sync_folder(self._folder)

    def _prune(self, newest: Path) -> None:
        # What has a higher version is damaged or foreign: it must not crowd out the whole ones.
        kept = [folder for folder in self._folders() if folder <= newest]
        for folder in [*kept[self._keep :], *self._folder.glob("partial-*")]:
            shutil.rmtree(folder)


def _write_manifest(checkpoint: Checkpoint, folder: Path) -> None:
    manifest = {
        "version": checkpoint.version,
        "offset": checkpoint.offset,
        "digest": checkpoint.digest.hex(),
        "state": file_digest(folder / STATE).hex(),
    }
    with (folder / STATE).open("rb") as state:
        os.fsync(state.fileno())
    with (folder / MANIFEST).open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())


def _read(folder: Path) -> Checkpoint:
    manifest = json.loads((folder / MANIFEST).read_text())
    if file_digest(folder / STATE).hex() != manifest["state"]:
        raise ValueError(f"{STATE} is not what {MANIFEST} says")
    return Checkpoint(
        int(manifest["version"]), int(manifest["offset"]), bytes.fromhex(manifest["digest"])
    )
