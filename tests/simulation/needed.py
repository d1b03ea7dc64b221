"""What retention must leave: of topics kept for days, all that some reader may still need."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from headrace.schemas.topics import (
    ACTIONS,
    EPISODES,
    GENERATIONS,
    GROUPS,
    OBSERVATIONS,
    OUTCOMES,
    PROMPTS,
    Topic,
)
from headrace.services.agent.service import SIDE_TOPICS
from headrace.services.kafka.broker import Partition
from headrace.services.namespace.apply import shared_partitions
from tests.simulation.processes import Run

EXPIRING = (EPISODES, PROMPTS, GENERATIONS, ACTIONS, OBSERVATIONS)
"""Kept for days only."""


def needed(run: Run) -> dict[Partition, int]:
    """Of each partition kept for days: the oldest offset that some reader still needs."""
    state, topics = run.cluster.state, run.topics
    oldest: dict[Partition, int] = {}

    def need(partition: Partition, offset: int) -> None:
        oldest[partition] = min(oldest.get(partition, offset), offset)

    for service in ("scheduler", "agent", "env", "inference"):
        group, partitions = shared_partitions(topics, service)
        for partition, place in state.committed(group, partitions).items():
            need(partition, place.offset)
            noted = json.loads(place.metadata) if place.metadata else []
            offsets = noted if isinstance(noted, list) else noted["at"]
            places = _side_partitions(run, service, partition)
            for side_partition, offset in zip(places, offsets or [0] * len(places), strict=True):
                need(side_partition, offset)
    return {
        place: offset
        for place, offset in oldest.items()
        if topics.by_name(place.topic).topic in EXPIRING
    }


def _side_partitions(run: Run, service: str, main: Partition) -> list[Partition]:
    """What a service's commit notes positions of, in the note's order."""
    topics, own, every = run.topics, [main.number], range(run.topics.partitions)
    read: dict[str, list[tuple[Topic[Any], Iterable[int]]]] = {
        "agent": [(topic, own) for topic in SIDE_TOPICS],
        "scheduler": [(EPISODES, every), (OUTCOMES, every), (GROUPS, [0])],
    }
    return sorted(
        Partition(topics.name(topic, policy), number)
        for topic, numbers in read.get(service, [])
        for policy in (topics.policies if topic.per_policy else (None,))
        for number in numbers
    )
