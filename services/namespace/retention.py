"""What each topic must keep, and for how long; and where a broker's settings fall short of it.

Pure: settings are as the broker has them, in Kafka's names and units.

- `runs` is kept for ever: it says what the namespace is.
- What asks and answers must outlive the episode it belongs to, and an outage in which nobody read
  it: a worker that comes back goes on where its commit stands.
- What training rests on must also outlive the way back to the trainer's newest checkpoint.
- Trajectories must outlive the batches that refer to them.
- Nothing may be compacted: records of one key are different facts. Nothing may be cut by size: that
  happens whenever there is much, whoever still needs it.
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

OUTAGE_MS = 86_400_000
"""Services may be down for a day, and still find what they had not done."""
RETRAIN_MS = 7 * 86_400_000
"""A trainer may go back a week: to its newest checkpoint, after its disk was restored."""
FOREVER = -1
POLICY, AGE, SIZE = "cleanup.policy", "retention.ms", "retention.bytes"
STOCK = {POLICY: "delete", AGE: str(7 * 86_400_000), SIZE: "-1"}
"""Kafka's defaults, where a broker says nothing."""

Settings = Mapping[str, Mapping[str, str]]
"""Topic to its settings by name."""


@dataclass(frozen=True, slots=True)
class Shortcoming:
    """A setting by which a topic would lose what is still needed."""

    topic: str
    setting: str
    has: str
    needs: str
    """The value that mends it."""
    why: str

    def __str__(self) -> str:
        at_least = "at least " if self.setting == AGE and self.needs != str(FOREVER) else ""
        return (
            f"{self.topic}: {self.setting} is {_spell(self.setting, self.has)}, and must be "
            f"{at_least}{_spell(self.setting, self.needs)}: {self.why}"
        )


def needed_ms(kept: Kept, recipe: Recipe) -> int:
    """How long a topic must keep its records; FOREVER is -1."""
    if kept == "forever":
        return FOREVER
    episode = recipe.tasks.deadline_s * 1000 + OUTAGE_MS
    return episode if kept == "days" else episode + RETRAIN_MS


def check_recipe(recipe: Recipe) -> None:
    """UsageError where a recipe's episodes may take longer than new topics keep their events."""
    for kept, has in RETENTION_MS.items():
        needs = needed_ms(kept, recipe)
        if FOREVER not in (has, needs) and needs > has:
            raise UsageError(
                f"tasks.deadline_s is {recipe.tasks.deadline_s}: with a day for outages, events "
                f"must be kept for {_days(needs)}, and the topics of class {kept!r} keep them for "
                f"{_days(has)}. Give episodes less time"
            )


def shortcomings(topics: Topics, recipe: Recipe, settings: Settings) -> list[Shortcoming]:
    """Where existing topics would lose what is needed. Those not in `settings` do not exist."""
    found = []
    for placed in topics:
        if placed.name in settings:
            found += _of_topic(
                placed,
                {**STOCK, **settings[placed.name]},
                max(_needs(placed, topics, recipe, settings), key=lambda need: _order(need[0])),
            )
    return found


def require_kept(topics: Topics, recipe: Recipe, settings: Settings) -> None:
    """UsageError names each shortcoming, and the commands that mend it."""
    found = shortcomings(topics, recipe, settings)
    if found:
        raise UsageError(
            f"the topics of {topics.namespace} would lose what is still needed:\n"
            + "\n".join(f"  {one}" for one in found)
            + "\nMend them so:\n"
            + "\n".join(f"  {command}" for command in repairing(found))
        )


def repairing(found: Sequence[Shortcoming]) -> list[str]:
    """One command a topic."""
    by_topic: dict[str, list[str]] = {}
    for one in found:
        by_topic.setdefault(one.topic, []).append(f"{one.setting}={one.needs}")
    return [
        "kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics "
        f"--entity-name {topic} --add-config {','.join(settings)}"
        for topic, settings in by_topic.items()
    ]


def _needs(
    placed: NamespaceTopic, topics: Topics, recipe: Recipe, settings: Settings
) -> Iterator[tuple[int, str]]:
    """How long a topic must keep its records, for each reason."""
    yield (
        needed_ms(placed.topic.kept, recipe),
        {
            "forever": "it says what the namespace is",
            "days": f"an episode takes up to {recipe.tasks.deadline_s} s, an outage up to a day",
            "long": "a trainer may go back a week, and an outage takes up to a day",
        }[placed.topic.kept],
    )
    if placed.topic.name == TRAJECTORIES.name:
        for batches in (topics.name(BATCHES, policy) for policy in topics.policies):
            if batches in settings:
                age = int(settings[batches].get(AGE, STOCK[AGE]))
                yield max(age, FOREVER), f"{batches} refers to its records for that long"


def _of_topic(
    placed: NamespaceTopic, settings: Mapping[str, str], needs: tuple[int, str]
) -> list[Shortcoming]:
    found = []
    if settings[POLICY] != "delete":
        why = "records of one key are different facts, and compaction keeps only the last"
        found.append(Shortcoming(placed.name, POLICY, settings[POLICY], "delete", why))
    if int(settings[SIZE]) != FOREVER:
        why = "a limit by size cuts whatever is oldest, needed or not"
        found.append(Shortcoming(placed.name, SIZE, settings[SIZE], str(FOREVER), why))
    if _order(int(settings[AGE])) < _order(needs[0]):
        found.append(Shortcoming(placed.name, AGE, settings[AGE], str(needs[0]), needs[1]))
    return found


def _order(ms: int) -> float:
    """A retention as what can be compared: a negative one never ends."""
    return inf if ms < 0 else ms


def _spell(setting: str, value: str) -> str:
    if setting != AGE:
        return value
    return "-1 (for ever)" if int(value) < 0 else f"{value} ({_days(int(value))})"


def _days(ms: int) -> str:
    return f"{ms / 86_400_000:.3g} days"
