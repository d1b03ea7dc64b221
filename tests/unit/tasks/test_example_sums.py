"""The data set of the example `tool_use`: right, the same every time, as many as asked for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tool_use.calculator import sums
from headrace.errors import UsageError


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 99))
def test_the_answer_is_the_prompts_value_and_the_steps_lead_to_it(
    seed: int, numbers: int, largest: int
) -> None:
    for item in sums(size=5, numbers=numbers, largest=largest, seed=seed):
        payload = item.payload
        assert eval(payload["prompt"]) == payload["answer"]
        assert len(payload["steps"]) == numbers - 1
        display = ""
        for step in payload["steps"]:
            display = str(eval(display + step))
        assert display == str(payload["answer"])


def test_sums_are_the_same_each_time_and_others_by_another_seed() -> None:
    first, again, other = (list(sums(size=50, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert [item.payload for item in first] != [item.payload for item in other]
    assert first == list(itertools.islice(sums(seed=1), 50))


@pytest.mark.parametrize("options", [{"numbers": 1}, {"largest": 0}])
def test_what_can_not_be_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="to at least 2"):
        next(sums(**options))
