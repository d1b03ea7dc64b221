"""The warm start: tasks that an agent demonstrates, and how to wait until they are learned.

They are the first tasks of the task source. The tasks that are learned by reward come once every
policy that trains has published a version that was trained on the demonstrations. Before that,
their episodes would come from policies that have learned nothing yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import aclosing

from headrace.schemas.events import BatchAssembled, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe, WarmStart
from headrace.schemas.topics import BATCHES, POLICIES
from headrace.services.kafka.broker import Partition
from headrace.services.log.log_reader import Start, Tail, follow_events
from headrace.services.tasks.data_sets import items_by_epoch
from headrace.services.tasks.task_maker import Item
from headrace.services.worker.service_context import ServiceContext

WARM_START = "warm-start-"
"""Before the ids of the tasks that are demonstrated."""


def demonstrations(recipe: Recipe, settings: WarmStart) -> Iterator[tuple[str, int, Item]]:
    """Yields the task id, epoch and item of every task that is demonstrated."""
    use, options = recipe.tasks.use, recipe.tasks.options
    if settings.use is not None:
        use, options = settings.use, settings.options
    items = items_by_epoch(use, options, epochs=None)
    for task_id, epoch, item in itertools.islice(items, settings.tasks):
        yield WARM_START + task_id, epoch, item


DEMONSTRATED = ("agent", "samples", "minimum", "purpose")
"""What the items of a warm start can't set for themselves."""


def demonstrating(recipe: Recipe, settings: WarmStart) -> Recipe:
    """Returns the recipe with the settings of the tasks that are demonstrated."""
    changes = {"agent": settings.agent, "samples": settings.samples, "minimum": 1}
    return recipe.model_copy(update={"tasks": recipe.tasks.model_copy(update=changes)})


class Learned:
    """Finds out from batches and publications whether policies were trained on some tasks."""

    def __init__(self, policies: Collection[str], tasks: Collection[int]) -> None:
        self._tasks = tasks
        self._due: dict[str, int | None] = dict.fromkeys(policies)
        """Policy to the version that is trained on all tasks, or None if it is not known yet."""
        self._published = dict.fromkeys(policies, -1)

    def on_batch(self, batch: BatchAssembled) -> None:
        """Adds a batch."""
        if self._due.get(batch.policy, -1) is None:
            decided = batch.frontier()
            if all(task in decided for task in self._tasks):
                self._due[batch.policy] = batch.version

    def on_policy(self, published: PolicyPublished) -> None:
        """Adds a publication."""
        newest = self._published.get(published.policy)
        if newest is not None:
            self._published[published.policy] = max(newest, published.version)

    @property
    def done(self) -> bool:
        """Whether every policy was trained on all tasks."""
        return all(
            due is not None and self._published[policy] >= due for policy, due in self._due.items()
        )


async def until_learned(context: ServiceContext, tasks: Collection[int]) -> None:
    """Waits until every policy that trains has been trained on these tasks."""
    recipe, topics = context.recipe, context.log.topics
    trained = [name for name, policy in recipe.policies.items() if policy.training is not None]
    learned = Learned(trained, tasks)
    starts: dict[Partition, Start] = {topics.partition(POLICIES): "first"}
    for name in trained:
        starts[topics.partition(BATCHES, name)] = Tail()
    async with aclosing(follow_events(context.log, starts)) as items:
        async for item in items:
            match getattr(item, "event", None):
                case BatchAssembled() as batch:
                    learned.on_batch(batch)
                case PolicyPublished() as published:
                    learned.on_policy(published)
            if learned.done:
                return
