"""Dead letters by kind, in a topic of which retention has deleted the beginning."""

from __future__ import annotations

import pytest

from headrace.services.operate.dead_letters import dead_letter_count
from headrace.services.operate.dead_letters.dead_letter_count import DeadLetterCount


def test_a_mark_of_a_deleted_dead_letter_counts_for_no_other() -> None:
    count = DeadLetterCount()
    count.on_redriven(3)
    for number in (10, 11):
        count.on_dead_letter(number, "tasks", "no schema", 1.0)
    count.on_redriven(4)
    assert count.waiting == 2
    count.on_redriven(11)
    assert (count.waiting, [one.redriven for one in count.kinds()]) == (1, [1])


def test_memory_is_bounded_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_count, "MAX_KINDS", 2)
    monkeypatch.setattr(dead_letter_count, "MOST_NUMBERS", 3)
    count = DeadLetterCount()
    for number in range(10):
        count.on_dead_letter(number, "tasks", f"reason {number}", float(number))
    assert len(count._kind_of) == 3
    assert [one.count for one in count.kinds()] == [1, 1, 8]
    for number in range(10):
        count.on_redriven(number)
    assert count.waiting == 0
