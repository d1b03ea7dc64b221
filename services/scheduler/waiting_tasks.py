"""What the scheduler remembers of tasks that wait or run, and of the newest ids. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.schemas.events import TaskSubmitted
from headrace.services.scheduler.starts import MAX_NAME
from headrace.services.tasks.cancellation import TaskId

FORGOTTEN_AT_ONCE = 1_024
"""At least so many ids of old tasks are forgotten at a time."""
MOST_ALIKE = 10_000
"""At most so many different tasks are shared."""
Purpose = Literal["train", "evaluate"]


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """What decides when a task may start. Tasks that are alike share one object."""

    purpose: Purpose
    tenant: str
    samples: int
    policies: frozenset[str] = frozenset()
    """Those that play in it."""
    environment: str | None = None
    """Key of the recipe's `environments`."""
    image: str = ""
    """The task's own image of its environment."""


@dataclass(slots=True)
class StartedTask:
    """A task that was started and is not finished."""

    task: WaitingTask
    """What it was while it waited."""
    samples: int
    trains: bool
    ended: int = 0
    """The samples that have ended, as bits."""
    dropped: frozenset[str] = frozenset()
    """Policies that dropped its group."""


class AlikeTasks:
    """Makes the WaitingTask of tasks, once for all that are alike."""

    def __init__(self) -> None:
        self._shared: dict[WaitingTask, WaitingTask] = {}

    def of(self, submitted: TaskSubmitted) -> WaitingTask:
        """Returns what decides when a task that can be run may start."""
        return self._share(
            WaitingTask(
                submitted.purpose,
                submitted.tenant[:MAX_NAME],
                submitted.samples,
                frozenset(use.policy for use in submitted.roles.values()),
                submitted.environment.use if submitted.environment else None,
                submitted.environment.image if submitted.environment else "",
            )
        )

    def _share(self, task: WaitingTask) -> WaitingTask:
        if len(self._shared) >= MOST_ALIKE:
            self._shared.clear()
        return self._shared.setdefault(task, task)


class KnownIds:
    """The ids of the newest tasks, and of all that wait."""

    def __init__(self, window: int, waits: Callable[[int], bool]) -> None:
        """A second task of an id is recognised within `window` tasks, and while the first waits.

        `waits` says whether a task waits.
        """
        self._window = window
        self._waits = waits
        self._numbers: dict[int, int] = {}
        """Digest of a task's id to the task's number. Some are too old to count."""
        self._forget_at = FORGOTTEN_AT_ONCE
        """The number of these at which the old ones are removed."""

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, task: TaskId) -> bool:
        """Adds a task. Returns False if one with a lower number has the same id."""
        digest = _digest(task)
        oldest = number - self._window
        first = self._numbers.get(digest)
        if first is None or (first < oldest and not self._waits(first)):
            first = self._numbers[digest] = number
        if len(self._numbers) >= self._forget_at:
            self._forget(oldest)
        return first >= number

    def number(self, task: TaskId) -> int | None:
        """Returns the number of the task that has this id, if it is known."""
        return self._numbers.get(_digest(task))

    def _forget(self, oldest: int) -> None:
        self._numbers = {
            digest: number
            for digest, number in self._numbers.items()
            if number >= oldest or self._waits(number)
        }
        self._forget_at = len(self._numbers) + max(FORGOTTEN_AT_ONCE, self._window // 8)


def _digest(task: TaskId) -> int:
    """The first 64 bits of a SHA-256."""
    return int.from_bytes(hashlib.sha256(json.dumps(task).encode()).digest()[:8], "little")
