"""The commit never passes a record that somebody still holds."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from headrace.services.kafka.broker import Partition
from headrace.services.worker.open_records import Ledger

ANSWERS = Partition("answers", 0)
ACTS = st.lists(st.tuples(st.sampled_from(["begin", "hold", "let go", "again"]), st.integers(0)))


@given(ACTS)
def test_the_oldest_is_the_first_record_that_anyone_holds(acts: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    held: list[tuple[int, Callable[[], None]]] = []
    let_go: list[Callable[[], None]] = []
    for offset, (act, choice) in enumerate(acts):
        if act == "begin":
            held.append((offset, ledger.begin(offset, {})))
        elif act == "hold" and held:
            place = held[choice % len(held)][0]
            held.append((place, ledger.hold(place)))
        elif act == "let go" and held:
            _, release = held.pop(choice % len(held))
            release()
            let_go.append(release)
        elif act == "again" and let_go:
            let_go[choice % len(let_go)]()  # a second time counts for nothing
        oldest = ledger.oldest()
        expected = min((place for place, _ in held), default=None)
        assert (oldest.offset if oldest else None) == expected


def test_a_record_keeps_the_positions_of_its_reading() -> None:
    ledger = Ledger()
    done = ledger.begin(3, {ANSWERS: 7})
    ledger.begin(5, {ANSWERS: 9})
    assert (oldest := ledger.oldest()) is not None
    assert oldest.positions == {ANSWERS: 7}
    done()
    assert (oldest := ledger.oldest()) is not None
    assert oldest.positions == {ANSWERS: 9}
    assert len(ledger) == 1
