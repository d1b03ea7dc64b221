"""Makes the tasks that the task source and `headrace submit` write."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import EnvironmentUse, Sampling, TaskSubmitted, Use
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.blobs import BlobStore
from headrace.services.models.tokens import end_ids, token_ids
from headrace.services.models.weights import model_folder
from headrace.services.tasks.admission import refusal
from headrace.services.tasks.artifact_store import store_task_files
from headrace.services.tasks.per_task import (
    StoreFiles,
    TaskSettings,
    paths_below,
    read_settings,
    with_settings,
)


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a data set.

    A task is made of it, with its payload, its seed, and the settings of the recipe's `tasks`. The
    task's environment shows the payload to the agent and grades the answers.
    """

    item_id: str
    """Id of the item in its data set."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """The input of the environment and the agent, as JSON values."""
    seed: int | None = None
    """Random seed of the environment. None derives it from the item's id and epoch."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """What the item's tasks set for themselves: keys of `TaskSettings`, such as `environment`,
    `image`, `tenant`, `labels` and `artifacts`. The recipe gives the others."""


class TaskMaker:
    """Turns items into tasks, with the settings of the recipe's `tasks`."""

    def __init__(
        self,
        recipe: Recipe,
        source: str,
        store_files: StoreFiles | None = None,
        fixed: Collection[str] = (),
    ) -> None:
        """Reads the policies' tokenizers. Raises UsageError if one lacks an `allowed` token.

        Without `store_files`, tasks with files can't be made. `fixed` are keys that items can't
        set, because the recipe decides them.
        """
        self._recipe = recipe
        self._source = source
        self._store_files = store_files
        self._fixed = frozenset(fixed)
        self._roles = {
            role: Use(policy=name, sampling=sampling_of(recipe.policies[name]))
            for role, name in recipe.tasks.roles.items()
        }

    def make(
        self, item: Item, task_id: str, epoch: int = 0, labels: Mapping[str, str] | None = None
    ) -> TaskSubmitted:
        """Makes the task of an item. `task_id` must be unique within the source.

        It stores the item's files first, and blocks meanwhile. Raises UsageError if the item sets
        something that is wrong or unknown, and DependencyError if the files can't be stored.
        """
        task = self._of_recipe(item, task_id, epoch)
        if item.task:
            task = self._with_settings(task, read_settings(item.task, f"item {item.item_id}"))
        return task.model_copy(update={"labels": {**task.labels, **(labels or {})}})

    async def make_async(
        self, item: Item, task_id: str, epoch: int = 0, labels: Mapping[str, str] | None = None
    ) -> TaskSubmitted:
        """`make`, which blocks no loop while files are stored."""
        if "artifacts" not in item.task:
            return self.make(item, task_id, epoch, labels)
        return await asyncio.to_thread(self.make, item, task_id, epoch, labels)

    def _with_settings(self, task: TaskSubmitted, settings: TaskSettings) -> TaskSubmitted:
        kept = settings.model_copy(update=dict.fromkeys(self._fixed))
        task = with_settings(task, kept, self._collect_of)
        if not kept.artifacts:
            return task
        if self._store_files is None:
            raise UsageError(f"item {task.item_id}: files can't go in with a task here")
        artifacts = self._store_files(paths_below(kept.artifacts, Path()))
        return task.model_copy(update={"artifacts": artifacts})

    def _collect_of(self, use: str) -> tuple[str, ...]:
        """Returns which files of an environment the recipe collects."""
        found = self._recipe.environments.get(use)
        return found.collect if found is not None else ()

    def _of_recipe(self, item: Item, task_id: str, epoch: int) -> TaskSubmitted:
        tasks = self._recipe.tasks
        environment = None
        if (use := tasks.environment) is not None:
            collect = self._collect_of(use)
            environment = EnvironmentUse(use=use, mode=tasks.mode, collect=collect)
        return TaskSubmitted(
            source=self._source,
            task_id=task_id,
            tenant=tasks.tenant,
            purpose=tasks.purpose,
            item_id=item.item_id,
            epoch=epoch,
            agent=tasks.agent,
            environment=environment,
            roles=self._roles,
            payload=json.dumps(item.payload, sort_keys=True),
            samples=tasks.samples,
            minimum=tasks.minimum,
            max_turns=tasks.max_turns,
            max_tokens=tasks.max_tokens,
            deadline_s=tasks.deadline_s,
            attempts=tasks.attempts,
            priority=tasks.priority,
            seed=self._seed(item, epoch),
            labels=tasks.labels,
        )

    def _seed(self, item: Item, epoch: int) -> int:
        if item.seed is not None:
            return item.seed
        text = json.dumps([self._recipe.tasks.seed, item.item_id, epoch])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1


def make_alone(
    recipe: Recipe,
    source: str,
    item: Item,
    task_id: str = "check",
    epoch: int = 0,
    blobs: BlobStore | None = None,
) -> TaskSubmitted:
    """Makes the task of an item outside of a run. Without `blobs`, its files are only checked.

    Raises UsageError as `TaskMaker.make` does, and if a run would refuse the task.
    """
    made = TaskMaker(recipe, source, partial(store_task_files, blobs, recipe.artifacts)).make(
        item, task_id, epoch
    )
    if (why := refusal(recipe, made)) is not None:
        raise UsageError(f"item {item.item_id}: {why.message}")
    return made


def sampling_of(policy: Policy) -> Sampling:
    """Returns how a policy is sampled. Raises UsageError if its model has not the tokens."""
    settings = policy.sampling
    folder = model_folder(policy.model)
    return Sampling(
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        stop=settings.stop,
        stop_ids=pack_i32(end_ids(folder)),
        allowed=pack_i32(token_ids(folder, settings.allowed)),
        json_schema=json.dumps(settings.json_schema) if settings.json_schema else "",
    )
