"""Where the starts of the open tasks begin in the log."""

from __future__ import annotations

from headrace.schemas.topics import EPISODES, GROUPS, OUTCOMES, TASKS
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Start
from headrace.services.worker.commit_metadata import read_metadata

SCHEDULER = "scheduler"
"""The scheduler's name as a consumer group."""
SCHEDULER_TOPICS = (EPISODES, OUTCOMES, GROUPS)
"""The topics of which the scheduler's commit notes the positions."""


async def open_episodes(log: EventLog, scheduler: str) -> dict[Partition, Start]:
    """Returns where to read `episodes` so that no start of an open task is missed.

    `scheduler` is the scheduler's consumer group. Its commit never passes a task that is open. What
    retention has deleted is left out.
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
