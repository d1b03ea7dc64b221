"""The public Environment API: the world in which one episode happens.

An environment is a class. The recipe names it by import path:

    class Guess:
        replayable = True

        def __init__(self, highest: int = 10) -> None: ...
        async def reset(self, task: TaskView) -> Observation: ...
        async def step(self, action: str) -> Observation: ...
        async def aclose(self) -> None: ...

**Options.** The constructor gets the recipe's options as keyword arguments. A task may override
them, and any team may submit tasks. So list each option that names code, a program or an address
in the class attribute `recipe_only`, a frozenset of names: a task that sets one of them fails.

**Life.** In mode `ephemeral` every attempt of an episode gets a new instance. In mode `persistent`
an instance whose episode ended waits in a pool, and the next episode with the same options resets
it. The worker makes one call at a time to an instance. If the episode is closed or reaches its
deadline during a call, the worker cancels that call and then calls `aclose`.

**Files.** A class with the attribute `takes_files = True` gets the files that belong to a task, as
`task.artifacts`: `await task.artifacts["in/table.csv"].read()`. A task with files fails if its
environment does not take them. To give files out, return an `Observation` with `artifacts`, or
implement `Collecting`. They are recorded with the trajectory and the outcome, by reference.

**After a crash.** If the worker dies, the worker that is assigned the partition makes a new
instance. If the class is `replayable`, that worker repeats the recorded reset and steps and
compares the observations with the recorded ones. If the class implements `Resumable`, it resumes
the environment instead. Otherwise the episode gets a new attempt.

**Errors.** A failure is never a reward. Raise `InfrastructureError` for what neither the policy nor
the environment caused, for example a host that is down: the episode gets a new attempt, up to
`tasks.attempts`. Raise `UsageError` for a wrong option or payload: the episode fails at once. Every
other exception counts as a failure of the environment: the episode gets a new attempt, too. What
the policy did wrong is not an error: return an `Observation` that says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from headrace.errors import InfrastructureError
from headrace.services.base.types import Observation, TaskView


@dataclass(frozen=True, slots=True)
class Claim:
    """The attempt that an environment belongs to, and the location of its reset in the log."""

    task: int
    """The task's number."""
    sample: int
    attempt: int
    partition: int
    """Partition of `actions` that holds the reset."""
    offset: int
    """Offset of the reset in that partition."""
    expires_at: float
    """The episode's deadline, in seconds since the epoch."""
    repeated: bool = field(default=True, compare=False)
    """Whether an earlier owner of the partition may have begun the reset."""


class Environment(Protocol):
    """The world of one episode. Its methods must not block the asyncio loop."""

    replayable: bool
    """Whether the same task and actions always give the same observations."""

    async def reset(self, task: TaskView) -> Observation:
        """Start the episode of a task and return the first observation.

        This is the first call, unless `Resumable.resume` is. In mode `persistent` the same instance
        is reset for many episodes. All samples of a task have the same `task.seed`: give them the
        same world.
        """

    async def step(self, action: str) -> Observation:
        """Carry out the policy's action. `action` is the text that the agent passed.

        To end the episode, return an observation with `terminated` (the world came to its end) or
        `truncated` (a limit of the environment cut it short).
        """

    async def aclose(self) -> None:
        """Release everything that the environment holds. It has 2 seconds.

        It may be called before `reset`, and after a call that failed or was cancelled.
        """


class AskingAgain(ABC):
    """The base of environments that ask a server again while it has no room or is not there."""

    @property
    @abstractmethod
    def busy(self) -> InfrastructureError | None:
        """Why the last call did not get an answer, if it was asked again.

        If `step_s` ends such a call, this is its failure: the policy did nothing that hangs.
        """


@runtime_checkable
class Judge(Protocol):
    """An environment that can also score, for `episode.score`.

    Each score gets an environment of its own, which is neither reset nor stepped.
    """

    async def score(self, payload: Mapping[str, Any]) -> Observation:
        """Return an observation whose `reward` is the score of what the agent sent."""


@runtime_checkable
class Collecting(Protocol):
    """An environment that gives out files at the end of each attempt.

    The files that the task or the recipe names by `collect`, such as `out/*`, become artifacts.
    """

    async def collect(self, patterns: Sequence[str]) -> Observation:
        """Return an observation whose `artifacts` are the files that match, and change nothing.

        `headrace.matches(name, patterns)` says whether a name matches. The call comes after the
        last step, also if the episode is over, and may be repeated. The observation has no reward.
        """


@runtime_checkable
class Resumable(Protocol):
    """An environment that survives its worker, for example in a container or on a server.

    If a worker stops or loses the partition, it calls `release`. The worker that is assigned the
    partition next makes a new instance, passes it the same name if it is `Named`, and calls
    `resume`. After a crash `resume` is called without a `release`. For a short time the old worker
    may still run: the environment itself must make sure that no action is carried out twice.
    """

    async def resume(self, task: TaskView, done: int) -> None:
        """Find the open environment in the state that action `done` left. No `reset` follows.

        `done` is the index of the last action whose observation is recorded; 0 is the reset. Raise
        `InfrastructureError("sandbox_lost")` if the environment is gone, or if a later action was
        begun: nobody can say how much of it was done. The episode then gets a new attempt, unless
        that later action was answered after all: then `resume` is called again, for that action.
        So leave what you find as it is.
        """

    async def release(self) -> None:
        """Close this worker's connections, and leave the environment open for the next worker."""


@runtime_checkable
class Named(Protocol):
    """An environment that wants to know which attempt it belongs to.

    Use the name to find the environment again in `Resumable.resume`, or as an id in another system.
    """

    def set_name(self, name: str) -> None:
        """Take the attempt's name. Called before each `reset` and before `resume`.

        The name is unique among all attempts of all episodes, and every worker computes the same.
        """
