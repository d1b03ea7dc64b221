"""Reads the statistics of items from the topic `items.<policy>`."""

from __future__ import annotations

from contextlib import aclosing

from headrace.schemas.events import ItemMeasured
from headrace.schemas.topics import ITEMS
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.tasks.curation.item_statistics import ItemStatistics


async def read_items(log: EventLog, policy: str) -> ItemStatistics:
    """Returns the recorded statistics of a policy's items.

    Then the groups from the offset `tasks.groups_read` on must be added to them.
    """
    items = log.topics.partition(ITEMS, policy)
    statistics = ItemStatistics(policy)
    async with aclosing(follow_events(log, {items: "first"}, include_uncommitted=True)) as stream:
        async for item in stream:
            if isinstance(item, CaughtUp):
                break
            if isinstance(item.event, ItemMeasured):
                statistics.restore(item.event)
    return statistics
