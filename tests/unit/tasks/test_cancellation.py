"""Which cancellations are remembered."""

from __future__ import annotations

from time import process_time

from headrace.schemas.events import TaskCancelled
from headrace.services.tasks.cancellation import CancelledTasks
from tests.unit.scheduler.test_core import task


def cancel(number: int, reason: str = "") -> TaskCancelled:
    return TaskCancelled(source="test", task_id=str(number), reason=reason)


def test_of_two_cancellations_of_a_task_the_first_counts() -> None:
    tasks = CancelledTasks()
    assert tasks.reason(task(1)) is None
    assert tasks.add(cancel(1))
    assert not tasks.add(cancel(1, "again"))
    assert tasks.reason(task(1)) == ""
    assert tasks.reason(task(1, source="another")) is None


def test_only_the_newest_are_kept() -> None:
    tasks = CancelledTasks(kept=3)
    for number in range(5):
        tasks.add(cancel(number))
    known = [number for number in range(5) if tasks.reason(task(number)) is not None]
    assert known == [2, 3, 4]


def test_forgetting_does_not_slow_down_as_more_are_forgotten() -> None:
    full = 50_000
    tasks = CancelledTasks(kept=full)
    seconds = []
    for first in range(0, 2 * full, 1_000):
        events = [cancel(number) for number in range(first, first + 1_000)]
        began = process_time()
        for event in events:
            tasks.add(event)
        seconds.append(process_time() - began)
    filling, forgetting = seconds[: full // 1_000], seconds[full // 1_000 :]
    assert sorted(forgetting)[-10] < 4 * sorted(filling)[len(filling) // 2]
