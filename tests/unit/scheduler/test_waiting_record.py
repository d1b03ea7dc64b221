"""When it is recorded which tasks wait, and what a successor finds in the record."""

from __future__ import annotations

from collections.abc import Callable

from headrace.services.scheduler.waiting_record import (
    RECORD_EVERY_S,
    RECORD_EVERY_TASKS,
    WaitingRecords,
)


class Holds:
    """What is held: tasks and positions."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def hold(self, name: str) -> Callable[[], None]:
        self.held.append(name)
        return lambda: self.held.remove(name)


def record(records: WaitingRecords, holds: Holds, waiting: list[int], end: int) -> None:
    made = records.make("tasks", waiting, end, 1.0)
    records.on_recorded(made, holds.hold(f"positions {end}"))


def test_only_what_waits_for_long_is_recorded() -> None:
    records, holds = WaitingRecords(), Holds()
    assert not records.is_due(0.0, 0)
    assert records.wait_s(0.0) is None
    for number in range(3):
        records.on_waiting(number, holds.hold(f"task {number}"))
    assert not records.is_due(RECORD_EVERY_S + 1, 3)
    records.on_started(0)
    assert holds.held == ["task 1", "task 2"]
    records.on_waiting(3, holds.hold("task 3"))
    assert records.is_due(2 * RECORD_EVERY_S + 2, 4)
    # What is recorded lets the commit pass, but not its positions.
    record(records, holds, [1, 2, 3], 4)
    assert holds.held == ["positions 4"]
    # A new one is due only if a task has started since.
    assert not records.is_due(3 * RECORD_EVERY_S + 3, 4)
    records.on_started(1)
    assert records.is_due(4 * RECORD_EVERY_S + 4, 4)
    record(records, holds, [2], 4)
    assert holds.held == ["positions 4"]
    for number in (2, 3):
        records.on_started(number)
    assert records.is_due(5 * RECORD_EVERY_S + 5, 4)
    record(records, holds, [], 4)
    assert holds.held == []
    assert records.wait_s(6 * RECORD_EVERY_S) is None


def test_many_tasks_are_recorded_at_once() -> None:
    records, holds = WaitingRecords(), Holds()
    for number in range(RECORD_EVERY_TASKS):
        assert not records.is_due(0.0, number)
        records.on_waiting(number, holds.hold("task"))
    assert records.is_due(0.0, RECORD_EVERY_TASKS)
    assert not records.is_due(0.0, RECORD_EVERY_TASKS, many=False)


def test_a_successor_finds_what_waits_before_the_commit() -> None:
    records, holds = WaitingRecords(), Holds()
    first = records.make("tasks", [1, 4], 5, 1.0)
    newest = records.make("tasks", [1, 4, 6], 8, 2.0)
    records.recover(first, lambda: holds.hold("assignment"))
    records.recover(newest, lambda: holds.hold("assignment"))
    assert holds.held == ["assignment"]
    assert records.named_below(5) == [1, 4]
    assert records.named_below(5) == []
    # What it has read since is only passed by a record of its own.
    records.on_waiting(6, holds.hold("task 6"))
    assert holds.held == ["assignment", "task 6"]
    record(records, holds, [6], 8)
    assert holds.held == ["positions 8"]


def test_an_empty_record_holds_nothing() -> None:
    records, holds = WaitingRecords(), Holds()
    records.recover(records.make("tasks", [1], 2, 1.0), lambda: holds.hold("assignment"))
    records.recover(records.make("tasks", [], 2, 2.0), lambda: holds.hold("assignment"))
    assert holds.held == []
    assert records.named_below(9) == []
