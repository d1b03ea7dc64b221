"""Reads tasks from JSON lines and submits them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from headrace.errors import UsageError
from headrace.schemas.events import I64, TaskSubmitted
from headrace.schemas.problems import problems_of
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.models.blobs import BlobStore
from headrace.services.tasks.admission import refusal
from headrace.services.tasks.artifact_store import store_task_files
from headrace.services.tasks.per_task import (
    StoreFiles,
    TaskSettings,
    paths_below,
    read_settings,
)
from headrace.services.tasks.task_maker import Item, TaskMaker

IN_FLIGHT = 256
"""Tasks that are written at the same time."""


class TaskLine(TaskSettings):
    """One line. The recipe gives each value that is None, unless its docstring says otherwise."""

    payload: dict[str, Any] = Field(default={})
    item_id: str | None = None
    """None means the digest of the payload."""
    task_id: str | None = None
    """None means the digest of the line and its number."""
    epoch: Annotated[int, Field(ge=0, lt=2**31)] = 0
    seed: I64 | None = None


def read_tasks(
    recipe: Recipe,
    source: str,
    lines: Sequence[str],
    blobs: BlobStore,
    *,
    folder: Path = Path(),
    overriding: TaskSettings | None = None,
) -> list[TaskSubmitted]:
    """Returns the tasks of all lines except blank ones, and stores their files. Blocks.

    Relative paths of files are in `folder`. The keys of `overriding` replace those of every line.
    Raises UsageError for the first line that is wrong, or whose task the run would refuse. Then no
    file is stored. Raises DependencyError if a file can't be stored.
    """
    store = partial(store_task_files, blobs, recipe.artifacts)
    maker = TaskMaker(recipe, source)
    found: list[tuple[int, TaskSubmitted, TaskSettings]] = []
    for number, text in enumerate(lines, start=1):
        if text.strip():
            with _wrong(number):
                line = TaskLine.model_validate_json(text)
                settings = read_settings(
                    (overriding or TaskSettings()).over(_settings_of(line)), "its keys"
                )
                task = _task(maker, line, settings, f"{number}:{text}")
                _require_files(settings, folder)
                if (why := refusal(recipe, task)) is not None:
                    raise UsageError(why.message)
                found.append((number, task, settings))
    return [_with_files(number, task, one, folder, store) for number, task, one in found]


@contextmanager
def _wrong(number: int) -> Iterator[None]:
    """Says which line is wrong."""
    try:
        yield
    except (ValidationError, UsageError) as error:
        why = problems_of(error)[0] if isinstance(error, ValidationError) else error
        raise UsageError(
            f"line {number}: {why}. Nothing was submitted. Correct the line and submit the file "
            "again"
        ) from error


def _settings_of(line: TaskLine) -> TaskSettings:
    return TaskSettings.model_construct(
        **{name: getattr(line, name) for name in TaskSettings.model_fields}
    )


def _task(
    maker: TaskMaker, line: TaskLine, settings: TaskSettings, numbered_text: str
) -> TaskSubmitted:
    """Returns the task of a line, without its files."""
    payload = json.dumps(line.payload, sort_keys=True)
    item_id = line.item_id if line.item_id is not None else _digest(payload)
    task_id = line.task_id if line.task_id is not None else _digest(numbered_text)
    keys = settings.model_dump(exclude_none=True, exclude={"artifacts"})
    return maker.make(Item(item_id, line.payload, line.seed, keys), task_id, line.epoch)


def _require_files(settings: TaskSettings, folder: Path) -> None:
    """Raises UsageError if a file of a task is not there, before any file is stored."""
    for name, content in paths_below(settings.artifacts or {}, folder).items():
        if isinstance(content, Path) and not content.is_file():
            raise UsageError(f"artifacts.{name}: there is no file {content}")


def _with_files(
    number: int, task: TaskSubmitted, settings: TaskSettings, folder: Path, store: StoreFiles
) -> TaskSubmitted:
    if not settings.artifacts:
        return task
    if task.environment is None:
        raise UsageError(f"line {number}: a task without an environment takes no files")
    with _wrong(number):
        return task.model_copy(update={"artifacts": store(paths_below(settings.artifacts, folder))})


async def send_tasks(log: EventLog, tasks: Sequence[TaskSubmitted]) -> list[tuple[int, str]]:
    """Writes the tasks in the given order. Returns each task's number and task_id.

    Raises UsageError, before it writes any, if one of them needs the signature of another key.
    """
    log.signer.require(log.topics, tasks)
    numbers = []
    for first in range(0, len(tasks), IN_FLIGHT):
        part = tasks[first : first + IN_FLIGHT]
        refs = await asyncio.gather(*(log.send(task) for task in part))
        numbers += [(ref.offset, task.task_id) for ref, task in zip(refs, part, strict=True)]
    return numbers


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
