"""Submits a round of evaluation tasks every `every` versions, pinned to that version.

A round evaluates one version of every policy that plays a role: the newest multiple of `every` that
all of these policies have published. A policy that does not train has only version 0. The next
round begins when all tasks of the last one have ended, so only one version is evaluated at a time.
Training does not wait for it, so versions may be skipped.

It keeps no state: the tasks of a round are named after its version, and a task that is submitted is
not submitted again. As with the task source, two at the same time do no harm.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished, TaskEnded, TaskSubmitted, Use
from headrace.schemas.recipe.recipe import Evaluation, Recipe
from headrace.schemas.topics import POLICIES, RESULTS
from headrace.services.base.concurrency import until_first
from headrace.services.kafka.broker import Partition
from headrace.services.log.log_reader import CaughtUp, Start, follow_events
from headrace.services.tasks.artifact_store import store_task_files
from headrace.services.tasks.data_sets import items_of
from headrace.services.tasks.source import submitted_by
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.worker.service_context import ServiceContext

logger = logging.getLogger(__name__)

SOURCE = "evaluation"
"""The `source` of its tasks."""


async def run(context: ServiceContext) -> None:
    """Submits rounds until the run is ending or the service must stop."""
    if context.recipe.evaluation is None:
        raise UsageError("the recipe has no table [evaluation], so there is nothing to submit")
    rounds = _Rounds(context, context.recipe.evaluation)
    await until_first(context.stopping.wait(), context.ending.wait(), rounds.follow())


def data_set_of(recipe: Recipe, evaluation: Evaluation) -> tuple[str, Mapping[str, Any]]:
    """Returns the data set that is evaluated, and its options."""
    if evaluation.use is not None:
        return evaluation.use, evaluation.options
    return recipe.tasks.use, {**recipe.tasks.options, **evaluation.options}


class _Rounds:
    """Follows versions and results, and submits the next round when it is due."""

    def __init__(self, context: ServiceContext, evaluation: Evaluation) -> None:
        recipe = context.recipe
        if evaluation.seed is not None:
            tasks = recipe.tasks.model_copy(update={"seed": evaluation.seed})
            recipe = recipe.model_copy(update={"tasks": tasks})
        self._context = context
        self._evaluation = evaluation
        store = partial(store_task_files, context.blobs, recipe.artifacts)
        self._maker = TaskMaker(recipe, SOURCE, store)
        self._trains = {
            name: recipe.policies[name].training is not None
            for name in set(recipe.tasks.roles.values())
        }
        self._published: dict[str, int] = {}
        self.submitted: dict[str, int] = {}
        self._ended: set[int] = set()
        self._newest_round = -1

    async def follow(self) -> None:
        """Follows without end."""
        self.submitted = (await submitted_by(self._context, SOURCE)).numbers
        rounds = (int(task_id.partition("-")[0]) for task_id in self.submitted)
        self._newest_round = max(rounds, default=-1)
        topics = self._context.log.topics
        partitions = [topics.partition(POLICIES), *topics.partitions_of(RESULTS)]
        starts: dict[Partition, Start] = dict.fromkeys(partitions, "first")
        caught_up = False
        async with aclosing(follow_events(self._context.log, starts)) as items:
            async for item in items:
                if isinstance(item, CaughtUp):
                    caught_up = True
                    # A predecessor may have stopped within this round.
                    await self._submit(self._newest_round)
                elif isinstance(item.event, PolicyPublished):
                    self._published[item.event.policy] = item.event.version
                elif isinstance(item.event, TaskEnded):
                    self.on_ended(item.event)
                if caught_up:
                    await self._submit(self.due())

    def on_ended(self, event: TaskEnded) -> None:
        """Takes the end of a task. Its number decides, because anybody may give a task any id."""
        if event.source == SOURCE:
            self._ended.add(event.task)

    def due(self) -> int:
        """Returns the version of the round that is due, or -1 if none is."""
        unfinished = set(self.submitted.values()) - self._ended
        if unfinished or self._trains.keys() - self._published.keys():
            return -1
        trained = [self._published[name] for name, trains in self._trains.items() if trains]
        newest = min(trained, default=0)
        version = newest - newest % self._evaluation.every
        return version if version > self._newest_round else -1

    async def _submit(self, version: int) -> None:
        """Submits the tasks of a version's round that are not submitted yet."""
        if version < 0:
            return
        self._newest_round = version
        for position, item in enumerate(self._items()):
            task_id = f"{version}-{position}"
            if task_id not in self.submitted:
                task = await self._task(item, task_id, version)
                self.submitted[task_id] = (await self._context.log.send(task)).offset
        logger.info("submitted the evaluation of version %d", version)

    def _items(self) -> Iterator[Item]:
        items = items_of(*data_set_of(self._context.recipe, self._evaluation))
        return itertools.islice(items, self._evaluation.items)

    async def _task(self, item: Item, task_id: str, version: int) -> TaskSubmitted:
        made = await self._maker.make_async(item, task_id)
        roles = {role: self._pinned(use, version) for role, use in made.roles.items()}
        changes = {"purpose": "evaluate", "samples": self._evaluation.samples, "roles": roles}
        return made.model_copy(update={**changes, "minimum": 1})

    def _pinned(self, use: Use, version: int) -> Use:
        changes: dict[str, object] = {"version": version if self._trains[use.policy] else 0}
        if self._evaluation.temperature is not None:
            temperature = {"temperature": self._evaluation.temperature}
            changes["sampling"] = use.sampling.model_copy(update=temperature)
        return use.model_copy(update=changes)
