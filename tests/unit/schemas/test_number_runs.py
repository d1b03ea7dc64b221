"""Sets of numbers as bytes."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import packed
from headrace.schemas.events import WaitingRecorded
from headrace.schemas.number_runs import pack_numbers, unpack_numbers


@given(numbers=st.sets(st.integers(0, 200) | st.integers(2**40, 2**40 + 99)))
def test_what_is_packed_is_unpacked(numbers: set[int]) -> None:
    ascending = sorted(numbers)
    if any(b - a >= 2**31 for a, b in pairwise(ascending)):
        with pytest.raises(OverflowError):
            pack_numbers(ascending)
        return
    low, data = pack_numbers(ascending)
    runs = list(unpack_numbers(low, data))
    assert [number for run in runs for number in run] == ascending
    assert all(one.stop < other.start for one, other in pairwise(runs))


@given(data=st.binary(max_size=60) | st.lists(st.integers(-3, 3)).map(
    lambda values: zlib.compress(packed.pack_i32(values))
))  # fmt: skip
def test_other_bytes_are_refused_or_runs(data: bytes) -> None:
    try:
        runs = list(unpack_numbers(5, data))
    except ValueError:
        return
    assert all(len(run) > 0 and run.start >= 5 for run in runs)


def test_a_million_tasks_that_are_scattered_fit_into_a_record() -> None:
    low, data = pack_numbers(range(7, 7_000_007, 7))
    assert low == 7
    assert len(data) < 1_000_000


def test_a_record_holds_as_many_numbers_as_it_says_below_its_end() -> None:
    low, waiting = pack_numbers([3, 4, 9])
    fields = {"topic": "t", "recorded_at": 1, "low": low, "waiting": waiting}
    made = WaitingRecorded.model_validate({**fields, "end": 10, "count": 3})
    assert list(made.runs()) == [range(3, 5), range(9, 10)]
    for end, count in ((9, 3), (10, 2)):
        with pytest.raises(ValueError, match="do not hold"):
            WaitingRecorded.model_validate({**fields, "end": end, "count": count})
