"""Gymnasium environments with discrete actions, whose observations and actions become text."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from headrace.errors import UsageError
from headrace.services.base.plugins import load
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.optional_imports import importing

with importing("gym"):
    import gymnasium
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

T = TypeVar("T")

Render = Callable[[Any, Any, bool], str]
"""Turns the environment, its observation, and whether that is the episode's first, into text."""
Seeded = Callable[[int], Mapping[str, Any]]
"""Turns a task's seed into arguments of `gymnasium.make`, so that every task has its own world."""

RENDERS = {
    name: f"{__name__}:{name}" for name in ("value", "frozen_lake_holes", "frozen_lake_position")
}
SEEDED = {"random_frozen_lake": f"{__name__}:random_frozen_lake"}
POSITIONS = string.ascii_lowercase + string.ascii_uppercase + string.digits + "+/"
"""FrozenLake's cells, row by row: one ASCII character each, enough for an 8x8 map."""


class GymnasiumEnvironment:
    """A Gymnasium environment with discrete actions (https://gymnasium.farama.org).

    All samples of a task have the same world: the task's seed resets it, and with `seeded` also
    makes it. A text that is not in `actions` ends the episode with the reward `invalid_reward`: the
    policy did that, so it is not a failure.
    """

    replayable = True
    recipe_only = frozenset({"id", "render", "seeded"})

    def __init__(
        self,
        id: str,
        actions: Mapping[str, int],
        kwargs: Mapping[str, Any] | None = None,
        seeded: str | None = None,
        render: str = "value",
        invalid_reward: float = 0.0,
        blocking: bool = True,
    ) -> None:
        """Raises UsageError if a name is unknown.

        Options:
            id: The id for `gymnasium.make`, such as `FrozenLake-v1`.
            actions: Maps an action's text to its number.
            kwargs: Further arguments of `gymnasium.make`.
            seeded: A function that maps a task's seed to arguments of `gymnasium.make`: a built-in,
                or an import path. They override `kwargs`, and every reset makes a new environment.
                Absent: all tasks have the same `kwargs`.
            render: A function that turns an observation into text: a built-in, or an import path.
            invalid_reward: Reward of a text that is not in `actions`.
            blocking: Whether calls run in a thread. A tiny environment is faster without one.
        """
        self._render: Render = load("render", render, RENDERS)
        self._seeded: Seeded | None = load("seeded", seeded, SEEDED) if seeded else None
        self._id = id
        self._kwargs = dict(kwargs or {})
        self._actions = dict(actions)
        self._invalid_reward = invalid_reward
        self._blocking = blocking
        self._environment: Any = None
        _check_id(id)

    async def reset(self, task: TaskView) -> Observation:
        """Reset with the task's seed. Raises UsageError if the environment can't be made."""
        return Observation(text=await self._call(lambda: self._reset(task.seed % 2**31)))

    async def step(self, action: str) -> Observation:
        """Step with the action's text; white space around it is ignored."""
        number = self._actions.get(action.strip())
        if number is None:
            text = f"no action {action[:40]!r}; actions are {', '.join(self._actions)}"
            return Observation(text=text, reward=self._invalid_reward, terminated=True)
        return await self._call(lambda: self._step(number))

    async def aclose(self) -> None:
        """Close the environment."""
        await self._call(self._close)

    def _reset(self, seed: int) -> str:
        if self._environment is None or self._seeded is not None:
            self._close()
            extra = self._seeded(seed) if self._seeded is not None else {}
            self._environment = _make(self._id, {**self._kwargs, **extra}, self._actions)
        observation, _ = self._environment.reset(seed=seed)
        return self._render(self._environment, observation, True)

    def _step(self, number: int) -> Observation:
        observation, reward, terminated, truncated, _ = self._environment.step(number)
        return Observation(
            text=self._render(self._environment, observation, False),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function) if self._blocking else function()


def value(environment: Any, observation: Any, first: bool) -> str:
    """Return the observation as JSON with arrays as lists; return text unchanged."""
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, default=_plain)


def frozen_lake_holes(environment: Any, observation: Any, first: bool) -> str:
    """FrozenLake up to 5x5: the first text lists the holes, and every text ends with the position.

    A hole is the upper-case letter of its position. Start and goal are not shown: they are in the
    corners of all of Gymnasium's maps.
    """
    position = frozen_lake_position(environment, observation, first)
    if not first:
        return position
    cells = [cell for row in environment.unwrapped.desc for cell in row]
    if len(cells) > len(string.ascii_lowercase):
        raise UsageError(
            f"render: a FrozenLake of {len(cells)} cells has more than the alphabet's letters; "
            f"choose a smaller map, or use a render of your own"
        )
    holes = [POSITIONS[cell].upper() for cell, kind in enumerate(cells) if kind == b"H"]
    return "".join(holes) + position


def frozen_lake_position(environment: Any, observation: Any, first: bool) -> str:
    """FrozenLake up to 8x8: return the position as one ASCII character; `a` is at the top left."""
    position = int(observation)
    if position >= len(POSITIONS):
        raise UsageError(
            f"render: FrozenLake's cell {position} has no letter; maps have up to "
            f"{len(POSITIONS)} cells, or use a render of your own"
        )
    return POSITIONS[position]


def random_frozen_lake(seed: int) -> Mapping[str, Any]:
    """FrozenLake: make a random 4x4 map, three of five cells frozen, with a path to the goal.

    There are 3,828 such maps. With more ice, most tasks would share a few hundred maps, and a
    single path would solve a third of the tasks.
    """
    return {"desc": generate_random_map(size=4, p=0.6, seed=seed)}


def _plain(part: Any) -> Any:
    if hasattr(part, "tolist"):
        return part.tolist()
    raise UsageError(
        f"render: `value` can't write a {type(part).__name__} as JSON; use a render of your own"
    )


def _check_id(id: str) -> None:
    """Raise UsageError if `gymnasium.make` can't find the environment's id."""
    name = id.partition(":")[2] or id  # of `module:id`, which `make` imports first
    try:
        gymnasium.envs.registration.parse_env_id(name)
        if name == id:
            gymnasium.spec(id)
    except gymnasium.error.Error as error:
        raise UsageError(f"environment id {id!r}: {error}") from error


def _make(id: str, kwargs: Mapping[str, Any], actions: Mapping[str, int]) -> Any:
    """Make the environment without Gymnasium's checker, which would double the time."""
    try:
        environment = gymnasium.make(id, **{"disable_env_checker": True, **kwargs})
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"gymnasium.make({id!r}, **{kwargs}): {reason}") from error
    space = environment.action_space
    for text, number in actions.items():
        if not isinstance(space, gymnasium.spaces.Discrete) or not space.contains(number):
            environment.close()
            raise UsageError(f"actions: {text!r} is {number}, which is not in {space} of {id}")
    return environment
