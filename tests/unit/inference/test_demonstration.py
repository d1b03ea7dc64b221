"""A demonstration is what the sampling could have drawn, or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.services.inference.demonstration import demonstrate
from headrace.services.inference.engine import EnginePrompt

END, OTHER_END = 9, 8


def said(ids: list[int], context: int = 100, **fields: Any) -> tuple[list[int], str]:
    given: dict[str, Any] = {"tokens": [1, 2], "max_tokens": 4}
    prompt = EnginePrompt("default", **(given | fields))
    answer = demonstrate(prompt, ids, context)
    assert (answer.logprobs, answer.versions, answer.mixed) == ([], [], False)
    return answer.tokens, answer.finish


@pytest.mark.parametrize(
    ("ids", "fields", "expected"),
    [
        ([3], {"stop_ids": [END, OTHER_END]}, ([3, END], "stop")),
        ([3, OTHER_END], {"stop_ids": [END, OTHER_END]}, ([3, OTHER_END], "stop")),
        ([], {"stop_ids": [END]}, ([END], "stop")),
        ([3, 4, 5, 6], {"stop_ids": [END]}, ([3, 4, 5, 6], "length")),
        ([3], {"stop_ids": [END, OTHER_END], "allowed": [3, OTHER_END]}, ([3, OTHER_END], "stop")),
        ([3], {"max_tokens": 1, "allowed": [3]}, ([3], "length")),
    ],
)
def test_it_ends_as_the_sampling_would(
    ids: list[int], fields: dict[str, Any], expected: tuple[list[int], str]
) -> None:
    assert said(ids, **fields) == expected


def test_what_the_context_can_not_hold_overflows() -> None:
    assert said([3, 4, 5, 6], context=6) == ([3, 4, 5, 6], "length")
    assert said([3, 4, 5, 6], context=5) == ([], "overflow")


@pytest.mark.parametrize(
    ("ids", "fields", "reason"),
    [
        ([3], {}, "no stop token"),
        ([3], {"stop_ids": [END], "allowed": [3]}, "no stop token"),
        ([3, 4, 5, 6, 7], {}, "5 tokens, but its sampling allows 4"),
        ([3, 4, 5, 7], {"allowed": [3, 4, 5]}, "token 7, which is not allowed"),
        ([3, END, 4], {"stop_ids": [END]}, "goes on after the stop token 9"),
        ([3], {"tokens": [], "stop_ids": [END]}, "at least one token"),
    ],
)
def test_what_could_not_be_drawn_is_refused(
    ids: list[int], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        said(ids, **fields)
