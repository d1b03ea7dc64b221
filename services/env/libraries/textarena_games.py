"""Single-player games of TextArena (https://www.textarena.ai).

Runs in the child process alone. Its games draw from Python's global `random`: here each has a state
of its own, so that a game's chance doesn't depend on which others are played beside it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError


@dataclass
class Game:
    """One game being played."""

    environment: Any
    chance: Any
    """The state of `random` when it was left."""
    told: str = ""
    """What its player has read."""


class Games:
    """Episodes of one game."""

    def __init__(self, id: str, kwargs: Mapping[str, Any] | None = None) -> None:
        """`id` and `kwargs` as `textarena.make` takes them. UsageError where it isn't installed, or
        has no such game."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the libraries that it imports
                import textarena
        except ImportError as error:
            raise UsageError(
                f"textarena is not installed ({error}): pip install 'headrace[textarena]'"
            ) from None
        self._library: Any = textarena
        self._id = id
        self._kwargs = dict(kwargs or {})
        self._open: dict[str, Game] = {}
        self._make()

    def reset(self, name: str, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rules and the first position, drawn by the task's seed."""
        random.seed(task["seed"])
        game = self._open[name] = Game(self._make(), random.getstate())
        with _own_chance(game):
            try:
                game.environment.reset(num_players=1, seed=task["seed"])
            except AssertionError as error:
                raise UsageError(f"{self._id} can't be played by one: {error}") from error
            return {"text": _news(game)}

    def step(self, name: str, action: str) -> Mapping[str, Any]:
        """The game's answer. What the game refuses is told, and costs what the game says."""
        game = self._open[name]
        with _own_chance(game):
            done, _ = game.environment.step(action)
            if not done:
                return {"text": _news(game), "reward": 0.0}
            rewards, about = game.environment.close()
            del self._open[name]
        reason = str((about or {}).get(0, {}).get("reason", ""))
        reward = float((rewards or {}).get(0, 0.0))
        return {"text": reason, "reward": reward, "terminated": True}

    def close(self, name: str) -> None:
        """Forgets a game."""
        self._open.pop(name, None)

    def _make(self) -> Any:
        try:
            return self._library.make(self._id, **self._kwargs)
        except (ImportError, LookupError, OSError, TypeError, ValueError) as error:
            said = f"textarena.make({self._id!r}, **{self._kwargs}): {error}"
            raise UsageError(said[:500]) from error


@contextmanager
def _own_chance(game: Game) -> Iterator[None]:
    random.setstate(game.chance)
    try:
        yield
    finally:
        game.chance = random.getstate()


def _news(game: Game) -> str:
    """What the player has not read yet: most games say all again at every turn."""
    _, observation = game.environment.get_observation()
    text = str(observation)
    news = text[len(game.told) :] if text.startswith(game.told) else text
    game.told = text
    return news
