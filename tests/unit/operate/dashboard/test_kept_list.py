"""A long list of episodes is made once for many requests, and a short one for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import EpisodeEnded, GroupClosed
from headrace.services.kafka.broker import Partition
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.dashboard.dashboard_api import DashboardApi
from headrace.services.operate.dashboard.index.discarded import Discarded
from headrace.services.operate.dashboard.index.index_rows import DiscardedRow, Seen
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.episode_list import Found, find_episodes
from headrace.services.operate.dashboard.views.kept_list import KeptList


class Listing:
    """Lists that take a second each, of an index to which an episode is added each time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.index = RunIndex(read_recipe("quickstart"))
        self.kept = KeptList(self._make, lambda: self.now)
        self._ended = 0

    def _make(self, index: RunIndex, query: Mapping[str, str]) -> list[Found]:
        self.now += 1.0
        return find_episodes(index, query)

    def count(self, at: float, **query: str) -> int:
        self._ended += 1
        outcome = EpisodeEnded(task=self._ended, sample=0, item_id="1", ending="finished")
        seen = Seen(Partition("outcomes", 0), self._ended, 1.0)
        self.index.on_event(outcome, seen)
        self.now = at
        return len(self.kept.rows(self.index, query))


def test_a_list_is_kept_for_ten_times_as_long_as_it_took() -> None:
    listing = Listing()
    assert listing.count(0) == 1
    assert listing.count(1) == 1
    assert listing.count(10.9, cursor="50", limit="10") == 1, "another page of the same list"
    assert listing.count(11) == 4


def test_another_list_is_made_at_once() -> None:
    listing = Listing()
    assert listing.count(0) == 1
    assert listing.count(1, state="ended") == 2
    assert listing.count(2, state="waiting") == 0
    listing.index = RunIndex(read_recipe("quickstart"))
    assert listing.count(3, state="waiting") == 0
    assert listing.count(4, order="task") == 2


def test_a_query_that_is_refused_leaves_no_empty_list_behind() -> None:
    listing = Listing()
    assert listing.count(0) == 1
    with pytest.raises(UsageError):
        listing.count(1, order="nothing")
    assert listing.count(2) == 3


def test_what_was_discarded_is_sorted_once_for_many_requests() -> None:
    class Slow(Discarded):
        sorted = 0

        def rows(self, policy: str | None, reason: str | None) -> Iterator[DiscardedRow]:
            self.sorted += 1
            time.sleep(0.2)  # so it is kept for two seconds
            return super().rows(policy, reason)

    index: Any = RunIndex(read_recipe("quickstart"))
    index.discarded = Slow()
    follower: Any = SimpleNamespace(index=index)
    unused: Any = SimpleNamespace(log=None)
    api = DashboardApi(unused, unused, follower, unused, unused)

    async def page(task: int, **query: str) -> tuple[int, int]:
        group = GroupClosed(
            task=task, policy="default", item_id="1", verdict="dropped", reason="equal"
        )
        index.discarded.on_group(group, 1.0)
        tree = await api.discarded(query)
        return tree["reasons"][0]["count"], tree["total"]

    async def main() -> None:
        assert await page(1) == (1, 1)
        assert await page(2, cursor="0", limit="5") == (2, 1)
        assert index.discarded.sorted == 1
        assert await page(3, reason="equal") == (3, 3)

    asyncio.run(main())
    api.close()
