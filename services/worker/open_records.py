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
    brief: int = 0
    """How many of the holds are brief."""


class OpenRecords:
    """The open records of one partition. A record is open as long as somebody holds it.

    A hold is brief or long. A long one may last minutes. So that what comes after it need not be
    done again, the records without a brief hold are known, too.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[int, OpenRecord] = OrderedDict()
        self._brief: OrderedDict[int, OpenRecord] = OrderedDict()

    def __len__(self) -> int:
        """How many records are kept, including done ones that follow an open one."""
        return len(self._open)

    def begin(self, offset: int, positions: Mapping[Partition, int]) -> Callable[[], None]:
        """Opens a record that follows all others. The returned function releases it, once."""
        self._open[offset] = self._brief[offset] = OpenRecord(offset, positions)
        return self.hold(offset)

    def hold(self, offset: int, *, long: bool = False) -> Callable[[], None]:
        """Keeps an open record open until the returned function is called.

        A record without a brief hold can't get one any more.
        """
        record = self._open[offset]
        assert long or offset in self._brief
        record.holds += 1
        record.brief += not long
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                record.holds -= 1
                record.brief -= not long

        return release

    def oldest(self) -> OpenRecord | None:
        """The oldest open record, or None if all are done."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.holds:
                return oldest
            del self._open[oldest.offset]
        return None

    def oldest_brief(self) -> int | None:
        """The offset of the oldest record with a brief hold, or None if there is no such record."""
        while self._brief:
            offset, oldest = next(iter(self._brief.items()))
            if oldest.brief:
                return offset
            del self._brief[offset]
        return None


class HeldPositions:
    """Positions of the side partitions that the commit must not pass, beside those of open records.

    Positions that are held later are never lower.
    """

    def __init__(self) -> None:
        self.now: Mapping[Partition, int] = {}
        """The positions that are held next. The host sets them."""
        self._held: OrderedDict[int, Mapping[Partition, int]] = OrderedDict()
        self._number = 0

    def hold(self) -> Callable[[], None]:
        """Holds the positions as of now until the returned function is called."""
        number = self._number
        self._number += 1
        self._held[number] = self.now
        return lambda: self._release(number)

    def oldest(self) -> Mapping[Partition, int] | None:
        """The oldest positions that are held, or None."""
        return next(iter(self._held.values()), None)

    def _release(self, number: int) -> None:
        self._held.pop(number, None)
