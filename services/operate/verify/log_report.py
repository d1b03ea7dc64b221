"""Judges a log, and says what was found. Pure."""

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
from headrace.services.operate.verify.invariants import (
    batch_checks,
    choice_checks,
    episode_checks,
    evaluation_checks,
    file_checks,
    group_checks,
    item_checks,
    limit_checks,
    publication_checks,
    trajectory_checks,
)
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.operate.verify.invariants.of_tasks import task_checks, tenant_checks

SHOWN = 40
"""Violations that a report shows; the rest is counted."""


@dataclass(frozen=True)
class LogReport:
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


def examine(
    recipe: Recipe,
    deliveries: Iterable[Delivery[Event]],
    *,
    drained: bool = True,
    settled: bool = False,
    one_clock: bool = False,
    undecodable: int = 0,
) -> LogReport:
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
    return LogReport(
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
    yield from task_checks.check(facts, recipe, drained=drained)
    yield from tenant_checks.check(facts, recipe)
    yield from episode_checks.check(facts, recipe, drained=drained)
    yield from trajectory_checks.check(facts)
    yield from file_checks.check(facts)
    yield from trajectory_checks.taught(recipe, facts)
    yield from group_checks.check(facts, recipe, settled=settled)
    yield from batch_checks.check(facts, recipe, settled=settled)
    yield from item_checks.check(facts)
    yield from choice_checks.check(facts, recipe)
    yield from choice_checks.check_opponents(facts, recipe)
    yield from evaluation_checks.check(facts)
    yield from publication_checks.check(facts, recipe, settled=settled)
    if one_clock:
        yield from limit_checks.check(facts, recipe)
