"""What agents and environments both speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task, as an agent or an environment sees it."""

    number: int
    """The task's number in the run."""
    sample: int
    """Which of the task's episodes this is, from 0."""
    payload: Mapping[str, Any]
    """What the task's source says of it."""
    options: Mapping[str, Any]
    """The recipe's options of this agent or environment, under the task's own."""
    seed: int
    """The task's seed: equal for all its samples, so that they meet the same world."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to a reset or a step."""

    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What is not text, as JSON values."""
    reward: float | None = None
    """Of this step; None where it gives none."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward, for reports."""
    terminated: bool = False
    """The episode reached an end of its own."""
    truncated: bool = False
    """The environment cut the episode short."""

    @property
    def done(self) -> bool:
        """Nothing more can be done in this episode."""
        return self.terminated or self.truncated
