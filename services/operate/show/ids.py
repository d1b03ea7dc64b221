"""What a person may ask after, and how it is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.errors import UsageError

GRAMMAR = """\
  42                     task number 42: its place in `tasks`
  42/3                   the episode of its sample 3
  task:SOURCE/TASK_ID    a task by who submitted it, as task:submit/map-1
  batch:POLICY/7         batch 7, which trains version 7
  version:POLICY/7       version 7, what it was trained on, and how it was evaluated
  TOPIC/2@17             the record at offset 17 of partition 2, as trajectories/2@17"""
"""For help and errors. POLICY may be left out (batch:7) where there is only one."""


@dataclass(frozen=True, slots=True)
class TaskId:
    """A task, or with `sample` one of its episodes."""

    number: int
    sample: int | None = None


@dataclass(frozen=True, slots=True)
class SourceId:
    """A task as its submitter knows it: `source/task_id`."""

    text: str


@dataclass(frozen=True, slots=True)
class StepId:
    """A batch and the version that it trained: one optimizer step. `policy` None: the only one."""

    kind: str
    """`batch` or `version`: what was asked after."""
    policy: str | None
    version: int


@dataclass(frozen=True, slots=True)
class RecordId:
    """A record. `topic` is its whole name, or that without namespace and version."""

    topic: str
    partition: int
    offset: int


Id = TaskId | SourceId | StepId | RecordId

_TASK = re.compile(r"(\d{1,18})(?:/(\d{1,9}))?")
_SOURCE = re.compile(r"task:(.+/.+)", re.DOTALL)
_STEP = re.compile(r"(batch|version):(?:([a-z0-9_-]+)/)?(\d{1,18})")
_RECORD = re.compile(r"([a-z0-9_.-]+)/(\d{1,9})@(\d{1,18})")


def parse_id(text: str) -> Id:
    """What `text` names. UsageError shows how ids are written."""
    if match := _TASK.fullmatch(text):
        return TaskId(int(match[1]), None if match[2] is None else int(match[2]))
    if match := _SOURCE.fullmatch(text):
        return SourceId(match[1])
    if match := _STEP.fullmatch(text):
        return StepId(match[1], match[2], int(match[3]))
    if match := _RECORD.fullmatch(text):
        return RecordId(match[1], int(match[2]), int(match[3]))
    raise UsageError(f"{text!r} is no id. Ids are written so:\n{GRAMMAR}")
