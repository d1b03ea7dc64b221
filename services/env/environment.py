"""The public Environment API: one episode's world.

    class Guess:
        replayable = True

        def __init__(self, highest: int = 10) -> None: ...
        async def reset(self, task: TaskView) -> Observation: ...
        async def step(self, action: str) -> Observation: ...
        async def aclose(self) -> None: ...

It is made once an episode (mode `ephemeral`) or kept in a pool and reset (`persistent`), with the
recipe's options as keyword arguments. A task may set options of its own, but those that the class
lists in `recipe_only`, a frozenset of names: what names code, a program or an address. A replayable
one answers the same actions alike: after a crash it is rebuilt by stepping it again, and compared
with what was recorded. Raise InfrastructureError for what is nobody's doing: it is retried, never
rewarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from headrace.services.base.types import Observation, TaskView


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose an environment is: one attempt of one sample, and where its reset lies in the log."""

    task: int
    sample: int
    attempt: int
    partition: int
    offset: int
    expires_at: float
    """Seconds since the epoch."""


class Environment(Protocol):
    """One episode's world. Its methods must not block the asyncio loop."""

    replayable: bool
    """Whether the same task and actions give the same observations."""

    async def reset(self, task: TaskView) -> Observation:
        """Starts the world of a task. The first call, and in mode `persistent` not the last."""

    async def step(self, action: str) -> Observation:
        """Acts."""

    async def aclose(self) -> None:
        """Gives everything back."""


@runtime_checkable
class Judge(Protocol):
    """An environment that can score without an episode of its own."""

    async def score(self, payload: Mapping[str, Any]) -> Observation:
        """The score as the observation's reward."""


@runtime_checkable
class Resumable(Protocol):
    """An environment that outlives its worker: another finds it where it stands."""

    async def resume(self, task: TaskView, done: int) -> None:
        """Finds what was open, as action `done` left it (0 is the reset), instead of a reset.

        InfrastructureError `sandbox_lost` where it is gone, or began more than that.
        """

    async def release(self) -> None:
        """Ends this worker's part of it, and leaves it to be found."""


@runtime_checkable
class Named(Protocol):
    """An environment that is told whose it is, before each reset and before it is found again."""

    def set_name(self, name: str) -> None:
        """Takes a name that no other attempt of any episode has, and every worker knows."""


MakeEnvironment = Callable[..., Environment]
"""An environment's class, or a function that makes one, from its options."""
