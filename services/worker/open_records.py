"""Keeps the open records of one partition: a commit must not pass the oldest one.

Pure: offsets go in, the oldest open record comes out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.services.kafka.broker import Partition


@dataclass(eq=False, slots=True)
class OpenRecord:
    """A main record, and the positions of the side partitions when it was read."""

    offset: int
    positions: Mapping[Partition, int]
    holds: int = 0


class OpenRecords:
    """The open records of one partition. A record is open as long as somebody holds it."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, OpenRecord] = OrderedDict()

    def __len__(self) -> int:
        """How many records are kept, including done ones that follow an open one."""
        return len(self._open)

    def begin(self, offset: int, positions: Mapping[Partition, int]) -> Callable[[], None]:
        """Opens a record that follows all others. The returned function releases it, once."""
        self._open[offset] = OpenRecord(offset, positions)
        return self.hold(offset)

    def hold(self, offset: int) -> Callable[[], None]:
        """Keeps an open record open until the returned function is called."""
        record = self._open[offset]
        record.holds += 1
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                record.holds -= 1

        return release

    def oldest(self) -> OpenRecord | None:
        """The oldest open record, or None if all are done."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.holds:
                return oldest
            del self._open[oldest.offset]
        return None
