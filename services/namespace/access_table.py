"""Who reads and writes which topic, joins which group, and fences which transactional id.

This is data. `services/operate/acls/` makes Kafka's ACLs and quotas from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.topics import (
    ACTIONS,
    AUDIT,
    BATCHES,
    CANCELLATIONS,
    DEAD_LETTERS,
    EPISODES,
    GENERATIONS,
    GROUPS,
    INSTANCES,
    ITEMS,
    LIMITS,
    LOADS,
    OBSERVATIONS,
    OUTCOMES,
    POLICIES,
    PROMPTS,
    QUOTAS,
    RESULTS,
    RUNS,
    SHARES,
    TASKS,
    TOPICS,
    TRAJECTORIES,
    TURNS,
    WAITING,
    Topic,
)

AnyTopic = Topic[Any]
GROUPS_OF_SERVICES = ("scheduler", "agent", "env", "inference", "assemble-groups", "project-turns")
"""The consumer groups of a namespace."""
QUOTA_KEYS = ("producer_byte_rate", "consumer_byte_rate", "request_percentage")
"""The quotas of principals, in Kafka's words: bytes a second, and percents of one thread's time."""
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Access:
    """What one role may do in a namespace. It may see the names of all topics of the namespace,
    because every process first checks that the namespace is whole.
    """

    reads: tuple[AnyTopic, ...]
    writes: tuple[AnyTopic, ...] = ()
    joins: tuple[str, ...] = ()
    """Consumer groups that it joins or commits for, without the namespace."""
    sees: tuple[str, ...] = ()
    """Consumer groups whose commits and members it reads."""
    transactions: tuple[str, ...] = ()
    """Transactional ids, without the namespace. `{policy}` stands for each policy in turn."""
    manages: tuple[str, ...] = ()
    """More operations on every topic, in Kafka's words."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """`QUOTA_KEYS` to the most that it may use of each broker. Absent: as much as it wants."""


def _service(
    reads: tuple[AnyTopic, ...],
    writes: tuple[AnyTopic, ...],
    joins: tuple[str, ...] = (),
    sees: tuple[str, ...] = (),
    transactions: tuple[str, ...] = (),
) -> Access:
    """Every service follows `runs`, records its life, and puts aside what it can't decode."""
    return Access((RUNS, *reads), (*writes, INSTANCES, DEAD_LETTERS), joins, sees, transactions)


_AGENT = _service(
    (EPISODES, CANCELLATIONS, GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS, LOADS),
    (PROMPTS, ACTIONS, TRAJECTORIES, OUTCOMES, RESULTS),
    joins=("agent",),
)
SERVICE_ACCESS: dict[str, Access] = {
    "source": _service(
        (TASKS, EPISODES, WAITING, POLICIES, BATCHES, ITEMS, GROUPS), (TASKS,), sees=("scheduler",)
    ),
    "evaluation": _service((TASKS, POLICIES, RESULTS), (TASKS,)),
    "scheduler": _service(
        (
            *(TASKS, CANCELLATIONS, QUOTAS, EPISODES, POLICIES, OUTCOMES, GROUPS, BATCHES),
            *(LOADS, WAITING, LIMITS, SHARES),
        ),
        (EPISODES, WAITING, SHARES),
        joins=("scheduler",),
        transactions=("scheduler",),
    ),
    "agent": _AGENT,
    "gateway": _AGENT,
    "env": _service((ACTIONS, TASKS), (OBSERVATIONS, LOADS), joins=("env",)),
    "inference": _service(
        (PROMPTS, POLICIES, SHARES, LOADS), (GENERATIONS, LOADS, PROMPTS), joins=("inference",)
    ),
    "assemble-groups": _service((RESULTS,), (GROUPS,), joins=("assemble-groups",)),
    "assemble-batches": _service(
        (GROUPS, EPISODES, POLICIES, BATCHES),
        (BATCHES,),
        sees=("scheduler",),
        transactions=("assemble-batches.{policy}",),
    ),
    "item-statistics": _service(
        (GROUPS, ITEMS), (ITEMS,), transactions=("item-statistics.{policy}",)
    ),
    "project-turns": _service((RESULTS, TRAJECTORIES), (TURNS,), joins=("project-turns",)),
    "trainer": _service(
        (BATCHES, TRAJECTORIES, POLICIES), (POLICIES,), transactions=("trainer.{policy}",)
    ),
}
"""What each service may do. A service may read a topic also if only some recipes need it."""
USER_ACCESS: dict[str, Access] = {
    "operator": Access(
        TOPICS,
        (RUNS, TASKS, CANCELLATIONS, QUOTAS, LIMITS, AUDIT, DEAD_LETTERS),
        joins=GROUPS_OF_SERVICES,  # `apply` makes the first commit of each group
        manages=("CREATE", "DELETE", "DESCRIBE_CONFIGS"),
    ),
    "redrive": Access(
        TOPICS,
        (
            *(TASKS, CANCELLATIONS, PROMPTS, GENERATIONS, ACTIONS, OBSERVATIONS, OUTCOMES),
            *(RESULTS, TURNS, GROUPS, INSTANCES, AUDIT, DEAD_LETTERS),
        ),
        transactions=("dead-letters",),
    ),
    "reader": Access(TOPICS, sees=GROUPS_OF_SERVICES, manages=("DESCRIBE_CONFIGS",)),
    "guest": Access(
        (RUNS, TASKS, EPISODES, RESULTS, OUTCOMES, TRAJECTORIES, TURNS, GROUPS, POLICIES),
        (TASKS, CANCELLATIONS, DEAD_LETTERS),
        joins=("guest",),
        quotas=dict(zip(QUOTA_KEYS, (_MIB, 8 * _MIB, 25), strict=True)),
    ),
    "external-env": Access(
        (RUNS, ACTIONS),
        (OBSERVATIONS,),
        joins=("external-env",),
        # More than a guest: episodes wait for its answers.
        quotas=dict(zip(QUOTA_KEYS, (8 * _MIB, 16 * _MIB, 100), strict=True)),
    ),
}
"""What people, their commands and other teams may do."""
ACCESS = SERVICE_ACCESS | USER_ACCESS
"""Role to what it may do. The roles are all services, and those of people and other teams."""
