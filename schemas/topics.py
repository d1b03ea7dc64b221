"""Every topic: its event, partitions, only writer and retention. No other module names a topic.

On the broker a topic is called `<namespace>.<topic>.v1`. If each policy has a topic of its own, it
is called `<namespace>.<topic>.<policy>.v1`. One run is one namespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from headrace.schemas import events
from headrace.schemas.events import Event
from headrace.schemas.untrusted.trusted_keys import TrustedKeys

E = TypeVar("E", bound=Event)

Kept = Literal["forever", "long", "history", "days", "hour"]
"""`history` is for people and costs: no service needs its records."""
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
RETENTION_MS: dict[Kept, int] = {
    "forever": -1,
    "long": 90 * DAY_MS,
    "history": 90 * DAY_MS,
    "days": 7 * DAY_MS,
    "hour": HOUR_MS,
}
MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Maximum size of a record's value in bytes. Larger things belong into the blob store."""
POOL_PARTITIONS = 16
"""Default number of partitions of the topics of pools."""
MOST_POSITIONS = 630
"""So many positions of up to 2**40 fit into what a broker accepts beside a committed offset."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}\Z")
"""The names that a namespace or a policy may have."""


class Partition(NamedTuple):
    """A partition of a topic on the broker."""

    topic: str
    number: int


@dataclass(frozen=True)
class Topic(Generic[E]):
    """A topic. `event` is None for `dead-letters`, which holds any bytes."""

    name: str
    event: type[E] | None
    writer: str
    kept: Kept
    single: bool = False
    """Whether it has one partition, which orders all its records. Otherwise it has as many as the
    namespace."""
    pool: bool = False
    """Whether its writers choose the partition by the load of the partitions' owners. Such a topic
    has many partitions: at most so many workers share its records."""
    per_policy: bool = False
    """Whether each policy has a topic of its own."""
    compacted: bool = False
    """Whether the broker may delete all but the newest record of each key."""
    gathered: bool = False
    """Whether its records wait a few milliseconds for others, so that fewer requests carry them. No
    turn of an episode waits for such a record."""

    def real_name(self, namespace: str, policy: str | None = None) -> str:
        """Returns the name on the broker.

        Raises ValueError unless `policy` is given exactly if each policy has its own topic.
        """
        if (policy is not None) != self.per_policy:
            rule = "needs the name of a policy" if self.per_policy else "has no topic for a policy"
            raise ValueError(f"topic {self.name} {rule}")
        middle = f"{self.name}.{policy}" if policy is not None else self.name
        return f"{namespace}.{middle}.v1"


RUNS = Topic("runs", events.RunStateEntered, "operator", "forever", single=True)
TASKS = Topic("tasks", events.TaskSubmitted, "any team", "long", single=True)
CANCELLATIONS = Topic("cancellations", events.TaskCancelled, "any team", "long", single=True)
QUOTAS = Topic("quotas", events.QuotaSet, "operator", "forever", single=True, compacted=True)
WAITING = Topic(
    "waiting",
    events.WaitingRecorded,
    "scheduler, fenced",
    "forever",
    single=True,
    compacted=True,
)
LIMITS = Topic("limits", events.LimitSet, "operator", "forever", single=True, compacted=True)
AUDIT = Topic("audit", events.OperationRecorded, "operator", "forever", single=True)
EPISODES = Topic("episodes", events.EpisodeStarted, "scheduler, fenced", "days")
PROMPTS = Topic(
    "prompts",
    events.GenerationRequested,
    "agent, inference",
    "days",
    pool=True,
    per_policy=True,
)
GENERATIONS = Topic("generations", events.GenerationCompleted, "inference", "days")
ACTIONS = Topic("actions", events.ActionRequested, "agent", "days", pool=True)
OBSERVATIONS = Topic("observations", events.ObservationRecorded, "env", "days")
TRAJECTORIES = Topic("trajectories", events.TrajectoryRecorded, "agent", "long", gathered=True)
OUTCOMES = Topic("outcomes", events.EpisodeEnded, "agent", "long", gathered=True)
RESULTS = Topic("results", events.TaskEnded, "agent", "long", gathered=True)
TURNS = Topic("turns", events.TurnProjected, "project-turns", "long", gathered=True)
GROUPS = Topic(
    "groups",
    events.GroupClosed,
    "assemble-groups",
    "long",
    single=True,
    per_policy=True,
    gathered=True,
)
ITEMS = Topic(
    "items",
    events.ItemMeasured,
    "item-statistics, fenced",
    "forever",
    single=True,
    per_policy=True,
    compacted=True,
)
BATCHES = Topic(
    "batches",
    events.BatchAssembled,
    "assemble-batches, fenced",
    "long",
    single=True,
    per_policy=True,
)
OFFSETS_OF_A_BATCH = 2
"""Each batch is a transaction, whose end takes an offset, too."""
POLICIES = Topic("policies", events.PolicyPublished, "trainer, fenced", "long", single=True)
INSTANCES = Topic("instances", events.InstanceStateEntered, "every service", "history", single=True)
LOADS = Topic("loads", events.LoadReported, "inference, env", "hour", single=True)
SHARES = Topic(
    "shares", events.LimitShared, "scheduler, fenced", "forever", single=True, compacted=True
)
DEAD_LETTERS: Topic[Event] = Topic("dead-letters", None, "any consumer", "long", single=True)

TOPICS: tuple[Topic[Event], ...] = (
    RUNS,
    TASKS,
    CANCELLATIONS,
    QUOTAS,
    WAITING,
    LIMITS,
    AUDIT,
    EPISODES,
    PROMPTS,
    GENERATIONS,
    ACTIONS,
    OBSERVATIONS,
    TRAJECTORIES,
    OUTCOMES,
    RESULTS,
    TURNS,
    GROUPS,
    ITEMS,
    BATCHES,
    POLICIES,
    INSTANCES,
    LOADS,
    SHARES,
    DEAD_LETTERS,
)  # type: ignore[assignment]
_OF_EVENT = {topic.event: topic for topic in TOPICS}


@lru_cache(maxsize=4_096)
def topic_of(name: str) -> Topic[Event]:
    """Returns the topic that has this name on the broker, in any namespace.

    Raises KeyError if the name is not one of Headrace's.
    """
    parts = name.split(".")
    for topic in TOPICS:
        if parts[1:2] == [topic.name] and parts[-1] == "v1" and len(parts) == 3 + topic.per_policy:
            return topic
    raise KeyError(name)


@dataclass(frozen=True)
class NamespaceTopic:
    """A topic of one namespace. `name` is its name on the broker."""

    topic: Topic[Event]
    name: str
    partitions: int
    policy: str | None = None

    @property
    def subject(self) -> str:
        """The subject in the schema registry of the topic's values."""
        return f"{self.name}-value"

    def all_partitions(self) -> list[Partition]:
        """Returns every partition of the topic."""
        return [Partition(self.name, number) for number in range(self.partitions)]


class Topics:
    """All topics of one namespace, and the other namespaces that its readers may read."""

    def __init__(
        self,
        namespace: str,
        policies: Sequence[str],
        partitions: int,
        reads_from: Sequence[str] = (),
        pool_partitions: int = POOL_PARTITIONS,
        signers: Mapping[str, Sequence[str]] | None = None,
        trusted: TrustedKeys | None = None,
    ) -> None:
        """`reads_from` are the other namespaces into which references may lead.

        `signers` are the public keys of each policy whose versions must be signed, and `trusted`
        those that may act for tenants.
        `pool_partitions` is the number of partitions of the topics of pools. Raises ValueError if a
        name is not allowed.
        """
        for name in (namespace, *policies, *reads_from):
            if not NAME.match(name):
                raise ValueError(
                    f"{name!r} can't be a name: use lower-case letters, digits, - and _, at most 63"
                )
        self.namespace = namespace
        self.policies = tuple(policies)
        self.partitions = partitions
        self.pool_partitions = pool_partitions
        self.reads_from = frozenset(reads_from)
        self.signers = {name: tuple(keys) for name, keys in (signers or {}).items() if keys}
        self.trusted = trusted or TrustedKeys()
        self._topics = {topic.name: topic for topic in self._named()}

    def _named(self) -> Iterator[NamespaceTopic]:
        for topic in TOPICS:
            count = 1 if topic.single else self.partitions
            if topic.pool:
                count = self.pool_partitions if topic.per_policy else self.action_partitions
            for policy in self.policies if topic.per_policy else (None,):
                yield NamespaceTopic(topic, topic.real_name(self.namespace, policy), count, policy)

    @property
    def action_partitions(self) -> int:
        """The number of partitions of `actions`. Another team's env worker may answer an action in
        the partition of `observations` that has the same number, so it has at least as many."""
        return max(self.pool_partitions, self.partitions)

    def __iter__(self) -> Iterator[NamespaceTopic]:
        return iter(self._topics.values())

    def name(self, topic: Topic[E], policy: str | None = None) -> str:
        """Returns the topic's name on the broker. `policy` as for `Topic.real_name`."""
        return topic.real_name(self.namespace, policy)

    def partition(self, topic: Topic[Any], policy: str | None = None, number: int = 0) -> Partition:
        """Returns one partition of a topic. `policy` as for `Topic.real_name`."""
        return Partition(self.name(topic, policy), number)

    def partitions_of(self, topic: Topic[Any], policy: str | None = None) -> list[Partition]:
        """Returns every partition of a topic. If each policy has its own topic and `policy` is
        None, it returns those of all policies."""
        return [
            partition
            for one in self
            if one.topic.name == topic.name and policy in (None, one.policy)
            for partition in one.all_partitions()
        ]

    def by_name(self, name: str) -> NamespaceTopic:
        """Returns the topic with this name on the broker.

        Raises KeyError if the namespace has no such topic.
        """
        return self._topics[name]

    def route(self, event: Event) -> NamespaceTopic:
        """Returns the topic that an event belongs to. Raises KeyError if there is none."""
        topic = _OF_EVENT.get(type(event))
        if topic is None:
            raise KeyError(f"no topic carries {type(event).__name__}")
        policy = str(event.policy) if topic.per_policy else None  # type: ignore[attr-defined]
        return self._topics[topic.real_name(self.namespace, policy)]
