"""A long list of episodes is made once for many requests, and a short one for each."""

from __future__ import annotations

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import EpisodeEnded
from headrace.services.kafka.broker import Partition
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.dashboard.index.index_rows import Seen
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views import episode_list
from headrace.services.operate.dashboard.views.episode_list import KeptEpisodes


class Listing:
    """Lists that take a second each, of an index to which an episode is added each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.index = RunIndex(read_recipe("quickstart"))
        self.kept = KeptEpisodes(lambda: self.now)
        self._ended = 0
        find = episode_list.find_episodes

        def slowly(index: RunIndex, query: dict[str, str]) -> list[episode_list.Found]:
            self.now += 1.0
            return find(index, query)

        monkeypatch.setattr(episode_list, "find_episodes", slowly)

    def count(self, at: float, **query: str) -> int:
        self._ended += 1
        outcome = EpisodeEnded(task=self._ended, sample=0, item_id="1", ending="finished")
        seen = Seen(Partition("outcomes", 0), self._ended, 1.0)
        self.index.on_event(outcome, seen)
        self.now = at
        return len(self.kept.find(self.index, query))


def test_a_list_is_kept_for_ten_times_as_long_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Listing(monkeypatch)
    assert listing.count(0) == 1
    assert listing.count(1) == 1
    assert listing.count(10.9, cursor="50", limit="10") == 1, "another page of the same list"
    assert listing.count(11) == 4


def test_another_list_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Listing(monkeypatch)
    assert listing.count(0) == 1
    assert listing.count(1, state="ended") == 2
    assert listing.count(2, state="waiting") == 0
    listing.index = RunIndex(read_recipe("quickstart"))
    assert listing.count(3, state="waiting") == 0
    assert listing.count(4, order="task") == 2


def test_a_query_that_is_refused_leaves_no_empty_list_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing = Listing(monkeypatch)
    assert listing.count(0) == 1
    with pytest.raises(UsageError):
        listing.count(1, order="nothing")
    assert listing.count(2) == 3
