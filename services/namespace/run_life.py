"""The life of a run, from the topic `runs`: started, ending, ended."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import UsageError
from headrace.schemas.events import RunStateEntered
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import NAME, RUNS
from headrace.schemas.untrusted.trusted_keys import TrustedKeys, texts_in
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, Start, follow_events, follow_records
from headrace.services.log.signatures import signers_of

REPLAY_OF = "replay of "
"""The start of a replay's namespace gives this as its reason, followed by the recorded one."""


@dataclass
class RunLife:
    """The states that a run has entered. The first record of each state counts."""

    started: RunStateEntered | None = None
    started_at: float = 0.0
    """Seconds since the epoch, by the broker's clock."""
    ending: RunStateEntered | None = None
    ended: RunStateEntered | None = None

    @property
    def state(self) -> str:
        """`absent`, `started`, `ending` or `ended`."""
        newest = self.ended or self.ending or self.started
        return "absent" if newest is None else newest.state

    @property
    def tree(self) -> dict[str, Any]:
        """The run's recipe as its record has it. Other teams' recipes may be anything.

        It is empty if the record holds no table.
        """
        try:
            found = json.loads(self.started.recipe) if self.started is not None else {}
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def reads_from(self) -> tuple[str, ...]:
        """The other namespaces into which references may lead, by the run's recipe."""
        return tuple(name for name in texts_in(self.tree.get("reads_from")) if NAME.match(name))

    @property
    def signers(self) -> dict[str, tuple[str, ...]]:
        """The keys that must sign each policy's versions, by the run's recipe."""
        return signers_of(self.tree)

    @property
    def trusted(self) -> TrustedKeys:
        """The keys that may act for tenants, by the run's recipe."""
        return TrustedKeys.of_tree(self.tree)

    @property
    def replay_of(self) -> str | None:
        """The namespace of the run that this run replays, or None if it is not a replay."""
        reason = "" if self.started is None else self.started.reason
        return reason.removeprefix(REPLAY_OF) if reason.startswith(REPLAY_OF) else None

    def on_event(self, event: RunStateEntered, at: float) -> None:
        """Adds a record that was written at `at`, in seconds since the epoch."""
        if event.state == "started" and self.started is None:
            self.started, self.started_at = event, at
        elif event.state == "ending":
            self.ending = self.ending or event
        elif event.state == "ended":
            self.ended = self.ended or event

    def require_open(self, namespace: str) -> None:
        """Raises UsageError if the run has ended, because no task can start in it any more."""
        if self.ended is not None:
            raise UsageError(
                f"the run {namespace!r} has ended ({self.ended.reason}), so no task can start in "
                "it. Start a new run, or name another namespace"
            )

    def recipe(self) -> Recipe:
        """Returns the run's recipe. Raises UsageError if the run has not started."""
        if self.started is None:
            raise UsageError("the run has not started. `headrace apply RECIPE` starts it")
        return parse_recipe(json.loads(self.started.recipe), "the run's recipe")


async def follow_life(log: EventLog) -> AsyncGenerator[RunLife, None]:
    """Yields the run's life once all existing records are read, and again after every change."""
    life, caught_up = RunLife(), False
    async with aclosing(follow_events(log, {log.topics.partition(RUNS): "first"})) as items:
        async for item in items:
            if isinstance(item, CaughtUp):
                caught_up = True
            elif isinstance(item.event, RunStateEntered):
                life.on_event(item.event, item.recorded_at)
            if caught_up:
                yield life


async def read_life(log: EventLog) -> RunLife:
    """Reads the run's life. The topic `runs` must exist."""
    [life] = await read_lives([log])
    return life


async def read_lives(logs: Sequence[EventLog]) -> list[RunLife]:
    """Reads the lives of different runs of one broker. Their topics `runs` must exist.

    All are read by one reader: a reader for each, one after the other, took seconds for 100 runs.
    """
    found = {log.topics.partition(RUNS): (log, RunLife()) for log in logs}
    if not found:
        return []
    starts: dict[Partition, Start] = dict.fromkeys(found, "first")
    async with aclosing(follow_records(logs[0], starts)) as records:
        async for record in records:
            if isinstance(record, CaughtUp):
                break
            log, life = found[record.partition]
            delivery = await log.decode_or_dead_letter(record)
            if delivery is not None and isinstance(delivery.event, RunStateEntered):
                life.on_event(delivery.event, delivery.recorded_at)
    return [life for _, life in found.values()]


async def enter(
    log: EventLog, state: Literal["ending", "ended"], recipe: Recipe, reason: str = ""
) -> None:
    """Writes that the run has entered `ending` or `ended`."""
    namespace, digest = log.topics.namespace, recipe.digest
    await log.send(RunStateEntered(namespace=namespace, state=state, digest=digest, reason=reason))


def differing_keys(ours: Recipe, theirs: Mapping[str, Any]) -> list[str]:
    """Returns the keys that differ between two recipes, each as `key: theirs -> ours`."""
    mine, others = flatten(ours.model_dump(mode="json")), flatten(theirs)
    return [
        f"{key}: {others.get(key, 'absent')!r} -> {mine.get(key, 'absent')!r}"
        for key in sorted(mine.keys() | others.keys())
        if mine.get(key, "absent") != others.get(key, "absent")
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested tables as one table with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat
