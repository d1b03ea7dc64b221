"""Reads a recorded run from its log. A replay never writes to the recorded namespace."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from headrace.errors import UsageError
from headrace.schemas.events import Event, TaskEnded
from headrace.schemas.recipe.read_recipe import change_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import RecipeError
from headrace.schemas.topics import RESULTS, Topic
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.kept_records import KeptRecords
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import Connection, connect, locate
from headrace.services.namespace.lookup import find_namespace, run_names, topics_of
from headrace.services.namespace.run_life import REPLAY_OF, differing_keys
from headrace.services.operate.options import say
from headrace.services.operate.run_references import adopt, fetch_models

IGNORED = ("name", "description", "stop", "workers")
"""Sections of a recipe that affect neither what was recorded nor a replay."""
SHOWN_KEYS = 12
"""Most keys that an error lists."""
SKEW_S = 60.0
"""The clocks of two writers may differ by this many seconds."""
FETCHED = 256
"""Most records that are in memory at once."""

Progress = Callable[[str, int, int], None]
"""Receives what is being done, how much of it is done, and how much there is in all."""
T = TypeVar("T")
E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class TaskRange:
    """A range of task numbers, including both ends. `last` None means up to the last task."""

    first: int = 0
    last: int | None = None

    def __contains__(self, task: int) -> bool:
        return self.first <= task and (self.last is None or task <= self.last)

    def __str__(self) -> str:
        return f"{self.first} to {'the last' if self.last is None else self.last}"


@dataclass(frozen=True)
class Recording:
    """A run to replay."""

    cluster: ClusterConfig
    connection: Connection
    log: EventLog
    """The log of the run's namespace. It is read-only."""
    recipe: Recipe
    progress: Progress

    @property
    def namespace(self) -> str:
        """The namespace of the recorded run."""
        return self.log.topics.namespace


def trained_policies(recipe: Recipe, policy: str | None) -> list[str]:
    """Returns the policies that the recipe trains, or only `policy` if it is given.

    Raises UsageError if the recipe trains no policy, or not this one.
    """
    names = [name for name, one in recipe.policies.items() if one.training is not None]
    if not names:
        raise UsageError("the recipe trains no policy, so there is nothing to train again")
    if policy not in (None, *names):
        raise UsageError(
            f"the recipe trains no policy {policy!r}: name one with --policy, of {', '.join(names)}"
        )
    return names if policy is None else [policy]


def sole_policy(namespace: str, recipe: Recipe, policy: str | None) -> str:
    """Returns `policy`, or the only policy that the recipe of a run trains.

    Raises UsageError if there is no such policy, or if it is not clear which one is meant.
    """
    policies = trained_policies(recipe, policy)
    if len(policies) > 1:
        raise UsageError(
            f"{namespace} trained several policies: name one with --policy, of "
            f"{', '.join(policies)}"
        )
    return policies[0]


@asynccontextmanager
async def open_recording(cluster: ClusterConfig, progress: Progress) -> AsyncIterator[Recording]:
    """Opens the run in the cluster's namespace, or else the newest run that is not a replay."""
    cluster = locate(cluster)
    async with connect(cluster, "replay") as connection:
        topics, life = await find_namespace(connection, cluster.namespace)
        recipe = life.recipe()
        await asyncio.to_thread(fetch_models, recipe, cluster, say)
        yield Recording(cluster, connection, connection.log(topics), recipe, progress)


def change_recorded(
    recorded: Recipe, path: str | None, settings: Sequence[str], changeable: Sequence[str]
) -> Recipe:
    """Returns the recorded recipe with `settings`, or the recipe at `path` with them.

    `changeable` are patterns of keys. Raises UsageError if another key differs: it describes what
    was recorded, so that changing it would have no effect.
    """
    try:
        recipe = change_recipe(recorded, settings) if path is None else read_recipe(path, settings)
        recipe = adopt(recipe, recorded)
    except RecipeError as error:
        raise UsageError(str(error)) from error
    patterns = [re.compile(f"{one}(\\..*)?".replace("*.", "[^.]+\\.")) for one in changeable]
    wrong = [
        line
        for line in differing_keys(recipe, recorded.model_dump(mode="json"))
        if (key := line.partition(":")[0]).partition(".")[0] not in IGNORED
        and not any(pattern.fullmatch(key) for pattern in patterns)
    ]
    if wrong:
        more = len(wrong) - SHOWN_KEYS
        lines = wrong[:SHOWN_KEYS] + ([f"… and {more} more"] if more > 0 else [])
        raise UsageError(
            f"this replay can change only {', '.join(changeable)}. Everything else is recorded. "
            "Remove these changes (recorded -> yours):" + "".join(f"\n  {line}" for line in lines)
        )
    return recipe


def reading_recorded(recording: Recording, recipe: Recipe) -> Recipe:
    """Returns a replay's recipe: its batches refer to the trajectories of the recorded run.

    Nobody serves the versions of a replay, so they are not signed.
    """
    sources = {recording.namespace, *recording.log.topics.reads_from, *recipe.reads_from}
    policies = {
        name: policy.model_copy(update={"signers": ()}) for name, policy in recipe.policies.items()
    }
    changes = {"reads_from": tuple(sorted(sources)), "policies": policies}
    return recipe.model_copy(update=changes)


async def make_fresh(recording: Recording, into: str | None, recipe: Recipe) -> EventLog:
    """Makes the new namespace of a replay, by default `<namespace>-replay`, `-replay-2`, ….

    `recipe` is from `reading_recorded`. Raises UsageError if `into` exists already.
    """
    topics = await recording.connection.broker.list_topics()
    existing = {name.partition(".")[0] for name in topics}
    if into in existing:
        raise UsageError(
            f"--into {into}: this namespace exists already, and a replay needs a new one, so that "
            "it changes nothing that is recorded. Give another name, or leave --into out"
        )
    names = run_names(f"{recording.namespace}-replay")
    name = into or next(name for name in names if name not in existing)
    replace(recording.cluster, namespace=name)  # This checks the name.
    log = await recording.connection.writing_log(topics_of(recipe, name))
    await apply(log, recipe, f"{REPLAY_OF}{recording.namespace}")
    say(f"into namespace {name}")
    return log


@dataclass(frozen=True)
class Results:
    """The locations of all TaskEnded of a run. If a task has several, the first one counts."""

    log: EventLog
    locations: dict[int, tuple[float, int, int]]
    """By task: the time of the record in epoch seconds, its partition, its offset."""
    incomplete: list[int]
    """The tasks that have lost a trajectory to retention, ascending."""

    async def fetch(self, tasks: Sequence[int]) -> list[Delivery[TaskEnded]]:
        """Fetches the results of at most FETCHED tasks."""
        name = self.log.topics.name(RESULTS)
        found = [self.locations[task] for task in tasks]
        records = await self.log.broker.fetch(
            [Position(Partition(name, number), offset) for _, number, offset in found]
        )
        return [cast("Delivery[TaskEnded]", await self.log.decode(record)) for record in records]


async def read_results(log: EventLog) -> Results:
    """Reads the locations of all results, and which tasks have lost a trajectory."""
    kept, results = KeptRecords(log.broker), Results(log, {}, [])
    async with aclosing(read_topic(log, RESULTS)) as deliveries:
        async for delivery in deliveries:
            ended = delivery.event
            if ended.task in results.locations:
                continue
            number = delivery.partition.number
            results.locations[ended.task] = (delivery.recorded_at, number, delivery.offset)
            refs = [one.trajectory for one in ended.outcomes if one.trajectory is not None]
            if await kept.count_missing(refs):
                results.incomplete.append(ended.task)
    results.incomplete.sort()
    return results


def read_topic(
    log: EventLog, topic: Topic[E], policy: str | None = None
) -> AsyncGenerator[Delivery[E]]:
    """Reads all events that a topic holds now."""
    deliveries = read_events(log, dict.fromkeys(log.topics.partitions_of(topic, policy), WHOLE))
    return cast("AsyncGenerator[Delivery[E]]", deliveries)


async def read_between(
    log: EventLog, topic: Topic[E], since: float, until: float | None = None
) -> AsyncGenerator[Delivery[E]]:
    """Reads the events of a topic that were recorded at these times, in epoch seconds, and a few
    before and after. `until` None means up to the last event that the topic holds now."""
    partitions = log.topics.partitions_of(topic)
    starts = await log.broker.offsets_at(partitions, since - SKEW_S)
    ends = {} if until is None else await log.broker.offsets_at(partitions, until + SKEW_S)
    ranges = {one: (starts[one], ends.get(one, WHOLE[1])) for one in partitions}
    async with aclosing(read_events(log, ranges)) as deliveries:
        async for delivery in deliveries:
            yield cast("Delivery[E]", delivery)


def chunks(items: Sequence[T], size: int = FETCHED) -> Iterator[Sequence[T]]:
    """Splits the items into parts of at most `size`."""
    return (items[first : first + size] for first in range(0, len(items), size))
