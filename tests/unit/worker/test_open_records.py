"""The commit never passes a record that somebody still holds."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from headrace.services.kafka.broker import Partition
from headrace.services.worker.open_records import OpenRecords

ANSWERS = Partition("answers", 0)
ACTS = st.lists(
    st.tuples(st.sampled_from(["begin", "hold", "long", "release", "again"]), st.integers(0))
)


@given(ACTS)
def test_the_oldest_is_the_first_record_that_anyone_holds(acts: list[tuple[str, int]]) -> None:
    open_records = OpenRecords()
    held: list[tuple[int, bool, Callable[[], None]]] = []
    released: list[Callable[[], None]] = []
    for offset, (act, choice) in enumerate(acts):
        if act == "begin":
            held.append((offset, False, open_records.begin(offset, {})))
        elif act in ("hold", "long") and held:
            place, was_long, _ = held[choice % len(held)]
            long = act == "long" or was_long
            held.append((place, long, open_records.hold(place, long=long)))
        elif act == "release" and held:
            _, _, release = held.pop(choice % len(held))
            release()
            released.append(release)
        elif act == "again" and released:
            released[choice % len(released)]()  # a second time counts for nothing
        oldest = open_records.oldest()
        expected = min((place for place, _, _ in held), default=None)
        assert (oldest.offset if oldest else None) == expected
        brief = min((place for place, long, _ in held if not long), default=None)
        assert open_records.oldest_brief() == brief


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
