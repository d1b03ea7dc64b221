"""The folder of a fine-tuning's checkpoints, and what they say beside the learner's state."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.services.base.files import sync_path
from headrace.services.models.blobs import disk_errors
from headrace.services.operate.sft.sft_job import SftJob
from headrace.services.operate.track.tracker import lock_output
from headrace.trainer.checkpoint import Checkpoint, Checkpoints

PROGRESS = "progress.json"
"""The file of a checkpoint with the figures of all updates so far."""
_OURS = re.compile(r"v\d+|partial-.*")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""How file systems say that they have no locks."""


@contextmanager
def sole_writer(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps other fine-tunings from writing the model folder `folder` while the block runs.

    Raises UsageError if another process does. If the file system has no locks, says so.
    """
    path = folder.with_name(f"{folder.name}.lock")
    while True:
        with disk_errors(f"lock {path}"):
            file = path.open("wb")
        with file:
            try:
                lock_output(file, folder)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                say(f"{path} can't be locked: {error.strerror}. Start no second one with this --to")
            if not os.fstat(file.fileno()).st_nlink:
                continue  # The process before has just ended, and has removed this file.
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def check_checkpoints(folder: Path) -> None:
    """Raises UsageError if `folder` has something, but no checkpoint."""
    if not folder.exists() or _ours(folder):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UsageError(
            f"{folder} has no checkpoints, but it is where they would go, and it is not empty: "
            "move it away, or choose another DIR for --to"
        )


def drop_checkpoints(folder: Path) -> None:
    """Removes the checkpoints of a folder, and the folder if nothing else is in it."""
    for one in _ours(folder):
        shutil.rmtree(one, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def find_checkpoint(
    checkpoints: Checkpoints, folder: Path, job: SftJob
) -> tuple[Checkpoint, Path] | None:
    """Returns the newest checkpoint of this fine-tuning, and its state.

    Raises UsageError if the folder has checkpoints, but none of this one that is whole.
    """
    if not checkpoints.versions():
        return None
    found = checkpoints.newest(lambda one: one.digest == job.digest)
    if found is None:
        raise UsageError(
            f"{folder} has checkpoints of a fine-tuning with other data or settings. Give that "
            "command again to continue it, or begin from the start with --restart"
        )
    return found


def write_figures(state: Path, figures: dict[str, Any]) -> None:
    """Writes the figures beside the state of a checkpoint that is being written."""
    path = state.with_name(PROGRESS)
    path.write_text(json.dumps(figures))
    sync_path(path)


def read_figures(state: Path) -> dict[str, Any]:
    """Returns what `write_figures` wrote. Raises UsageError if it can't be read."""
    path = state.with_name(PROGRESS)
    try:
        figures: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"can't read {path}: {error}. Begin from the start with --restart"
        ) from error
    return figures


def _ours(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [one for one in folder.iterdir() if one.is_dir() and _OURS.fullmatch(one.name)]
