"""Types that agents and environments share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.services.base.texts import encodable

MOST_NAMES = 256
"""Largest number of named rewards, and of metrics, of an episode."""
NAME_CHARACTERS = 128
"""Largest number of characters of such a name."""
ENVIRONMENT_ERROR = "environment_error"
"""The code of the failure of an action whose environment raised an exception."""
STEP_TIMEOUT = "step_timeout"
"""Code of the failure of a reset or a step that took longer than `step_s` of its environment."""


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A file of a task. Its bytes are fetched from the blob store when they are asked for."""

    name: str
    """Its relative path, with `/` between the parts."""
    size: int
    """Size in bytes."""
    fetch: Callable[[], Awaitable[Path]]

    async def path(self) -> Path:
        """Returns a local file with the bytes, verified. Do not write to it.

        Raises InfrastructureError if the blob store does not have it, or does not answer.
        """
        return await self.fetch()

    async def read(self) -> bytes:
        """Returns the bytes, verified. Raises InfrastructureError as `path` does."""
        return (await self.fetch()).read_bytes()


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task, as agents and environments see it."""

    number: int
    """The task's number in the run."""
    sample: int
    """Which of the task's episodes this is, from 0."""
    payload: Mapping[str, Any]
    """The task's content, from its source."""
    options: Mapping[str, Any]
    """The options of this agent or environment: the recipe's, overridden by the task's own."""
    seed: int
    """The task's seed. All its samples share it, so that they get the same environment."""
    artifacts: Mapping[str, TaskFile] = field(default_factory=dict)
    """The files that belong to the task, by name. Agents don't get them: it is always empty."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer of an environment to a reset or a step."""

    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Other data, as JSON values."""
    reward: float | None = None
    """The reward of this step; None if the step has no reward."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward, for reports."""
    terminated: bool = False
    """The episode ended by itself."""
    truncated: bool = False
    """The environment cut the episode short."""
    artifacts: Mapping[str, bytes | Path] = field(default_factory=dict)
    """Files that the environment gives out, by name: their bytes, or files with them. They are
    stored before the observation is recorded. For agents it is always empty: see
    `Episode.artifacts`."""

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


def check_names(values: Mapping[str, float]) -> None:
    """Checks named rewards or metrics, which every terminal record repeats.

    Raises ValueError if there are more than MOST_NAMES, or if a name has more than NAME_CHARACTERS
    or is no text that a record can hold.
    """
    for name in values:
        if not isinstance(name, str) or encodable(name) != name:
            raise ValueError(f"the name {name!r}, which is no text that a record can hold")
    if len(values) > MOST_NAMES:
        raise ValueError(f"{len(values)} names; at most {MOST_NAMES} are kept")
    if (longest := max(map(len, values), default=0)) > NAME_CHARACTERS:
        raise ValueError(f"a name has {longest} characters; at most {NAME_CHARACTERS} are kept")
