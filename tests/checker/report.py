"""Reads a namespace, judges it, and says what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    PolicyPublished,
    TaskEnded,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import Delivery
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from tests.checker import (
    batches,
    choices,
    episodes,
    evaluations,
    groups,
    items,
    limits,
    publications,
    tasks,
    trajectories,
)
from tests.checker.facts import Facts, Violations, read_all

SHOWN = 40
"""Violations that a report shows; the rest is counted."""


@dataclass(frozen=True)
class Report:
    """What a log holds, and what is wrong with it."""

    violations: list[str]
    """Each begins with the invariant that it breaks, as `I3: `."""
    tasks: int
    tasks_ended: int
    episodes: int
    """Started."""
    episodes_ended: int
    batches: dict[str, int]
    """By policy."""
    versions: dict[str, int]
    """Newest published, by policy."""
    trained: int
    """Samples in batches, as fresh."""
    endings: Counter[str]
    """Endings of episodes; with `masked` those whose tokens nothing learns from."""
    dropped: Counter[str]
    """Samples and whole groups that batches decided without training on them, by reason."""
    duplicates: dict[str, int]
    """Records whose id was in their topic before, by event; those without are left out."""
    undecodable: int

    def __str__(self) -> str:
        lines = [
            f"tasks {self.tasks}, ended {self.tasks_ended}; episodes {self.episodes}, ended "
            f"{self.episodes_ended}; batches {self.batches}, versions {self.versions}; samples "
            f"trained {self.trained}, dropped {dict(self.dropped)}; endings "
            f"{dict(self.endings)}; duplicates "
            f"{self.duplicates}; undecodable {self.undecodable}",
            f"{len(self.violations)} violations",
            *self.violations[:SHOWN],
        ]
        if len(self.violations) > SHOWN:
            lines.append(f"… and {len(self.violations) - SHOWN} more")
        return "\n".join(lines)


async def check_namespace(cluster: ClusterConfig, *, drained: bool = True) -> Report:
    """Checks a namespace as it stands on a broker. `drained`: every task must have ended."""
    async with open_namespace(cluster, "checker") as (log, life):
        deliveries, undecodable = await read_all(log)
        return examine(life.recipe(), deliveries, drained=drained, undecodable=undecodable)


def examine(
    recipe: Recipe,
    deliveries: Iterable[Delivery[Event]],
    *,
    drained: bool = True,
    settled: bool = False,
    one_clock: bool = False,
    undecodable: int = 0,
) -> Report:
    """Judges a log. Deliveries of one partition come in offset order.

    `drained`: every task must have ended. `settled`: every group must be closed, and decided by a
    batch that was trained. `one_clock`: all records' times are of one clock that never goes back,
    so that the order between topics can be judged too.
    """
    facts = Facts.of(deliveries)
    newest: dict[str, int] = {}
    for published in facts.events(PolicyPublished):
        newest[published.policy] = max(published.version, newest.get(published.policy, -1))
    assembled = facts.events(BatchAssembled)
    found = violations(facts, recipe, drained=drained, settled=settled, one_clock=one_clock)
    return Report(
        violations=list(found),
        tasks=len(facts.tasks),
        tasks_ended=len(facts.all(TaskEnded)),
        episodes=len(facts.all(EpisodeStarted)),
        episodes_ended=len(facts.all(EpisodeEnded)),
        batches=dict(Counter(batch.policy for batch in assembled)),
        versions=newest,
        trained=sum(sample.use == 0 for batch in assembled for sample in batch.samples),
        endings=Counter(
            ending for outcome in facts.events(EpisodeEnded) for ending in _endings(outcome)
        ),
        dropped=Counter(drop.reason for batch in assembled for drop in batch.dropped),
        duplicates={kind.__name__: len(again) for kind, again in facts.again.items() if again},
        undecodable=undecodable,
    )


def _endings(outcome: EpisodeEnded) -> list[str]:
    return [outcome.ending, "masked"] if outcome.masked else [outcome.ending]


def violations(
    facts: Facts, recipe: Recipe, *, drained: bool, settled: bool, one_clock: bool
) -> Violations:
    """All that is wrong, invariant by invariant."""
    yield from tasks.check(facts, recipe, drained=drained)
    yield from episodes.check(facts, recipe, drained=drained)
    yield from trajectories.check(facts)
    yield from trajectories.taught(recipe, facts)
    yield from groups.check(facts, recipe, settled=settled)
    yield from batches.check(facts, recipe, settled=settled)
    yield from items.check(facts)
    yield from choices.check(facts, recipe)
    yield from choices.check_opponents(facts, recipe)
    yield from evaluations.check(facts)
    yield from publications.check(facts, recipe, settled=settled)
    if one_clock:
        yield from limits.check(facts, recipe)
