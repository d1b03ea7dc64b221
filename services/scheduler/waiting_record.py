"""When the scheduler records which tasks wait, and what its record says. Pure.

A task that waits keeps the scheduler's commit back until a record in `waiting` names it. From then
on the commit may pass it: a successor finds it in the record, and whether it has started since, in
`episodes` from the positions that were held when the record was made.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.schemas.events import WaitingRecorded
from headrace.schemas.number_runs import pack_numbers

RECORD_EVERY_S = 60.0
"""A task that waits for longer is recorded, after at most twice this time."""
RECORD_EVERY_TASKS = 10_000
"""So many tasks that wait and are not recorded are recorded at once."""
SOONEST_S = 0.1
"""Least seconds between two looks."""

Release = Callable[[], None]


class WaitingRecords:
    """What the newest record says, and which tasks wait without being recorded."""

    def __init__(self) -> None:
        self._named: tuple[range, ...] = ()
        """The tasks that the predecessor's record names."""
        self._unrecorded: dict[int, Release] = {}
        """Task that waits and is not recorded, to what lets the commit pass it."""
        self._held: Release | None = None
        """Lets the commit pass the positions at which the newest record was made."""
        self._started_since = True
        """Whether a task was started since the newest record."""
        self._due_at = 0.0
        self._old_below = 0
        """Tasks below it were known when it was last decided whether a record is due."""

    def recover(self, record: WaitingRecorded, hold: Callable[[], Release]) -> None:
        """Takes a record of a predecessor. `hold` holds the positions as of the assignment."""
        self._named = tuple(record.runs())
        if self._held is None and record.count:
            self._held = hold()
        elif self._held is not None and not record.count:
            self._held()
            self._held = None

    def named_below(self, number: int) -> list[int]:
        """Takes the tasks below a number that the predecessor's record names, ascending.

        The others are read again: the commit has not passed them.
        """
        named, self._named = self._named, ()
        return [one for run in named for one in run if one < number]

    def on_waiting(self, number: int, release: Release) -> None:
        """Notes a task that waits, and that is not recorded. `release` lets the commit pass it."""
        self._unrecorded[number] = release

    def on_started(self, number: int) -> None:
        """Notes that a start is in the log."""
        self._started_since = True
        if (release := self._unrecorded.pop(number, None)) is not None:
            release()

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until a record may be due. None if nothing waits for one."""
        if not self._unrecorded and self._held is None:
            return None
        return min(RECORD_EVERY_S, max(SOONEST_S, self._due_at - now_s))

    def is_due(self, now_s: float, read_below: int, *, many: bool = True) -> bool:
        """Whether a record is due. All tasks below `read_below` are known.

        `many`: also because there are many, which is no reason if others are not recorded anyway.
        """
        if many and len(self._unrecorded) >= RECORD_EVERY_TASKS:
            return True
        if 0.0 < self._due_at - now_s <= RECORD_EVERY_S:
            return False
        self._due_at = now_s + RECORD_EVERY_S
        old_below, self._old_below = self._old_below, read_below
        is_old = min(self._unrecorded, default=old_below) < old_below
        return is_old or (self._held is not None and self._started_since)

    def make(
        self, topic: str, waiting: list[int], read_below: int, now_s: float
    ) -> WaitingRecorded:
        """Returns the record of the tasks that wait."""
        low, packed = pack_numbers(waiting)
        return WaitingRecorded(
            topic=topic,
            recorded_at=int(now_s * 1000),
            end=read_below,
            count=len(waiting),
            low=low,
            waiting=packed,
        )

    def on_recorded(self, record: WaitingRecorded, held: Release) -> None:
        """Notes that a record is in the log. `held` held the positions before it was made."""
        if self._held is not None:
            self._held()
            self._held = None
        if record.count:
            self._held = held
        else:
            held()
        self._started_since = False
        for number in [one for one in self._unrecorded if one < record.end]:
            self._unrecorded.pop(number)()
