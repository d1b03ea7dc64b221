"""Any Gymnasium environment with discrete actions, spoken to in text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from services.errors import UsageError
from services.types import Observation, TaskView

T = TypeVar("T")


class GymnasiumEnvironment:
    """A discrete-action environment of Gymnasium (https://gymnasium.farama.org).

    `render` says how an observation becomes text: `value` as it is, or an import path of a
    function of (environment, observation, is it the first) to text. An action that is none of
    `actions` ends the episode with reward `invalid_reward`: it is the policy's doing.
    """

    replayable = True

    def __init__(
        self,
        id: str,
        actions: Mapping[str, int],
        kwargs: Mapping[str, Any] | None = None,
        render: str = "value",
        invalid_reward: float = 0.0,
        blocking: bool = True,
    ) -> None:
        """`actions` maps an action's text to its number; `kwargs` go to `gymnasium.make`.

        With `blocking` its calls run in a thread; a tiny environment is faster without.
        """
        self._render: Callable[[Any, Any, bool], str] = _load_render(render)
        self._actions = dict(actions)
        self._invalid_reward = invalid_reward
        self._blocking = blocking
        self._environment = _make(id, dict(kwargs or {}))

    async def reset(self, task: TaskView) -> Observation:
        """Resets with the task's seed."""
        seed = task.seed % 2**31
        observation, _ = await self._call(lambda: self._environment.reset(seed=seed))
        return Observation(text=self._render(self._environment, observation, True))

    async def step(self, action: str) -> Observation:
        """Steps by the action's text, stripped of white space around it."""
        number = self._actions.get(action.strip())
        if number is None:
            text = f"no action {action[:40]!r}; actions are {', '.join(self._actions)}"
            return Observation(text=text, reward=self._invalid_reward, terminated=True)
        observation, reward, terminated, truncated, _ = await self._call(
            lambda: self._environment.step(number)
        )
        return Observation(
            text=self._render(self._environment, observation, False),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    async def aclose(self) -> None:
        """Closes the environment."""
        await self._call(self._environment.close)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function) if self._blocking else function()


def frozen_lake_map(environment: Any, observation: Any, first: bool) -> str:
    """FrozenLake: first the map's cells, row by row, and the position; then the position alone.

    A position is one letter, from `a` at the top left.
    """
    position = chr(ord("a") + int(observation))
    if not first:
        return position
    cells = "".join(cell.decode() for row in environment.unwrapped.desc for cell in row)
    return cells + position


def frozen_lake_position(environment: Any, observation: Any, first: bool) -> str:
    """FrozenLake: the position as one letter, from `a` at the top left."""
    return chr(ord("a") + int(observation))


def _value(environment: Any, observation: Any, first: bool) -> str:
    plain = observation.tolist() if hasattr(observation, "tolist") else observation
    return plain if isinstance(plain, str) else json.dumps(plain)


RENDERS: Mapping[str, Callable[[Any, Any, bool], str]] = {
    "value": _value,
    "frozen_lake_map": frozen_lake_map,
    "frozen_lake_position": frozen_lake_position,
}


def _load_render(use: str) -> Callable[[Any, Any, bool], str]:
    from services.plugins import load

    if use in RENDERS:
        return RENDERS[use]
    found: Callable[[Any, Any, bool], str] = load("render", use, dict.fromkeys(RENDERS, ""))
    return found


def _make(id: str, kwargs: dict[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise UsageError("gymnasium is not installed: pip install 'headrace[gym]'") from None
    return gymnasium.make(id, **kwargs)
