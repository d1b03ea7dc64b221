"""A recorded run, as its log has it. What a replay reads of it is never written to."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, TypeVar, cast

from headrace.errors import UsageError
from headrace.schemas.events import Event, Ref, TaskEnded
from headrace.schemas.recipe.read_recipe import change_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import RecipeError
from headrace.schemas.topics import RESULTS, Topic, Topics
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import Connection, connect, locate
from headrace.services.namespace.lookup import find_namespace
from headrace.services.namespace.run_life import RunLife, differing_keys

REPLAY_OF = "replay of "
"""How the start of a replay's namespace gives its reason."""
BESIDE = ("name", "description", "stop", "workers")
"""Sections of a recipe that say nothing of what was recorded, and nothing to a replay."""
FETCHED = 256
"""Records that are held at once."""

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much it is in all."""
T = TypeVar("T")


@dataclass(frozen=True)
class Recording:
    """A run to replay, and where it lies."""

    cluster: ClusterConfig
    connection: Connection
    log: EventLog
    """Of the run's namespace. It can't write."""
    recipe: Recipe

    @property
    def namespace(self) -> str:
        """Where the run was recorded."""
        return self.log.topics.namespace

    def trained(self, policy: str | None) -> str:
        """The policy asked for, or the only one that was trained. UsageError where it is none."""
        names = [name for name, one in self.recipe.policies.items() if one.training is not None]
        if policy in names:
            return policy
        if policy is None and len(names) == 1:
            return names[0]
        which = "several policies" if policy is None else f"no policy {policy!r}"
        raise UsageError(
            f"{self.namespace} trained {which if names else 'none'}: name one with --policy, of "
            f"{', '.join(names) or '(none)'}"
        )


@asynccontextmanager
async def open_recording(cluster: ClusterConfig) -> AsyncIterator[Recording]:
    """The run of the namespace asked for, or else the last one that is no replay itself."""
    cluster = locate(cluster)
    async with connect(cluster, "replay") as connection:
        topics, life = await find_namespace(connection, cluster.namespace, _is_original)
        yield Recording(cluster, connection, connection.log(topics), life.recipe())


def _is_original(life: RunLife) -> bool:
    return life.started is not None and not life.started.reason.startswith(REPLAY_OF)


def change_recorded(
    recorded: Recipe, path: str | None, settings: Sequence[str], changeable: Sequence[str]
) -> Recipe:
    """The recorded recipe with changes: another file's or shipped one's, or by `settings` alone.

    `changeable` are patterns of keys. UsageError where it would change another one, which is a
    recorded fact and would have no effect.
    """
    try:
        recipe = change_recipe(recorded, settings) if path is None else read_recipe(path, settings)
    except RecipeError as error:
        raise UsageError(str(error)) from error
    patterns = [re.compile(f"{one}(\\..*)?".replace("*.", "[^.]+\\.")) for one in changeable]
    wrong = [
        line
        for line in differing_keys(recipe, recorded.model_dump(mode="json"))
        if (key := line.partition(":")[0]).partition(".")[0] not in BESIDE
        and not any(pattern.fullmatch(key) for pattern in patterns)
    ]
    if wrong:
        more = f"\n  … and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise UsageError(
            f"this replay does {', '.join(changeable)} anew; all else is recorded, and can't be "
            "changed (recorded -> yours):" + "".join(f"\n  {line}" for line in wrong[:12]) + more
        )
    return recipe


async def make_fresh(recording: Recording, into: str | None, recipe: Recipe) -> EventLog:
    """Makes the namespace of a replay, `<namespace>-replay` or so where none is named.

    UsageError where it exists already.
    """
    taken = {name.partition(".")[0] for name in await recording.connection.broker.list_topics()}
    if into in taken:
        raise UsageError(
            f"--into {into}: it exists already, and a replay goes into a fresh namespace, so that "
            "nothing recorded is ever changed. Name another, or none"
        )
    first = f"{recording.namespace}-replay"
    names = chain([first], (f"{first}-{number}" for number in count(2)))
    name = into or next(name for name in names if name not in taken)
    replace(recording.cluster, namespace=name)  # which checks the name
    topics = Topics(name, tuple(recipe.policies), recipe.partitions)
    log = await recording.connection.writing_log(topics)
    await apply(log, recipe, f"{REPLAY_OF}{recording.namespace}")
    return log


@dataclass(frozen=True, slots=True, order=True)
class ResultPlace:
    """Where a task's TaskEnded lies, ordered as they were recorded."""

    recorded_at: float
    partition: int
    offset: int


@dataclass(frozen=True)
class Results:
    """All of a run's TaskEnded, by task; the first of each counts."""

    log: EventLog
    places: dict[int, ResultPlace]
    bare: list[int]
    """Tasks of which a trajectory is no longer kept, ascending."""

    async def fetch(self, tasks: Sequence[int]) -> list[Delivery[TaskEnded]]:
        """The results of these tasks, at most FETCHED of them."""
        name = self.log.topics.name(RESULTS)
        places = [self.places[task] for task in tasks]
        records = await self.log.broker.fetch(
            [Position(Partition(name, place.partition), place.offset) for place in places]
        )
        return [cast("Delivery[TaskEnded]", await self.log.decode(record)) for record in records]


async def read_results(log: EventLog) -> Results:
    """Where the results lie, and which of them have lost a trajectory."""
    kept, places, bare = Kept(log), dict[int, ResultPlace](), list[int]()
    async with aclosing(read_topic(log, RESULTS)) as deliveries:
        async for delivery in deliveries:
            ended = delivery.event
            if not isinstance(ended, TaskEnded) or ended.task in places:
                continue
            places[ended.task] = ResultPlace(
                delivery.recorded_at, delivery.partition.number, delivery.offset
            )
            refs = [one.trajectory for one in ended.outcomes if one.trajectory is not None]
            if await kept.gone(refs):
                bare.append(ended.task)
    return Results(log, places, sorted(bare))


class Kept:
    """Knows what retention has removed: it takes a partition's oldest records."""

    def __init__(self, log: EventLog) -> None:
        self._broker = log.broker
        self._first: dict[Partition, int] = {}

    async def gone(self, refs: Sequence[Ref]) -> int:
        """How many of these records are no longer there."""
        places = [Partition(ref.topic, ref.partition) for ref in refs]
        unknown = list(set(places) - self._first.keys())
        if unknown:
            bounds = await self._broker.ends(unknown)
            self._first.update({place: first for place, (first, _) in bounds.items()})
        return sum(ref.offset < self._first[place] for ref, place in zip(refs, places, strict=True))


def read_topic(
    log: EventLog, topic: Topic[Any], policy: str | None = None
) -> AsyncGenerator[Delivery[Event], None]:
    """All that a topic holds now."""
    return read_events(log, dict.fromkeys(log.topics.partitions_of(topic, policy), WHOLE))


def chunks(items: Sequence[T], size: int = FETCHED) -> Iterator[Sequence[T]]:
    """The items in runs of at most `size`."""
    return (items[first : first + size] for first in range(0, len(items), size))
