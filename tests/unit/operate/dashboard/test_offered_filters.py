"""The filters that the page offers are values that the server knows, and find what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import Ending, EpisodeEnded, Failure, TaskSubmitted
from headrace.services.kafka.broker import Partition
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.dashboard.index.index_rows import Seen
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.episode_list import STATES, find_episodes

PAGE = Path(__file__).parents[4] / "services/operate/dashboard/page/views"


def offered(name: str) -> set[str]:
    found = re.search(rf"const {name} = (\[.*?\]);", (PAGE / "episodes.js").read_text())
    assert found is not None
    return set(json.loads(found[1]))


def test_the_page_offers_what_the_events_have() -> None:
    assert offered("STATES") == set(STATES)
    assert offered("PURPOSES") == set(get_args(TaskSubmitted.model_fields["purpose"].annotation))
    assert offered("ORIGINS") == set(get_args(Failure.model_fields["origin"].annotation))


def test_the_tile_of_failed_episodes_links_to_them() -> None:
    tile = re.search(r'name="Failed episodes".*link\(\["episodes"\], (\{.*?\})\)',
                     (PAGE / "run.js").read_text())  # fmt: skip
    assert tile is not None
    query = dict(re.findall(r"(\w+): \"(\w+)\"", tile[1]))
    index = RunIndex(read_recipe("quickstart"))
    endings: tuple[Ending, ...] = ("finished", "failed")
    for number, ending in enumerate(endings):
        outcome = EpisodeEnded(task=number, sample=0, item_id="1", ending=ending)
        index.on_event(outcome, Seen(Partition("outcomes", 0), number, 1.0))
    assert [one.task.task for one in find_episodes(index, query)] == [1]


def test_a_state_that_no_episode_has_is_refused() -> None:
    index = RunIndex(read_recipe("quickstart"))
    with pytest.raises(UsageError, match="waiting, running, ended"):
        find_episodes(index, {"state": "failed"})
