"""Shortened curves, and the tokens of a context."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import TrajectoryRecorded, Turn
from headrace.schemas.packed import pack_f32, pack_i32, pack_spans
from headrace.services.operate.dashboard.index.version_series import merged, shortened
from headrace.services.operate.dashboard.views.token_strip import Decode, strip_tree
from headrace.services.operate.dashboard.views.version_view import histogram


@given(st.lists(st.integers(0, 10_000), unique=True).map(sorted), st.integers(1, 50))
def test_merged_versions_are_all_there_in_order(versions: list[int], points: int) -> None:
    groups = merged(versions, points)
    assert [version for group in groups for version in group] == versions
    assert len(groups) == min(points, len(versions))
    assert all(groups)
    if groups:
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


@given(st.lists(st.lists(st.floats(allow_nan=True), max_size=5), max_size=10))
def test_a_shortened_curve_lies_between_its_lowest_and_highest(groups: list[list[float]]) -> None:
    curve = shortened([[value for value in group if abs(value) < 1e9] for group in groups])
    for mean, low, high in zip(curve["mean"], curve["low"], curve["high"], strict=True):
        assert (mean is None) == (low is None) == (high is None)
        if mean is not None and low is not None and high is not None:
            assert low - 1e-3 <= mean <= high + 1e-3


@given(st.lists(st.floats(-1e6, 1e6)))
def test_a_histogram_counts_every_number(values: list[float]) -> None:
    found = histogram(values)
    assert sum(found["counts"]) == len(values)


def decoder(_: str) -> Decode:
    return lambda ids: bytes(ids).decode("utf-8", "replace")


def strip(turns: list[Turn], branch: int | None = None, first: int = 0, limit: int = 100) -> Any:
    trajectory = TrajectoryRecorded(
        task=0, sample=0, source="s", task_id="t", item_id="i", agent="a", ending="finished",
        started=0, ended=0, turns=tuple(turns),
    )  # fmt: skip
    return strip_tree(
        trajectory, decoder, {2: [-0.25]}, branch=branch, first=first, limit=limit, masked=False
    )


def turn(parent: int, context: str, text: str, version: int = 1, **more: Any) -> Turn:
    ids = list(text.encode())
    return Turn(
        parent=parent, call=str(parent + 1), policy="default",
        context=pack_i32(list(context.encode())), tokens=pack_i32(ids),
        logprobs=pack_f32([-0.5] * len(ids)), versions=pack_spans([version] * len(ids)), **more,
    )  # fmt: skip


def test_a_branch_has_the_tokens_of_its_own_turns() -> None:
    turns = [turn(-1, "ab", "c"), turn(0, "d", "e"), turn(0, "f", "g", version=2)]
    tree = strip(turns)
    assert "".join(tree["text"]) == "abcfg"
    assert tree["origin"] == [0, 0, 1, 0, 1]
    assert tree["mask"] == [0, 0, 1, 0, 1]
    assert tree["version"] == [-1, -1, 1, -1, 2]
    assert tree["logprob"] == [None, None, -0.5, None, -0.5]
    assert tree["trainer"] == [None, None, None, None, -0.25]
    assert tree["leaves"] == [1, 2]
    assert "".join(strip(turns, branch=1)["text"]) == "abcde"
    window = strip(turns, first=2, limit=2)
    assert (window["text"], window["next"], window["total"]) == (["c", "f"], 4, 5)


def test_a_character_of_several_tokens_stands_at_the_first_one() -> None:
    tree = strip([turn(-1, "", "aé🙂\x1b")])
    assert tree["text"] == ["a", "é", "", "🙂", "", "", "", "\x1b"]


def test_turns_that_are_not_trained_on_are_masked() -> None:
    tree = strip([turn(-1, "", "a", trainable=False), turn(0, "", "b")])
    assert tree["mask"] == [0, 1]


def test_wrong_packed_fields_show_no_numbers() -> None:
    wrong = turn(-1, "", "ab").model_copy(update={"logprobs": b"123", "versions": b"12345678"})
    tree = strip([wrong])
    assert tree["logprob"] == [None, None]
    assert tree["version"] == [-1, -1]
    assert not any(isinstance(value, float) and math.isnan(value) for value in tree["logprob"])
