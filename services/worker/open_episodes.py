"""Where the starts of the open tasks begin in the log, and which tasks wait."""

from __future__ import annotations

from contextlib import aclosing

from headrace.schemas.events import WaitingRecorded
from headrace.schemas.topics import EPISODES, GROUPS, OUTCOMES, TASKS, WAITING
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Start, Tail, read_events, resolve_starts
from headrace.services.worker.commit_metadata import read_metadata

SCHEDULER = "scheduler"
"""The scheduler's name as a consumer group."""
SCHEDULER_TOPICS = (EPISODES, OUTCOMES, GROUPS)
"""The topics of which the scheduler's commit notes the positions."""


async def open_episodes(log: EventLog, scheduler: str) -> dict[Partition, Start]:
    """Returns where to read `episodes` so that no start of an open task is missed.

    `scheduler` is the scheduler's consumer group. The positions of its commit never pass a start of
    an open task. What retention has deleted is left out.
    """
    episodes = log.topics.partitions_of(EPISODES)
    tasks = log.topics.partition(TASKS)
    commits = await log.broker.committed(scheduler, [tasks])
    if tasks not in commits or not commits[tasks].metadata:
        return dict.fromkeys(episodes, "first")
    noted = [one for topic in SCHEDULER_TOPICS for one in log.topics.partitions_of(topic)]
    positions = read_metadata(commits[tasks].metadata, noted).positions
    kept = await log.broker.ends(episodes)
    return {one: max(positions[one], kept[one][0]) for one in episodes}


async def recorded_waiting(log: EventLog) -> WaitingRecorded | None:
    """Returns the scheduler's newest record of the tasks that wait. None: it has not made one.

    All tasks before the scheduler's commit have started, unless this record names them.
    """
    waiting = log.topics.partition(WAITING)
    first, end = await resolve_starts(log, {waiting: Tail()})
    newest = None
    ranges = {waiting: (first[waiting], end[waiting])}
    async with aclosing(read_events(log, ranges)) as deliveries:
        async for delivery in deliveries:
            if isinstance(delivery.event, WaitingRecorded):
                newest = delivery.event
    return newest
