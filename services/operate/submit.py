"""Tasks from JSON lines, for `headrace submit`."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import UsageError
from headrace.schemas.events import I64, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.tasks.task_maker import Item, TaskMaker

IN_FLIGHT = 256
"""Tasks that are being written at once."""

Count = Annotated[int, Field(gt=0, lt=2**31)]


class TaskLine(BaseModel):
    """One line. What is None comes from the recipe."""

    model_config = ConfigDict(extra="forbid", strict=True)

    payload: dict[str, Any] = {}
    item_id: str | None = None
    """None: the digest of the payload."""
    task_id: str | None = None
    """None: the digest of the line and its number."""
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


_OVER_RECIPE = (
    "samples", "minimum", "max_turns", "max_tokens", "deadline_s", "attempts", "priority",
    "tenant", "purpose", "labels",
)  # fmt: skip


def read_tasks(recipe: Recipe, source: str, lines: Sequence[str]) -> list[TaskSubmitted]:
    """The tasks of all lines; blank ones are passed over. UsageError names the first bad line."""
    maker = TaskMaker(recipe, source)
    tasks = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = TaskLine.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in problem["loc"])
            raise UsageError(
                f"line {number}: {f'{key}: ' if key else ''}{problem['msg']}; nothing was submitted"
            ) from error
        tasks.append(_task(maker, line, f"{number}:{text}"))
    return tasks


def _task(maker: TaskMaker, line: TaskLine, place: str) -> TaskSubmitted:
    payload = json.dumps(line.payload, sort_keys=True)
    item_id = line.item_id if line.item_id is not None else _digest(payload)
    task_id = line.task_id if line.task_id is not None else _digest(place)
    task = maker.make(Item(item_id, line.payload, line.seed), task_id, line.epoch)
    over = {name: value for name in _OVER_RECIPE if (value := getattr(line, name)) is not None}
    return task.model_copy(update=over)


async def send_tasks(log: EventLog, tasks: Sequence[TaskSubmitted]) -> list[tuple[int, str]]:
    """Writes the tasks in order. Each one's number and id."""
    numbers = []
    for first in range(0, len(tasks), IN_FLIGHT):
        part = tasks[first : first + IN_FLIGHT]
        refs = await asyncio.gather(*(log.send(task) for task in part))
        numbers += [(ref.offset, task.task_id) for ref, task in zip(refs, part, strict=True)]
    return numbers


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
