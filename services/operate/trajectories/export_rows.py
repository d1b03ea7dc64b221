"""Exports the turns of a run as a file of rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import aclosing
from pathlib import Path

from headrace.errors import UsageError
from headrace.schemas.events import TurnProjected
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.run.run_stack import running_stack
from headrace.services.operate.trajectories.row_files import JsonlFile, ParquetFile, RowFile
from headrace.services.operate.trajectories.row_reader import RowReader

PROGRESS_S = 5.0


async def export_rows(
    cluster: ClusterConfig,
    kind: str,
    file: Path,
    tasks: Collection[int],
    most: int,
    say: Callable[[str], None],
) -> tuple[int, int]:
    """Writes a `jsonl` or `parquet` file. Returns how many episodes it has, and how many were left
    out because their trajectory can't be read any more.

    `tasks` and `most` as for `RowReader.read`. Says every few seconds how far it has come. Raises
    UsageError if pyarrow is missing, RecordsLost if no trajectory can be read, and DependencyError
    if the disk can't take the file.
    """
    count, told_at = 0, time.monotonic()
    async with (
        running_stack(cluster, say) as (_, located),
        open_namespace(located, "trajectories") as (log, life),
    ):
        reader = RowReader(log, life.recipe())
        with _made(kind, file) as output:
            async with aclosing(reader.read(tasks, most)) as episodes:
                async for rows in episodes:
                    await asyncio.to_thread(output.write, rows)
                    count += 1
                    if time.monotonic() - told_at > PROGRESS_S:
                        told_at = time.monotonic()
                        say(f"{count} episodes")
    return count, reader.unread


def _made(kind: str, file: Path) -> RowFile[TurnProjected]:
    if kind == "jsonl":
        return JsonlFile(file)
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--format parquet: {error}. Run pip install 'headrace[parquet]'"
        ) from None
    return ParquetFile(file)
