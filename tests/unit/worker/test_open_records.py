"""The commit never passes a record that somebody still holds."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from headrace.services.kafka.broker import Partition
from headrace.services.worker.open_records import OpenRecords

ANSWERS = Partition("answers", 0)
ACTS = st.lists(st.tuples(st.sampled_from(["begin", "hold", "release", "again"]), st.integers(0)))


@given(ACTS)
def test_the_oldest_is_the_first_record_that_anyone_holds(acts: list[tuple[str, int]]) -> None:
    open_records = OpenRecords()
    held: list[tuple[int, Callable[[], None]]] = []
    released: list[Callable[[], None]] = []
    for offset, (act, choice) in enumerate(acts):
        if act == "begin":
            held.append((offset, open_records.begin(offset, {})))
        elif act == "hold" and held:
            place = held[choice % len(held)][0]
            held.append((place, open_records.hold(place)))
        elif act == "release" and held:
            _, release = held.pop(choice % len(held))
            release()
            released.append(release)
        elif act == "again" and released:
            released[choice % len(released)]()  # a second time counts for nothing
        oldest = open_records.oldest()
        expected = min((place for place, _ in held), default=None)
        assert (oldest.offset if oldest else None) == expected


def test_a_record_keeps_the_positions_of_its_reading() -> None:
    open_records = OpenRecords()
    done = open_records.begin(3, {ANSWERS: 7})
    open_records.begin(5, {ANSWERS: 9})
    assert (oldest := open_records.oldest()) is not None
    assert oldest.positions == {ANSWERS: 7}
    done()
    assert (oldest := open_records.oldest()) is not None
    assert oldest.positions == {ANSWERS: 9}
    assert len(open_records) == 1
