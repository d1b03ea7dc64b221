"""Episodes by the time of their end, with buckets that grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.dashboard.index.ended_by_time import RECENT_S, EndedByTime
from headrace.services.operate.dashboard.index.index_rows import TaskRow
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.run_views import WINDOW_S, _rates

ENDS = st.lists(
    st.tuples(
        st.floats(0, 1e6),
        st.one_of(st.none(), st.floats(-1, 1)),
        st.sampled_from(["", "agent", "environment"]),
        st.integers(0, 100),
    ),
    max_size=60,
)


@given(ENDS, st.integers(4, 30), st.integers(1, 7))
def test_merged_buckets_lose_nothing(ends: Any, most: int, count: int) -> None:
    found = EndedByTime(most)
    for at, reward, origin, tokens in ends:
        found.add(at, reward, origin)
        found.add_tokens(at, tokens)
    curves = found.curves(0.0, 1e6 / count, count)
    assert all(len(curves[name]) == count for name in ("episodes", "tokens", "reward"))
    assert sum(curves["episodes"]) == len(ends)
    assert sum(curves["tokens"]) == sum(tokens for *_, tokens in ends)
    for origin in ("agent", "environment"):
        assert sum(curves["failures"].get(origin, [])) == sum(one[2] == origin for one in ends)
    rewards = [one[1] for one in ends if one[1] is not None]
    whole = found.curves(0.0, 1e7, 1)["reward"]
    assert whole == ([pytest.approx(sum(rewards) / len(rewards))] if rewards else [None])
    assert len(found._buckets) <= most


def test_few_episodes_are_at_their_own_time() -> None:
    found = EndedByTime()
    for at in (1_000.0, 1_000.5, 1_001.9):
        found.add(at, 1.0, "")
    assert found.curves(1_000.0, 0.5, 4)["episodes"] == [1, 1, 0, 1]


def test_the_seconds_of_the_rates_are_bounded() -> None:
    found = EndedByTime()
    for second in range(10 * RECENT_S):
        found.add(second + 0.5, None, "")
    assert len(found._recent) <= 2 * RECENT_S
    assert found.recent(10 * RECENT_S - 60) == (60, 0)


def test_tasks_that_were_cancelled_long_ago_do_not_hide_the_rates() -> None:
    index, now = RunIndex(read_recipe("quickstart")), 10_000.0
    index.by_time.add(now - 1, 1.0, "")
    index.by_time.add_tokens(now - 1, 120)
    # It came last, and was cancelled before it had started.
    index.tasks[2] = TaskRow(2, ended_at=now - 20 * WINDOW_S)
    rates = _rates(index, now)
    assert rates["episodes_per_s"] == 1 / WINDOW_S
    assert rates["tokens_per_s"] == 120 / WINDOW_S


def test_the_curves_by_time_need_no_task() -> None:
    """A request takes no longer the more tasks there are: it does not look at them."""
    index = RunIndex(read_recipe("quickstart"))
    index.first_at = 9_000.0
    index.by_time.add(9_500.0, 1.0, "")
    index.tasks = SimpleNamespace()  # type: ignore[assignment]
    assert _rates(index, 10_000.0)["episodes_per_s"] == 0.0
    assert index.by_time.curves(9_000.0, 100.0, 10)["episodes"][5] == 1
