"""Hashes files, and makes the entries of a folder durable. Both functions block."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def file_digest(path: Path) -> bytes:
    """Returns the SHA-256 of a file's bytes: 32 bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def sync_folder(folder: Path) -> None:
    """Makes a folder's entries durable: the names that were created, renamed or removed in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
