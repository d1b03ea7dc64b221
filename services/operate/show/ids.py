"""The ids that `headrace show` takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.errors import UsageError

GRAMMAR = """\
  42                     task number 42, which is its offset in `tasks`
  42/3                   the episode of sample 3 of task 42
  task:SOURCE/TASK_ID    a task by its submitter's name for it, such as task:submit/map-1
  label:NAME=TEXT        the tasks with this label, such as label:exp=7
  batch:POLICY/7         batch 7, which trains version 7
  version:POLICY/7       version 7, what it was trained on, and how it was evaluated
  TOPIC/2@17             the record at offset 17 of partition 2, such as trajectories/2@17
  If there is only one policy, leave it out: batch:7, version:7."""
"""The grammar of ids, for errors."""


@dataclass(frozen=True, slots=True)
class TaskId:
    """A task, or one of its episodes if `sample` is given."""

    number: int
    sample: int | None = None


@dataclass(frozen=True, slots=True)
class SourceId:
    """A task by its submitter's name for it: `source/task_id`."""

    text: str


@dataclass(frozen=True, slots=True)
class LabelId:
    """The tasks that have a label."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class StepId:
    """A training step: a batch and the version that it trained. `policy` None is the only one."""

    kind: str
    """What the id names: `batch` or `version`."""
    policy: str | None
    version: int


@dataclass(frozen=True, slots=True)
class RecordId:
    """A record. `topic` is the full name, or the name without namespace and version."""

    topic: str
    partition: int
    offset: int


Id = TaskId | SourceId | LabelId | StepId | RecordId

_TASK = re.compile(r"(\d{1,18})(?:/(\d{1,9}))?")
_SOURCE = re.compile(r"task:(.+/.+)", re.DOTALL)
_LABEL = re.compile(r"label:([^=]+)=(.*)", re.DOTALL)
_STEP = re.compile(r"(batch|version):(?:([a-z0-9_-]+)/)?(\d{1,18})")
_RECORD = re.compile(r"([a-z0-9_.-]+)/(\d{1,9})@(\d{1,18})")


def parse_id(text: str) -> Id:
    """Parses an id. Raises UsageError with the grammar if `text` is not an id."""
    if match := _TASK.fullmatch(text):
        return TaskId(int(match[1]), None if match[2] is None else int(match[2]))
    if match := _SOURCE.fullmatch(text):
        return SourceId(match[1])
    if match := _LABEL.fullmatch(text):
        return LabelId(match[1], match[2])
    if match := _STEP.fullmatch(text):
        return StepId(match[1], match[2], int(match[3]))
    if match := _RECORD.fullmatch(text):
        return RecordId(match[1], int(match[2]), int(match[3]))
    raise UsageError(f"{text!r} is not an id. These are the ids:\n{GRAMMAR}")
