"""What the log says when all is over, held against what Headrace promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from schemas import packed
from schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    PolicyPublished,
    TaskEnded,
    TrajectoryRecorded,
)
from schemas.frontier import Frontier
from schemas.recipe import Recipe
from services.log import EventLog
from tests.checker import Facts, Report, examine, read_all
from tests.simulation.world import TURNS, reward, where


@dataclass(frozen=True)
class History:
    """A log, read to its end."""

    facts: Facts
    report: Report

    def endings(self) -> dict[str, int]:
        """How many episodes ended how: by the failure's code where there is one."""
        outcomes = [one.event for one in self.facts.all(EpisodeEnded)]
        return dict(Counter(one.failure.code if one.failure else one.ending for one in outcomes))

    def attempts_lost(self) -> int:
        """Attempts that the infrastructure cost."""
        outcomes = [one.event for one in self.facts.all(EpisodeEnded)]
        return sum(max(0, outcome.attempts - 1) for outcome in outcomes)

    def check(self) -> None:
        """Raises AssertionError where a promise is broken."""
        assert not self.report.violations, str(self.report)
        for one in self.facts.all(EpisodeEnded):
            if one.event.ending == "finished":
                assert one.event.trajectory is not None
                trajectory = self.facts.resolve(one.event.trajectory)
                assert isinstance(trajectory, TrajectoryRecorded)
                _check_story(trajectory)


async def read_history(log: EventLog, recipe: Recipe) -> History:
    """Reads every topic of the namespace to its end."""
    deliveries, undecodable = await read_all(log)
    report = examine(recipe, deliveries, settled=True, one_clock=True, undecodable=undecodable)
    return History(Facts.of(deliveries), report)


async def drained(log: EventLog, recipe: Recipe) -> bool:
    """Whether all tasks of the recipe's source are decided, and all batches trained on."""
    facts = Facts.of((await read_all(log))[0])
    batches = [one.event for one in facts.all(BatchAssembled)]
    versions = [one.event.version for one in facts.all(PolicyPublished)]
    last = max(batches, key=lambda batch: batch.version, default=None)
    if last is None:
        return False
    runs = [(run.first, run.last) for run in last.decided]
    tasks = len(facts.tasks)
    return (
        tasks >= recipe.tasks.options["items"]
        and len(facts.all(TaskEnded)) == tasks
        and len(Frontier(last.low_mark, runs)) == tasks
        and max(versions, default=-1) == last.version
    )


def _check_story(trajectory: TrajectoryRecorded) -> None:
    """What was seen follows from what was done, and so does the reward: nothing lost or doubled."""
    path, earned = f"{trajectory.task}/{trajectory.sample}", 0.0
    for index, turn in enumerate(trajectory.turns):
        assert turn.parent == index - 1
        assert bytes(packed.unpack_i32(turn.context)).decode() == where(path)
        path += f"/{turn.text}"
        earned += reward(path)
        assert turn.reward == reward(path)
    assert len(trajectory.turns) == TURNS
    assert trajectory.reward == earned
