"""When each version of a run was published, read from its log."""

from __future__ import annotations

import asyncio
from bisect import bisect
from contextlib import aclosing
from typing import Any

from headrace.schemas.events import BatchAssembled, PolicyPublished, TaskEnded
from headrace.schemas.topics import BATCHES, POLICIES, RESULTS
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace

Point = dict[str, float]
"""A version: `version`, `seconds` since version 0 was published, the `reward` of its batch, and the
training `episodes` that had ended by then."""


def timeline(cluster: ClusterConfig) -> dict[str, list[Point]]:
    """Returns the points of each policy of a run, in the order of the versions."""
    return asyncio.run(_timeline(cluster))


async def _timeline(cluster: ClusterConfig) -> dict[str, list[Point]]:
    rewards: dict[tuple[str, int], float | None] = {}
    published: dict[tuple[str, int], float] = {}
    ends: list[float] = []
    async with open_namespace(cluster, "experiment") as (log, _):
        topics = log.topics
        partitions = [
            partition for topic in (BATCHES, POLICIES, RESULTS)
            for partition in topics.partitions_of(topic)
        ]  # fmt: skip
        async with aclosing(read_events(log, dict.fromkeys(partitions, WHOLE))) as deliveries:
            async for delivery in deliveries:
                match delivery.event:
                    case BatchAssembled() as batch:
                        rewards[batch.policy, batch.version] = batch.reward_mean
                    case PolicyPublished() as policy:
                        published.setdefault((policy.policy, policy.version), delivery.recorded_at)
                    case TaskEnded() as ended:
                        if ended.purpose == "train":
                            ends += [delivery.recorded_at] * len(ended.outcomes)
    return _points(rewards, published, sorted(ends))


def _points(
    rewards: dict[tuple[str, int], float | None],
    published: dict[tuple[str, int], float],
    ends: list[float],
) -> dict[str, list[Point]]:
    began = min(published.values())
    points: dict[str, list[Any]] = {}
    for (policy, version), moment in sorted(published.items()):
        reward = rewards.get((policy, version))
        if reward is None:
            continue
        points.setdefault(policy, []).append(
            {
                "version": version,
                "seconds": moment - began,
                "reward": reward,
                "episodes": bisect(ends, moment),
            }
        )
    return points


def reached(points: list[Point], reward: float, what: str, width: int = 3) -> float | None:
    """Returns `what` at the first version at which the mean reward of `width` versions is at least
    `reward`. None if it never is.
    """
    for end in range(width, len(points) + 1):
        if sum(point["reward"] for point in points[end - width : end]) >= width * reward:
            return points[end - 1][what]
    return None
