"""Writes the curves of a policy as a TensorBoard event file.

All scalars of a version are one record of the file, with a checksum. So a record is whole or torn,
and the position is the newest whole record: after a kill the torn end is cut off, and writing goes
on after it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from headrace.services.models.blobs import disk_errors
from headrace.services.operate.track.tracker import Point, lock_output

FILE = "events.out.tfevents.0.headrace"
"""TensorBoard reads every file whose name has `tfevents` in it."""
FORMAT = "brain.Event:2"
"""The version of the file format, which its first record has."""
HEADER, CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
"""Length and its checksum before a record, and the checksum after it."""


class TensorBoardTracker:
    """The event file of one policy."""

    def __init__(self, folder: Path) -> None:
        """Opens or makes the file in `folder`, and cuts off a torn end.

        Raises UsageError if another process writes it, and DependencyError if the disk can't take
        it.
        """
        path = folder / FILE
        with disk_errors(f"write {path}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        lock_output(self._file, path)
        self._path = path
        self._last, end = read_position(self._file)
        with disk_errors(f"write {path}"):
            self._file.truncate(end)
        self._writer = RecordWriter(self._file)
        if end == 0:
            self._add(Event(file_version=FORMAT))

    @property
    def last(self) -> int:
        """The newest version in the file, -1 if it has none."""
        return self._last

    async def write(self, point: Point) -> None:
        """Appends one record with all scalars of a version."""
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in sorted(point.values.items())
        ]
        summary = Summary(value=values)
        self._add(Event(wall_time=point.recorded_at, step=point.version, summary=summary))
        self._last = point.version

    async def finish(self) -> None:
        """Does nothing: each version is in the file already."""

    async def aclose(self) -> None:
        """Closes the file."""
        self._file.close()

    def _add(self, event: Event) -> None:
        with disk_errors(f"write {self._path}"):
            self._writer.write(event.SerializeToString())
            self._writer.flush()


def read_position(file: BinaryIO) -> tuple[int, int]:
    """Returns the newest version in an event file, -1 if it has none, and where its records end.

    What follows the first record that is torn or damaged does not count.
    """
    last, end = -1, 0
    file.seek(0)
    while len(header := file.read(HEADER.size)) == HEADER.size:
        length, checksum = HEADER.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            break
        body = file.read(length)
        checksum_of_body = file.read(CHECKSUM.size)
        if len(checksum_of_body) < CHECKSUM.size:
            break
        if CHECKSUM.unpack(checksum_of_body)[0] != masked_crc32c(body):
            break
        event = Event.FromString(body)
        if event.HasField("summary"):
            last = max(last, event.step)
        end = file.tell()
    return last, end
