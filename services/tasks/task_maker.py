"""Makes the tasks that the task source and `headrace submit` write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.events import EnvironmentUse, Sampling, TaskSubmitted, Use
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.tokens import end_ids, token_ids
from headrace.services.models.weights import model_folder


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


class TaskMaker:
    """Turns items into tasks, with the settings of the recipe's `tasks`."""

    def __init__(self, recipe: Recipe, source: str) -> None:
        """Reads the policies' tokenizers. Raises UsageError if one lacks an `allowed` token."""
        self._recipe = recipe
        self._source = source
        self._roles = {
            role: Use(policy=name, sampling=_sampling(recipe.policies[name]))
            for role, name in recipe.tasks.roles.items()
        }

    def make(
        self, item: Item, task_id: str, epoch: int = 0, labels: Mapping[str, str] | None = None
    ) -> TaskSubmitted:
        """Makes the task of an item. `task_id` must be unique within the source."""
        tasks = self._recipe.tasks
        environment = None
        if tasks.environment is not None:
            environment = EnvironmentUse(use=tasks.environment, mode=tasks.mode)
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
            seed=self._seed(item, epoch),
            labels=dict(labels or {}),
        )

    def _seed(self, item: Item, epoch: int) -> int:
        if item.seed is not None:
            return item.seed
        text = json.dumps([self._recipe.tasks.seed, item.item_id, epoch])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1


def _sampling(policy: Policy) -> Sampling:
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
