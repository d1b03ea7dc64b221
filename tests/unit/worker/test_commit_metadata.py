"""What a commit notes, and what is read of it."""

from __future__ import annotations

import pytest

from headrace.errors import HeadraceError
from headrace.services.kafka.broker import Partition
from headrace.services.worker.commit_metadata import CommitMetadata, read_note

ONE, TWO = Partition("a", 0), Partition("b", 0)


@pytest.mark.parametrize("owners", [0, 1, 12])
def test_a_note_is_read_as_it_was_written(owners: int) -> None:
    note = CommitMetadata({TWO: 7, ONE: 3}, owners)
    assert read_note(note.text(), [TWO, ONE]) == note


def test_a_note_without_owners_is_the_positions_alone_as_it_always_was() -> None:
    assert CommitMetadata({TWO: 7, ONE: 3}).text() == "[3,7]"
    assert read_note("[3,7]", [ONE, TWO]) == CommitMetadata({ONE: 3, TWO: 7}, 0)


def test_no_note_begins_at_the_beginning() -> None:
    assert read_note("", [ONE]) == CommitMetadata({ONE: 0}, 0)


def test_a_note_of_other_partitions_is_refused() -> None:
    with pytest.raises(HeadraceError, match="2 companion positions where 1 are read"):
        read_note('{"at":[3,7],"owners":1}', [ONE])


def test_a_note_that_no_broker_takes_is_refused() -> None:
    positions = {Partition("a", number): 10**15 for number in range(300)}
    with pytest.raises(HeadraceError, match="use fewer partitions"):
        CommitMetadata(positions, 1).text()
