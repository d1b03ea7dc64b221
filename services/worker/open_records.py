"""Which records of one partition are read and not done: what a commit must not pass.

Pure: offsets in, the oldest open record out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.services.kafka.broker import Partition


@dataclass(eq=False, slots=True)
class OpenRecord:
    """A main record that may not be done, and where its companions stood when it was read."""

    offset: int
    positions: Mapping[Partition, int]
    holds: int = 1


class OpenRecords:
    """The open records of one partition. A record is open until nobody holds it."""

    def __init__(self) -> None:
        self._open: deque[OpenRecord] = deque()
        self._by_offset: dict[int, OpenRecord] = {}

    def __len__(self) -> int:
        """How many are open, those included that are done and behind one that is not."""
        return len(self._open)

    def begin(self, offset: int, positions: Mapping[Partition, int]) -> Callable[[], None]:
        """Opens a record, read after all others. What is returned lets go of it, once."""
        record = self._by_offset[offset] = OpenRecord(offset, positions, holds=0)
        self._open.append(record)
        return self.hold(offset)

    def hold(self, offset: int) -> Callable[[], None]:
        """Keeps an open record open until what is returned has been called."""
        record = self._by_offset[offset]
        record.holds += 1
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                record.holds -= 1

        return release

    def oldest(self) -> OpenRecord | None:
        """The oldest record that is not done; None where all are."""
        while self._open and not self._open[0].holds:
            del self._by_offset[self._open.popleft().offset]
        return self._open[0] if self._open else None
