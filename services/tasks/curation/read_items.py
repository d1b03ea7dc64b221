"""Reads the statistics of items from the topic `items.<policy>`."""

from __future__ import annotations

import logging
from contextlib import aclosing

from headrace.schemas.events import ItemMeasured
from headrace.schemas.topics import GROUPS, ITEMS
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.tasks.curation.item_statistics import ItemStatistics

logger = logging.getLogger(__name__)


async def read_items(log: EventLog, policy: str) -> ItemStatistics:
    """Returns the recorded statistics of a policy's items.

    Then the groups from `first_group` on must be added to them.
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


async def first_group(log: EventLog, policy: str, wanted: int, newest: int) -> int:
    """Returns the offset from which groups are read: `wanted`, or the first one that is kept.

    Retention may have deleted groups if the reader is younger than the run, or the run was paused
    for long. It warns if these may be later than `newest`, the newest group that was added: nothing
    can bring them back, and to have fewer statistics is better than to have none.
    """
    groups = log.topics.partition(GROUPS, policy)
    ((kept, _),) = (await log.broker.ends([groups])).values()
    lost = max(wanted, newest + 1)
    if lost < kept:
        logger.warning(
            "%s: groups %d to %d were deleted before they were counted. The statistics of items "
            "lack them and continue with group %d",
            *(policy, lost, kept - 1, kept),
        )
    return max(wanted, kept)
