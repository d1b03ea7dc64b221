"""What is known about each item of a data set: a fold over the groups of one policy. No I/O.

The first group of a task counts, if at least one of its samples has a reward. So groups that were
dropped by a filter count, and those of evaluations, of cancelled or refused tasks, and of tasks
whose samples all failed don't. A second group of a task changes nothing, however late it comes.

The state of the fold is in its own output: an `ItemMeasured` has all values of its item and says
how far the groups are read. Values are kept as the event has them, so a state that was read back
from the log continues with exactly the same values.

An item takes about 240 bytes, its id included: a row of an array, and an entry of a dictionary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from headrace.schemas.events import GroupClosed, ItemMeasured
from headrace.schemas.frontier import Frontier

RECENT_WEIGHT = 0.25
"""Weight of the newest group in a recent pass rate, if there are at least 4 groups."""
WINDOW = 65_536
"""A group counts only if fewer than about so many groups of later tasks came before it. It bounds
what is kept and read again: a record of `tasks` that is no event is a number without a group."""
FIRST_ROWS = 1024


class ItemRecord(NamedTuple):
    """The statistics of one item, with the names and meanings of `ItemMeasured`."""

    group: int
    groups: int
    episodes: int
    passed: int
    mean: float
    recent: float
    streak: int
    solved: bool
    sampled_tokens: int
    newest_version: int
    ended: int

    @property
    def pass_rate(self) -> float:
        """The fraction of all episodes that passed, from 0 to 1."""
        return self.passed / self.episodes


_ROW = np.dtype(
    [
        (name, np.float64 if name in ("mean", "recent") else bool if name == "solved" else np.int64)
        for name in ItemRecord._fields
    ]
)


class CountedTasks:
    """Which tasks have a counted group, and where a reader must begin to find this out again.

    Every task has a group in the end, so the set is a low mark and a few numbers above it. Tasks
    that had none within WINDOW groups count as if they had one.
    """

    def __init__(self, low_mark: int = 0, groups_read: int = 0, newest: int = -1) -> None:
        """Continues after the group at the offset `newest`.

        The groups from the offset `groups_read` on must be added again: up to `newest` they only
        fill the set.
        """
        self._frontier = Frontier(low_mark)
        self._newest = newest
        self._above: deque[tuple[int, int]] = deque()
        """Offset and task of the groups whose tasks were above the low mark, ascending."""
        self._next_offset = groups_read

    @property
    def low_mark(self) -> int:
        """The groups of all tasks with a smaller number have been added."""
        return self._frontier.low_mark

    @property
    def groups_read(self) -> int:
        """Offset of the oldest group whose task is not below the low mark, or of the next one."""
        return self._above[0][0] if self._above else self._next_offset

    @property
    def newest(self) -> int:
        """Offset of the newest group that was added; -1 before the first."""
        return self._newest

    def __contains__(self, task: int) -> bool:
        return task in self._frontier

    def add(self, group: GroupClosed, offset: int) -> bool:
        """Adds a group. Returns whether it is the first of its task, and later than `newest`."""
        if offset < self._next_offset:
            return False
        self._next_offset = offset + 1
        first = self._frontier.add(group.task)
        if first:
            self._above.append((offset, group.task))
        while self._above and self._above[0][1] < self._frontier.low_mark:
            self._above.popleft()
        while self._next_offset - self.groups_read > WINDOW:
            self._give_up_a_gap()
        later = offset > self._newest
        self._newest = max(self._newest, offset)
        return first and later

    def _give_up_a_gap(self) -> None:
        """Adds the missing tasks below the first run above the low mark."""
        runs = self._frontier.runs
        self._frontier = Frontier(runs[0][1] + 1, runs[1:])
        while self._above and self._above[0][1] < self._frontier.low_mark:
            self._above.popleft()


class ItemStatistics:
    """The statistics of all items for one policy.

    >>> statistics = ItemStatistics("default")
    >>> statistics.get("item 1") is None
    True
    """

    def __init__(self, policy: str) -> None:
        """Begins with no items."""
        self._policy = policy
        self._rows: dict[str, int] = {}
        self._values: Any = np.zeros(FIRST_ROWS, _ROW)
        self._changed: dict[str, None] = {}
        self._tasks = CountedTasks()

    def restore(self, event: ItemMeasured) -> None:
        """Adds a record of the topic `items`. The newest group of an item counts.

        After the last one, the groups from the offset `tasks.groups_read` on must be added.
        """
        record = ItemRecord(*(getattr(event, name) for name in ItemRecord._fields))
        before = self.get(event.item_id)
        if before is None or before.group < event.group:
            self._set(event.item_id, record)
        if event.group > self._tasks.newest:
            self._tasks = CountedTasks(event.low_mark, event.groups_read, event.group)

    @property
    def tasks(self) -> CountedTasks:
        """The tasks whose groups have been added."""
        return self._tasks

    def __len__(self) -> int:
        """Returns the number of items that have a counted group."""
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        """Yields the ids of these items."""
        return iter(self._rows)

    def get(self, item_id: str) -> ItemRecord | None:
        """Returns the statistics of an item; None if no group of it counts yet."""
        row = self._rows.get(item_id)
        return None if row is None else ItemRecord._make(self._values[row].item())

    def on_group(self, group: GroupClosed, offset: int) -> bool:
        """Adds the group at an offset of the topic. Returns whether it counts.

        Groups must come in the order of their offsets. One that was added before is ignored.
        """
        if not self._tasks.add(group, offset) or not counts(group):
            return False
        self._set(group.item_id, _after(self.get(group.item_id), group, offset))
        self._changed[group.item_id] = None
        return True

    @property
    def changed(self) -> int:
        """Number of items that changed since `take_changed`."""
        return len(self._changed)

    def take_changed(self) -> list[ItemMeasured]:
        """Returns the events of the items that changed since the last call.

        They must be written in one transaction, because each says how far the groups are read.
        """
        events = [self._event(item_id) for item_id in self._changed]
        self._changed.clear()
        return events

    def _event(self, item_id: str) -> ItemMeasured:
        record = self.get(item_id)
        assert record is not None
        return ItemMeasured(
            policy=self._policy,
            item_id=item_id,
            low_mark=self._tasks.low_mark,
            groups_read=self._tasks.groups_read,
            **record._asdict(),
        )

    def _set(self, item_id: str, record: ItemRecord) -> None:
        row = self._rows.setdefault(item_id, len(self._rows))
        if row == len(self._values):
            # `resize` needs no second copy of the array, and fills with zeros.
            self._values.resize(row + row // 4, refcheck=False)
        self._values[row] = record


def counts(group: GroupClosed) -> bool:
    """Whether a group says anything about its item: a sample has a reward."""
    return group.rewarded > 0 and group.mean is not None and isfinite(group.mean)


def _after(record: ItemRecord | None, group: GroupClosed, offset: int) -> ItemRecord:
    """Returns the statistics after one more group, which counts."""
    assert group.mean is not None
    if record is None:
        record = ItemRecord(0, 0, 0, 0, 0.0, 0.0, 0, False, 0, -1, 0)
    groups, episodes = record.groups + 1, record.episodes + group.rewarded
    streak = record.streak
    if group.rewarded > 1:
        streak = streak + 1 if group.deviation == 0 else 0
    rate = group.passed / group.rewarded
    return ItemRecord(
        group=offset,
        groups=groups,
        episodes=episodes,
        passed=record.passed + group.passed,
        mean=record.mean + (group.mean - record.mean) * (group.rewarded / episodes),
        recent=record.recent + (rate - record.recent) * max(RECENT_WEIGHT, 1 / groups),
        streak=streak,
        solved=group.passed == group.rewarded,
        sampled_tokens=record.sampled_tokens + group.sampled_tokens,
        newest_version=max(record.newest_version, group.newest_version),
        ended=group.ended,
    )
