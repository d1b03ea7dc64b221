"""What a A commit has, and what is read of it."""

from __future__ import annotations

from random import Random

import pytest

from headrace.errors import HeadraceError
from headrace.schemas.topics import MOST_POSITIONS
from headrace.services.kafka.broker import METADATA_LIMIT, Partition
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
    positions = {Partition("a", number): 10**15 for number in range(500)}
    with pytest.raises(HeadraceError, match="Use fewer partitions"):
        CommitMetadata(positions, 1).text()


@pytest.mark.parametrize("below", [2, 1_000_000, 2**40])
@pytest.mark.parametrize("counted", [0, 2**31])
def test_as_many_positions_as_a_recipe_allows_are_stored_and_read(below: int, counted: int) -> None:
    chance = Random(below)
    positions = {
        Partition("a", number): chance.randrange(below) for number in range(MOST_POSITIONS)
    }
    positions[Partition("a", 7)] = below - 1
    metadata = CommitMetadata(positions, counted, counted and 2**40)
    assert len(metadata.text().encode()) <= METADATA_LIMIT
    assert read_metadata(metadata.text(), list(positions)) == metadata


def test_packed_positions_of_other_partitions_are_refused() -> None:
    positions = {Partition("a", number): 2**40 - 1 for number in range(400)}
    text = CommitMetadata(positions).text()
    with pytest.raises(HeadraceError, match="400 side partitions, but this worker reads 399"):
        read_metadata(text, list(positions)[:-1])
