"""What a A commit has, and what is read of it."""

from __future__ import annotations

import pytest

from headrace.errors import HeadraceError
from headrace.services.kafka.broker import Partition
from headrace.services.worker.commit_metadata import CommitMetadata, read_metadata

ONE, TWO = Partition("a", 0), Partition("b", 0)


@pytest.mark.parametrize("owners", [0, 1, 12])
@pytest.mark.parametrize("done", [0, 90])
def test_metadata_is_read_as_it_was_written(owners: int, done: int) -> None:
    metadata = CommitMetadata({TWO: 7, ONE: 3}, owners, done)
    assert read_metadata(metadata.text(), [TWO, ONE]) == metadata


def test_metadata_without_owners_is_the_positions_alone_as_it_always_was() -> None:
    assert CommitMetadata({TWO: 7, ONE: 3}).text() == "[3,7]"
    assert read_metadata("[3,7]", [ONE, TWO]) == CommitMetadata({ONE: 3, TWO: 7}, 0)


def test_no_note_begins_at_the_beginning() -> None:
    assert read_metadata("", [ONE]) == CommitMetadata({ONE: 0}, 0)


def test_metadata_of_other_partitions_is_refused() -> None:
    with pytest.raises(
        HeadraceError, match="positions of 2 side partitions, but this worker reads 1"
    ):
        read_metadata('{"at":[3,7],"owners":1}', [ONE])


def test_metadata_that_no_broker_takes_is_refused() -> None:
    positions = {Partition("a", number): 10**15 for number in range(300)}
    with pytest.raises(HeadraceError, match="Use fewer partitions"):
        CommitMetadata(positions, 1).text()
