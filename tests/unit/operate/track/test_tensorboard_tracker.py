"""A torn event file is cut back to its last whole record, and continued."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from headrace.errors import UsageError
from headrace.services.operate.track.tensorboard_tracker import FILE, TensorBoardTracker
from headrace.services.operate.track.tracker import Point


def write(folder: Path, versions: range) -> None:
    async def main() -> None:
        tracker = TensorBoardTracker(folder)
        for version in versions:
            if version > tracker.last:
                values = {"loss": float(version), "reward_mean": 0.5}
                await tracker.write(Point(version, 1000.0 + version, values))
        await tracker.aclose()

    asyncio.run(main())


def steps(folder: Path) -> list[int]:
    events = EventFileLoader(str(folder / FILE)).Load()
    return [event.step for event in events if event.HasField("summary")]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 200)), max_size=4))
def test_each_version_is_there_once_wherever_the_file_was_torn(
    kills: list[tuple[int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for versions, lost in kills:
            write(folder, range(versions))
            path = folder / FILE
            path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - lost)])
        write(folder, range(13))
        assert steps(folder) == list(range(13))


def test_a_damaged_record_ends_what_counts(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    tracker = TensorBoardTracker(tmp_path)
    assert tracker.last == 1
    asyncio.run(tracker.aclose())


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    with pytest.raises(UsageError, match="another process writes"):
        TensorBoardTracker(tmp_path)
    asyncio.run(tracker.aclose())
    asyncio.run(TensorBoardTracker(tmp_path).aclose())
