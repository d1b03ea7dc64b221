"""The frontier is a set of numbers: checked against one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.schemas.frontier import Frontier

NUMBERS = st.integers(0, 40)


class AgainstASet(RuleBasedStateMachine):
    """Adds numbers to both, and compares all that can be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.frontier = Frontier()
        self.numbers: set[int] = set()

    @rule(number=NUMBERS)
    def add(self, number: int) -> None:
        assert self.frontier.add(number) == (number not in self.numbers)
        self.numbers.add(number)

    @rule()
    def rebuild(self) -> None:
        self.frontier = Frontier(self.frontier.low_mark, self.frontier.runs)

    @invariant()
    def holds_the_same_numbers(self) -> None:
        assert {number for number in range(50) if number in self.frontier} == self.numbers
        assert len(self.frontier) == len(self.numbers)

    @rule(first=NUMBERS, last=NUMBERS)
    def look_for_gaps(self, first: int, last: int) -> None:
        gaps = list(self.frontier.gaps(first, last))
        assert all(begin <= end for begin, end in gaps)
        missing = [one for begin, end in gaps for one in range(begin, end + 1)]
        assert missing == [one for one in range(first, last + 1) if one not in self.numbers]

    @invariant()
    def is_as_small_as_can_be(self) -> None:
        frontier = self.frontier
        assert frontier.low_mark == next(n for n in range(50) if n not in self.numbers)
        before = frontier.low_mark - 1
        for first, last in frontier.runs:
            assert before + 1 < first <= last
            before = last


AgainstASet.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_against_a_set = AgainstASet.TestCase


@given(
    low_mark=st.integers(0, 10),
    runs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=4),
)
def test_only_runs_apart_make_a_frontier(low_mark: int, runs: list[tuple[int, int]]) -> None:
    inclusive = [(first, first + more) for first, more in runs]
    numbers = [number for first, last in inclusive for number in range(first, last + 1)]
    apart = len(set(numbers)) == len(numbers) and all(first >= low_mark for first, _ in inclusive)
    if not apart:
        with pytest.raises(ValueError, match="run "):
            Frontier(low_mark, inclusive)
        return
    frontier = Frontier(low_mark, inclusive)
    assert {number for number in range(50) if number in frontier} == {*range(low_mark), *numbers}


def test_a_run_around_another_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run 3\.\.9 overlaps another"):
        Frontier(0, [(5, 6), (3, 9)])


def test_a_run_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run 6\.\.5 is empty"):
        Frontier(0, [(6, 5)])
