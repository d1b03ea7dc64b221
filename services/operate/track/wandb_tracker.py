"""Writes the curves of a policy as offline runs of W&B, which `wandb sync` sends.

W&B writes in a process of its own and keeps some of it back, so nobody knows what a killed run has
written. So the versions are written in chunks. A chunk is a whole offline run in a folder that gets
its name when it is complete. All chunks of a policy have the same id, and `wandb sync` makes one
run of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.errors import DependencyError
from headrace.services.base.files import sync_path
from headrace.services.models.blobs import disk_errors
from headrace.services.operate.track import wandb_chunk
from headrace.services.operate.track.tracker import Point, lock_output
from headrace.services.processes.child_process import ChildProcess

if find_spec("wandb") is None:  # only the process that writes a chunk imports it
    raise ImportError("No module named 'wandb'")

CHUNK = 5_000
"""The most versions of a chunk."""
WRITE_S = 300.0
"""Longest time in which W&B writes a chunk."""
NAME = "versions-{first:08}-{last:08}"
UNFINISHED = "unfinished-"


class WandbTracker:
    """The offline runs of one policy."""

    def __init__(self, folder: Path, namespace: str, policy: str, every_s: float) -> None:
        """Makes `folder`, and removes what a killed process has left in it.

        A chunk is due after `every_s` seconds, or after CHUNK versions.

        Raises UsageError if another process writes into the folder, and DependencyError if the disk
        can't take it.
        """
        self._folder, self._namespace, self._policy = folder, namespace, policy
        self._every_s = every_s
        with disk_errors(f"write {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("ab")
            lock_output(self._lock, folder)
            for left in folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
            chunks = sorted(folder.glob("versions-*-*/offline-run-*-*"))
        self._last = int(chunks[-1].parent.name.rpartition("-")[2]) if chunks else -1
        self._id = chunks[-1].name.rpartition("-")[2] if chunks else uuid.uuid4().hex[:16]
        self._kept: list[Point] = []
        self._writing = asyncio.Lock()
        self._later: asyncio.Task[None] | None = None

    @property
    def last(self) -> int:
        """The newest version that was taken, -1 if there is no version."""
        return self._kept[-1].version if self._kept else self._last

    async def write(self, point: Point) -> None:
        """Keeps a version back until a chunk is due.

        Raises DependencyError if W&B or the disk failed.
        """
        self._kept.append(point)
        if self._later is not None and self._later.done():
            self._later.result()
            self._later = None
        if len(self._kept) >= CHUNK:
            await self.finish()
        elif self._later is None:
            self._later = asyncio.create_task(self._write_later(), name="write a chunk")

    async def _write_later(self) -> None:
        await asyncio.sleep(self._every_s)
        await self.finish()

    async def finish(self) -> None:
        """Writes the versions that were kept back. Raises DependencyError."""
        async with self._writing:
            if points := self._kept[:]:
                with disk_errors(f"write {self._folder}"):
                    await self._write_chunk(points)
                self._last = points[-1].version
                del self._kept[: len(points)]

    async def aclose(self) -> None:
        """Unlocks the folder. What was kept back is dropped."""
        if self._later is not None:
            self._later.cancel()
            await asyncio.gather(self._later, return_exceptions=True)
        self._lock.close()

    async def _write_chunk(self, points: list[Point]) -> None:
        first, last = points[0].version, points[-1].version
        with TemporaryDirectory(dir=self._folder, prefix=UNFINISHED) as name:
            folder = Path(name)
            request = {
                "project": self._namespace, "id": self._id, "name": self._policy,
                "points": [asdict(one) for one in points],
            }  # fmt: skip
            (folder / wandb_chunk.REQUEST).write_text(json.dumps(request))
            await _run(folder)
            (run,) = (folder / "wandb").glob("offline-run-*")
            chunk = folder / "chunk"
            chunk.mkdir()
            run.rename(chunk / run.name)
            await asyncio.to_thread(_sync, chunk)
            chunk.rename(self._folder / NAME.format(first=first, last=last))


async def _run(folder: Path) -> None:
    """Has W&B write what `folder` asks for. It is killed with all that it has started."""
    command = (sys.executable, "-m", wandb_chunk.__name__, str(folder))
    child = await ChildProcess.start(command, _environment(os.environ, folder))
    try:
        if not await child.ends_within(WRITE_S):
            raise DependencyError(f"W&B did not write {folder.parent} within {WRITE_S:.0f} s")
        if code := await child.wait():
            raise DependencyError(
                f"W&B could not write {folder.parent}, and ended with exit code {code}: see above"
            )
    finally:
        await child.aclose()


def _environment(own: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns an environment in which W&B writes into `folder` alone, and reports to nobody."""
    kept = {name: value for name, value in own.items() if not name.startswith("WANDB_")}
    places = {f"WANDB_{kind}_DIR": str(folder / "own") for kind in ("CONFIG", "CACHE", "DATA")}
    return {**kept, **places, "WANDB_ERROR_REPORTING": "false"}


def _sync(chunk: Path) -> None:
    """Waits until a chunk is on the disk."""
    for path in (*chunk.rglob("*"), chunk):
        sync_path(path)
