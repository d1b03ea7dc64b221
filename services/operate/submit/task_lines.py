"""Reads tasks from JSON lines and submits them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import UsageError
from headrace.schemas.events import I64, TaskSubmitted
from headrace.schemas.problems import problems_of
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.tasks.task_maker import Item, TaskMaker

IN_FLIGHT = 256
"""Tasks that are written at the same time."""

Count = Annotated[int, Field(gt=0, lt=2**31)]


class TaskLine(BaseModel):
    """One line. The recipe gives each value that is None, unless its docstring says otherwise."""

    model_config = ConfigDict(extra="forbid", strict=True)

    payload: dict[str, Any] = {}
    item_id: str | None = None
    """None means the digest of the payload."""
    task_id: str | None = None
    """None means the digest of the line and its number."""
    epoch: Annotated[int, Field(ge=0, lt=2**31)] = 0
    seed: I64 | None = None
    samples: Count | None = None
    minimum: Count | None = None
    max_turns: Count | None = None
    max_tokens: Count | None = None
    deadline_s: Count | None = None
    attempts: Count | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    tenant: str | None = None
    purpose: Literal["train", "evaluate"] | None = None
    labels: dict[str, str] | None = None


_MADE = {"payload", "item_id", "task_id", "epoch", "seed"}
"""Fields from which the task is made. The other fields replace what the recipe gives."""


def read_tasks(recipe: Recipe, source: str, lines: Sequence[str]) -> list[TaskSubmitted]:
    """Returns the tasks of all lines except blank ones. Raises UsageError for the first bad one."""
    maker = TaskMaker(recipe, source)
    tasks = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = TaskLine.model_validate_json(text)
        except ValidationError as error:
            raise UsageError(
                f"line {number}: {problems_of(error)[0]}. Nothing was submitted. Correct the line "
                "and submit the file again"
            ) from error
        tasks.append(_task(maker, line, f"{number}:{text}"))
    return tasks


def _task(maker: TaskMaker, line: TaskLine, numbered_text: str) -> TaskSubmitted:
    payload = json.dumps(line.payload, sort_keys=True)
    item_id = line.item_id if line.item_id is not None else _digest(payload)
    task_id = line.task_id if line.task_id is not None else _digest(numbered_text)
    task = maker.make(Item(item_id, line.payload, line.seed), task_id, line.epoch)
    return task.model_copy(update=line.model_dump(exclude=_MADE, exclude_none=True))


async def send_tasks(log: EventLog, tasks: Sequence[TaskSubmitted]) -> list[tuple[int, str]]:
    """Writes the tasks in the given order. Returns each task's number and task_id."""
    numbers = []
    for first in range(0, len(tasks), IN_FLIGHT):
        part = tasks[first : first + IN_FLIGHT]
        refs = await asyncio.gather(*(log.send(task) for task in part))
        numbers += [(ref.offset, task.task_id) for ref, task in zip(refs, part, strict=True)]
    return numbers


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
