"""Submits a round of tasks to evaluate, every so many versions, pinned to that version.

A round is of one version of every policy that plays a role: the newest multiple of `every` that all
of them have published, and of a policy that doesn't train its only one. The next round begins when
all tasks of the last have ended, so one version is evaluated at a time, and training, which never
waits, may pass versions by.

It keeps no state: a round's tasks are named after its version, and what was submitted is not
submitted again. Two at once do no harm, as with the source.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import aclosing

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished, TaskEnded, TaskSubmitted, Use
from headrace.schemas.recipe.recipe import Evaluation, Recipe
from headrace.schemas.topics import POLICIES, RESULTS
from headrace.services.base.concurrency import until_first
from headrace.services.base.plugins import load
from headrace.services.kafka.broker import Partition
from headrace.services.log.log_reader import CaughtUp, Start, follow_events
from headrace.services.tasks.data_sets.data_sets import BUILTIN
from headrace.services.tasks.source import submitted_by
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.worker.service_context import ServiceContext

logger = logging.getLogger(__name__)

SOURCE = "evaluation"
"""Its tasks' `source`."""


async def run(context: ServiceContext) -> None:
    """Submits rounds until the run is ending, or it is to stop."""
    if context.recipe.evaluation is None:
        raise UsageError("the recipe has no [evaluation]: there is nothing to submit")
    stop = until_first(context.stopping.wait(), context.ending.wait())
    await until_first(stop, _Rounds(context, context.recipe.evaluation).follow())


def items_of(recipe: Recipe, evaluation: Evaluation) -> Iterator[Item]:
    """The items that are evaluated, in order."""
    tasks = recipe.tasks
    use, options = evaluation.use, evaluation.options
    if use is None:
        use, options = tasks.use, {**tasks.options, **options}
    yield from itertools.islice(load("data set", use, BUILTIN)(**options), evaluation.items)


class _Rounds:
    """Follows versions and results, and submits the next round when it is due."""

    def __init__(self, context: ServiceContext, evaluation: Evaluation) -> None:
        recipe = context.recipe
        if evaluation.seed is not None:
            tasks = recipe.tasks.model_copy(update={"seed": evaluation.seed})
            recipe = recipe.model_copy(update={"tasks": tasks})
        self._context = context
        self._evaluation = evaluation
        self._maker = TaskMaker(recipe, SOURCE)
        self._trains = {
            name: recipe.policies[name].training is not None
            for name in set(recipe.tasks.roles.values())
        }
        self._published: dict[str, int] = {}
        self._submitted: dict[str, int] = {}
        self._ended: set[str] = set()
        self._newest_round = -1

    async def follow(self) -> None:
        """Follows for ever."""
        self._submitted = await submitted_by(self._context, SOURCE)
        rounds = (int(task_id.partition("-")[0]) for task_id in self._submitted)
        self._newest_round = max(rounds, default=-1)
        topics = self._context.log.topics
        partitions = [topics.partition(POLICIES), *topics.partitions_of(RESULTS)]
        starts: dict[Partition, Start] = dict.fromkeys(partitions, "first")
        caught_up = False
        async with aclosing(follow_events(self._context.log, starts)) as items:
            async for item in items:
                if isinstance(item, CaughtUp):
                    caught_up = True
                    await self._submit(self._newest_round)  # where a predecessor broke off
                elif isinstance(item.event, PolicyPublished):
                    self._published[item.event.policy] = item.event.version
                elif isinstance(item.event, TaskEnded) and item.event.source == SOURCE:
                    self._ended.add(item.event.task_id)
                if caught_up:
                    await self._submit(self._due())

    def _due(self) -> int:
        """The version of the round that begins now; -1 for none."""
        if self._submitted.keys() - self._ended or self._trains.keys() - self._published.keys():
            return -1
        trained = [self._published[name] for name, trains in self._trains.items() if trains]
        newest = min(trained, default=0)
        version = newest - newest % self._evaluation.every
        return version if version > self._newest_round else -1

    async def _submit(self, version: int) -> None:
        """Submits what is not yet submitted of a version's round."""
        if version < 0:
            return
        self._newest_round = version
        items = items_of(self._context.recipe, self._evaluation)
        for position, item in enumerate(items):
            task_id = f"{version}-{position}"
            if task_id not in self._submitted:
                task = self._task(item, task_id, version)
                self._submitted[task_id] = (await self._context.log.send(task)).offset
        logger.info("version %d: submitted to be evaluated", version)

    def _task(self, item: Item, task_id: str, version: int) -> TaskSubmitted:
        made = self._maker.make(item, task_id)
        roles = {role: self._pinned(use, version) for role, use in made.roles.items()}
        changes = {"purpose": "evaluate", "samples": self._evaluation.samples, "roles": roles}
        return made.model_copy(update={**changes, "minimum": 1})

    def _pinned(self, use: Use, version: int) -> Use:
        changes: dict[str, object] = {"version": version if self._trains[use.policy] else 0}
        if self._evaluation.temperature is not None:
            temperature = {"temperature": self._evaluation.temperature}
            changes["sampling"] = use.sampling.model_copy(update=temperature)
        return use.model_copy(update=changes)
