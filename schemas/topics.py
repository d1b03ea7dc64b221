"""Every topic: its event, key, partitions, sole writer and retention. Nothing else names a topic.

Real names are `<namespace>.<topic>.v1`, or `<namespace>.<topic>.<policy>.v1` where a topic is one
a policy. One run is one namespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from headrace.schemas import events
from headrace.schemas.events import Event

E = TypeVar("E", bound=Event)

Kept = Literal["forever", "long", "days"]
RETENTION_MS: dict[Kept, int] = {
    "forever": -1,
    "long": 90 * 86_400_000,
    "days": 7 * 86_400_000,
}
MAX_RECORD_BYTES = 8 * 1024 * 1024
"""No record may be larger; larger things are blobs."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}\Z")
"""What a namespace or a policy may be called."""


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """A topic's partition."""

    topic: str
    number: int


@dataclass(frozen=True)
class Topic(Generic[E]):
    """A row of the table. `event` is None for `dead-letters`, which holds any bytes."""

    name: str
    event: type[E] | None
    writer: str
    kept: Kept
    single: bool = False
    """One partition, whose order is a total order; else the namespace's P."""
    per_policy: bool = False

    def real_name(self, namespace: str, policy: str | None = None) -> str:
        """The name on the broker. `policy` exactly where the topic is one a policy."""
        if (policy is not None) != self.per_policy:
            one = "one a policy: name it" if self.per_policy else "the same for every policy"
            raise ValueError(f"topic {self.name} is {one}")
        middle = f"{self.name}.{policy}" if policy is not None else self.name
        return f"{namespace}.{middle}.v1"


RUNS = Topic("runs", events.RunStateEntered, "operator", "forever", single=True)
TASKS = Topic("tasks", events.TaskSubmitted, "any team", "long", single=True)
CANCELLATIONS = Topic("cancellations", events.TaskCancelled, "any team", "long", single=True)
EPISODES = Topic("episodes", events.EpisodeStarted, "scheduler, fenced", "days")
PROMPTS = Topic("prompts", events.GenerationRequested, "agent", "days", per_policy=True)
GENERATIONS = Topic("generations", events.GenerationCompleted, "inference", "days")
ACTIONS = Topic("actions", events.ActionRequested, "agent", "days")
OBSERVATIONS = Topic("observations", events.ObservationRecorded, "env", "days")
TRAJECTORIES = Topic("trajectories", events.TrajectoryRecorded, "agent", "long")
OUTCOMES = Topic("outcomes", events.EpisodeEnded, "agent", "long")
RESULTS = Topic("results", events.TaskEnded, "agent", "long")
GROUPS = Topic(
    "groups",
    events.GroupClosed,
    "assemble-groups",
    "long",
    single=True,
    per_policy=True,
)
BATCHES = Topic(
    "batches",
    events.BatchAssembled,
    "assemble-batches, fenced",
    "long",
    single=True,
    per_policy=True,
)
POLICIES = Topic("policies", events.PolicyPublished, "trainer, fenced", "long", single=True)
INSTANCES = Topic("instances", events.InstanceStateEntered, "env", "days", single=True)
DEAD_LETTERS: Topic[Event] = Topic("dead-letters", None, "any consumer", "long", single=True)

TOPICS: tuple[Topic[Event], ...] = (
    RUNS,
    TASKS,
    CANCELLATIONS,
    EPISODES,
    PROMPTS,
    GENERATIONS,
    ACTIONS,
    OBSERVATIONS,
    TRAJECTORIES,
    OUTCOMES,
    RESULTS,
    GROUPS,
    BATCHES,
    POLICIES,
    INSTANCES,
    DEAD_LETTERS,
)  # type: ignore[assignment]


def topic_of(name: str) -> Topic[Event]:
    """The row of the table that a name on the broker belongs to, whatever its namespace.

    KeyError where it is no name of ours.
    """
    parts = name.split(".")
    for topic in TOPICS:
        if parts[1:2] == [topic.name] and parts[-1] == "v1" and len(parts) == 3 + topic.per_policy:
            return topic
    raise KeyError(name)


@dataclass(frozen=True)
class PlacedTopic:
    """A topic of one namespace, as the broker has it."""

    topic: Topic[Event]
    name: str
    partitions: int
    policy: str | None = None

    @property
    def subject(self) -> str:
        """The registry subject of its values."""
        return f"{self.name}-value"

    def all_partitions(self) -> list[Partition]:
        """Every partition of the topic."""
        return [Partition(self.name, number) for number in range(self.partitions)]


class Topics:
    """All topics of one namespace."""

    def __init__(self, namespace: str, policies: Sequence[str], partitions: int) -> None:
        for name in (namespace, *policies):
            if not NAME.match(name):
                raise ValueError(f"{name!r} is no name: lower-case letters, digits, - and _")
        self.namespace = namespace
        self.policies = tuple(policies)
        self.partitions = partitions
        self._placed = {placed.name: placed for placed in self._place()}

    def _place(self) -> Iterator[PlacedTopic]:
        for topic in TOPICS:
            count = 1 if topic.single else self.partitions
            for policy in self.policies if topic.per_policy else (None,):
                yield PlacedTopic(topic, topic.real_name(self.namespace, policy), count, policy)

    def __iter__(self) -> Iterator[PlacedTopic]:
        return iter(self._placed.values())

    def name(self, topic: Topic[E], policy: str | None = None) -> str:
        """The topic's name on the broker."""
        return topic.real_name(self.namespace, policy)

    def partition(self, topic: Topic[Any], policy: str | None = None, number: int = 0) -> Partition:
        """One partition of a topic. `policy` as for `name`."""
        return Partition(self.name(topic, policy), number)

    def partitions_of(self, topic: Topic[Any], policy: str | None = None) -> list[Partition]:
        """Every partition of a topic. If each policy has its own topic and `policy` is None, those
        of all policies."""
        return [
            partition
            for one in self
            if one.topic.name == topic.name and policy in (None, one.policy)
            for partition in one.all_partitions()
        ]

    def by_name(self, name: str) -> PlacedTopic:
        """The topic that the broker calls `name`. KeyError for a foreign one."""
        return self._placed[name]

    def route(self, event: Event) -> PlacedTopic:
        """The topic that an event belongs to."""
        for topic in TOPICS:
            if topic.event is type(event):
                policy = str(event.policy) if topic.per_policy else None  # type: ignore[attr-defined]
                return self._placed[topic.real_name(self.namespace, policy)]
        raise KeyError(f"no topic carries {type(event).__name__}")
