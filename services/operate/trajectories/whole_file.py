"""Lets a file appear whole under its name, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.services.models.blobs import disk_errors


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yields the path to write to, in the same folder and with the same ending.

    It gets the name `file` at the end, and is deleted if the block fails. Raises DependencyError if
    the disk can't take it.
    """
    unfinished = file.with_name(f".{file.stem}.{os.getpid()}.unfinished{file.suffix}")
    try:
        with disk_errors(f"write {file}"):
            yield unfinished
            unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
