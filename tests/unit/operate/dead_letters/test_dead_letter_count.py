"""Dead letters by kind, in a topic of which retention has deleted the beginning."""

from __future__ import annotations

import pytest

from headrace.services.operate.dead_letters import dead_letter_count
from headrace.services.operate.dead_letters.dead_letter_count import DeadLetterCount


def test_a_mark_of_a_deleted_dead_letter_counts_for_no_other() -> None:
    count = DeadLetterCount()
    count.on_redriven(3)
    for number in (10, 11):
        count.on_dead_letter(number, f"tasks/0@{number}", "tasks", "no schema", 1.0)
    count.on_redriven(4)
    assert count.waiting == 2
    count.on_redriven(11)
    assert (count.waiting, [one.redriven for one in count.kinds()]) == (1, [1])


def test_memory_is_bounded_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_count, "MAX_KINDS", 2)
    monkeypatch.setattr(dead_letter_count, "MOST_NUMBERS", 3)
    count = DeadLetterCount()
    for number in range(10):
        reason = f"reason {number}"
        count.on_dead_letter(number, f"tasks/0@{number}", "tasks", reason, float(number))
    assert len(count._open) == len(count._numbers) == 3
    assert [one.count for one in count.kinds()] == [1, 1, 8]
    for number in range(10):
        count.on_redriven(number)
    assert (count.waiting, len(count._done)) == (0, 3)


def test_all_dead_letters_of_a_redriven_record_are_done() -> None:
    count = DeadLetterCount()
    for number, reader in enumerate(("scheduler", "env", "source")):
        count.on_dead_letter(number, "tasks/0@7", "tasks", f"{reader} says so", 1.0)
    count.on_dead_letter(3, "tasks/0@8", "tasks", "no schema", 1.0)
    count.on_redriven(1)
    count.on_redriven(1)
    count.on_dead_letter(6, "tasks/0@7", "tasks", "a slow reader", 1.0)
    assert count.waiting == 1
    assert sum(one.redriven for one in count.kinds()) == 4
