"""How long each topic must keep its records, and which settings of a broker are too short.

Settings have Kafka's names and units. Nothing here connects to a broker.

- `runs` is kept for ever, because it says what the namespace is.
- Requests and answers must be kept for as long as an episode plus an outage, because a worker goes
  on at its committed offset after an outage.
- Events that training needs must also be kept while a trainer may go back to its checkpoint.
- Trajectories must be kept for as long as the batches that refer to them.
- Of the reports in `loads` only the newest ones count. No service needs `instances`: it is kept as
  long as a run may last, so that `headrace cost` finds every worker.
- Only `items`, `quotas`, `waiting`, `limits` and `shares` are compacted: their newest record of a
  key replaces the older ones. In all other topics records with the same key are different facts. No
  topic may have a limit by size, because such a limit deletes records that are still needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    BATCHES,
    RETENTION_MS,
    TRAJECTORIES,
    Kept,
    NamespaceTopic,
    Topics,
)

MINUTE_MS = 60_000
OUTAGE_MS = 86_400_000
"""The longest outage: services that were down for a day can still go on."""
RETRAIN_MS = 7 * 86_400_000
"""How far a trainer may go back: its newest checkpoint may be a week old, from a backup."""
FOREVER = -1
POLICY, AGE, SIZE = "cleanup.policy", "retention.ms", "retention.bytes"
STOCK = {POLICY: "delete", AGE: str(7 * 86_400_000), SIZE: "-1"}
"""Kafka's defaults, for settings that a broker does not report."""

Settings = Mapping[str, Mapping[str, str]]
"""Name of a topic to its settings by name."""


@dataclass(frozen=True, slots=True)
class Shortcoming:
    """A setting with which a topic would lose records that are still needed."""

    topic: str
    setting: str
    has: str
    needs: str
    """The value that repairs it."""
    why: str

    def __str__(self) -> str:
        at_least = "at least " if self.setting == AGE and self.needs != str(FOREVER) else ""
        return (
            f"{self.topic}: {self.setting} is {_spell(self.setting, self.has)}, and must be "
            f"{at_least}{_spell(self.setting, self.needs)}, because {self.why}"
        )


def needed_ms(kept: Kept, recipe: Recipe) -> int:
    """Returns how many milliseconds a topic must keep its records, or FOREVER."""
    if kept == "forever":
        return FOREVER
    if kept in ("hour", "history"):
        return MINUTE_MS
    episode = recipe.tasks.deadline_s * 1000 + OUTAGE_MS
    return episode if kept == "days" else episode + RETRAIN_MS


def check_recipe(recipe: Recipe) -> None:
    """Raises UsageError if episodes may take longer than new topics keep their events."""
    for kept, has in RETENTION_MS.items():
        needs = needed_ms(kept, recipe)
        if FOREVER not in (has, needs) and needs > has:
            raise UsageError(
                f"tasks.deadline_s is {recipe.tasks.deadline_s}. With a day for outages, events "
                f"must be kept for {_days(needs)}, but topics that are kept {kept!r} keep them for "
                f"{_days(has)}. Reduce tasks.deadline_s"
            )


def shortcomings(topics: Topics, recipe: Recipe, settings: Settings) -> list[Shortcoming]:
    """Returns the settings with which existing topics would lose needed records.

    Topics that `settings` lacks do not exist.
    """
    found = []
    for topic in topics:
        if topic.name in settings:
            found += _of_topic(
                topic,
                {**STOCK, **settings[topic.name]},
                max(_needs(topic, topics, recipe, settings), key=lambda need: _order(need[0])),
            )
    return found


def require_kept(topics: Topics, recipe: Recipe, settings: Settings) -> None:
    """Raises UsageError if topics would lose needed records, with commands that repair them."""
    found = shortcomings(topics, recipe, settings)
    if found:
        raise UsageError(
            f"the topics of {topics.namespace} would lose records that are still needed:\n"
            + "\n".join(f"  {one}" for one in found)
            + "\nThese commands repair them:\n"
            + "\n".join(f"  {command}" for command in repairing(found))
        )


def repairing(found: Sequence[Shortcoming]) -> list[str]:
    """Returns one command for each topic."""
    by_topic: dict[str, list[str]] = {}
    for one in found:
        by_topic.setdefault(one.topic, []).append(f"{one.setting}={one.needs}")
    return [
        "kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics "
        f"--entity-name {topic} --add-config {','.join(settings)}"
        for topic, settings in by_topic.items()
    ]


def _needs(
    topic: NamespaceTopic, topics: Topics, recipe: Recipe, settings: Settings
) -> Iterator[tuple[int, str]]:
    """Yields how many milliseconds a topic must keep its records, for each reason."""
    yield (
        needed_ms(topic.topic.kept, recipe),
        {
            "forever": "it can't be made again from other topics",
            "days": f"an episode takes up to {recipe.tasks.deadline_s} s, an outage up to a day",
            "history": "what is recorded now is shown to people",
            "hour": "only the reports of the last minute count",
            "long": "a trainer may go back a week, and an outage takes up to a day",
        }[topic.topic.kept],
    )
    if topic.topic.name == TRAJECTORIES.name:
        for batches in (topics.name(BATCHES, policy) for policy in topics.policies):
            if batches in settings:
                age = int(settings[batches].get(AGE, STOCK[AGE]))
                yield max(age, FOREVER), f"{batches} refers to its records for that long"


def _of_topic(
    topic: NamespaceTopic, settings: Mapping[str, str], needs: tuple[int, str]
) -> list[Shortcoming]:
    found = []
    needed = "compact" if topic.topic.compacted else "delete"
    if settings[POLICY] != needed:
        why = "records of one key are different facts, and compaction keeps only the last"
        if topic.topic.compacted:
            why = "only the newest record of a key counts, and none of these may be deleted"
        found.append(Shortcoming(topic.name, POLICY, settings[POLICY], needed, why))
    if int(settings[SIZE]) != FOREVER:
        why = "a limit by size deletes the oldest records even if they are needed"
        found.append(Shortcoming(topic.name, SIZE, settings[SIZE], str(FOREVER), why))
    if _order(int(settings[AGE])) < _order(needs[0]):
        found.append(Shortcoming(topic.name, AGE, settings[AGE], str(needs[0]), needs[1]))
    return found


def _order(ms: int) -> float:
    """Returns a retention that can be compared. A negative one never ends."""
    return inf if ms < 0 else ms


def _spell(setting: str, value: str) -> str:
    if setting != AGE:
        return value
    return "-1 (for ever)" if int(value) < 0 else f"{value} ({_days(int(value))})"


def _days(ms: int) -> str:
    return f"{ms / 86_400_000:.3g} days"
