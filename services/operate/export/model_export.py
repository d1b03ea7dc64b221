"""Exports a version: writes its folder beside the target, verifies it, then renames it.

The weights are copied in the main thread, so that Ctrl-C ends the work at once.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.services.models.blobs import BlobStore, disk_errors
from headrace.services.models.shards import SHARD_BYTES
from headrace.services.models.weights import weights_digest
from headrace.services.operate.run_versions import Layout, RunVersion, VersionWriter

FACTS = "headrace.json"
"""The file of an exported folder that says where it comes from."""
OURS = (FACTS, "config.json", "adapter_config.json")
"""`--force` replaces only a folder that has one of these files."""
METER_S = 2.0
"""Seconds between two lines about the progress."""


def export_version(
    version: RunVersion,
    blobs: BlobStore,
    folder: Path,
    *,
    layout: Layout = "peft",
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Writes a version as the model folder `folder`, and returns what its `headrace.json` says.

    `layout` matters only for an adapter. `say` receives lines about the progress. Raises UsageError
    if the folder may not be written, and what `VersionWriter` raises. If it fails, nothing is left,
    and a folder that was there stays as it was.
    """
    check_target(folder, force)
    with beside(folder) as temporary:
        say(f"fetching and verifying {version}")
        meter = Meter(say)
        writer = VersionWriter(
            version,
            blobs,
            temporary / "scratch",
            on_bytes=meter.add,
            shard_bytes=shard_bytes,
        )
        meter.total = writer.size
        made = temporary / "model"
        made.mkdir()
        writer.write(made, layout, home=folder)
        facts = facts_of(version, made, merged=layout == "merged")
        with disk_errors(f"write {folder}"):
            (made / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
            if folder.exists():
                folder.rename(temporary / "old")
            try:
                made.rename(folder)
            except BaseException:
                if (temporary / "old").exists():
                    (temporary / "old").rename(folder)
                raise
    return facts


def check_target(folder: Path, force: bool) -> None:
    """Raises UsageError if `folder` may not be written or replaced."""
    if not folder.parent.is_dir():
        raise UsageError(f"{folder.parent} is not a folder: make it first, or choose another DIR")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder} exists and is not a folder: choose another DIR")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise UsageError(f"{folder} is not empty: choose another DIR, or replace it with --force")
    if not any((folder / name).is_file() for name in OURS):
        raise UsageError(
            f"{folder} is not a model folder, so --force does not replace it: choose another DIR"
        )


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """Makes a temporary folder on the same disk as `folder`, and removes it at the end."""
    with disk_errors(f"make a folder in {folder.parent}"):
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def facts_of(version: RunVersion, folder: Path, *, merged: bool) -> dict[str, Any]:
    """Returns where an exported folder comes from, for its `headrace.json`."""
    published = version.published
    facts = {
        **({"namespace": version.namespace} if version.namespace else {}),
        "policy": published.policy,
        "version": published.version,
        "digest": published.digest.hex(),
        "base_model": published.base,
        "dtype": published.dtype,
        **version.run,
    }
    if published.adapter is not None:
        facts["base_digest"] = published.adapter.base_digest.hex()
    if merged and published.adapter is not None:
        # The published digest is that of the adapter.
        facts["merged_digest"] = weights_digest(*folder.glob("*.safetensors")).hex()
    return facts


class Meter:
    """Says now and then how many bytes are written."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.total = 0
        self._say = say
        self._written = 0
        self._at = time.monotonic()

    def add(self, count: int) -> None:
        """Counts bytes, and says how far it is if that is due."""
        self._written += count
        if time.monotonic() >= self._at + METER_S:
            self._at = time.monotonic()
            self._say(f"wrote {self._written / 1e9:.1f} of {self.total / 1e9:.1f} GB")
