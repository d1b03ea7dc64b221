"""Single-player games of TextArena (https://www.textarena.ai).

Runs only in the child process. The games draw from Python's global `random`. Here each game has a
random state of its own, so that it doesn't depend on which other games are played at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.services.env.optional_imports import importing

with importing("textarena"):
    import textarena


MOST_CHARACTERS = 20_000
"""The end of an action that a game reads: policies reason before they move. The patterns of some
games take time that grows with the square of the text."""


@dataclass
class Game:
    """A game that is being played."""

    environment: Any
    random_state: Any
    """The state of `random` after the game's last call."""
    shown: str = ""
    """What its player has read."""


class Games:
    """Episodes of one game."""

    def __init__(self, id: str, kwargs: Mapping[str, Any] | None = None) -> None:
        """`id` and `kwargs` go to `textarena.make`.

        Raises UsageError if textarena has no such game.
        """
        self._id = id
        self._kwargs = dict(kwargs or {})
        self._open: dict[str, Game] = {}
        self._make()

    def reset(self, name: str, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """Show the rules and the first position, drawn with the task's seed."""
        random.seed(task["seed"])
        game = self._open[name] = Game(self._make(), random.getstate())
        with _own_random_state(game):
            try:
                game.environment.reset(num_players=1, seed=task["seed"])
            except AssertionError as error:
                raise UsageError(f"{self._id} is not a game for one player: {error}") from error
            return {"text": _news(game)}

    def step(self, name: str, action: str) -> Mapping[str, Any]:
        """Make a move. If the game refuses it, the text says so, and the game sets the penalty."""
        game = self._open[name]
        with _own_random_state(game):
            done, _ = game.environment.step(action[-MOST_CHARACTERS:])
            if not done:
                return {"text": _news(game), "reward": 0.0}
            rewards, about = game.environment.close()
            del self._open[name]
        reason = str((about or {}).get(0, {}).get("reason", ""))
        reward = float((rewards or {}).get(0, 0.0))
        return {"text": reason, "reward": reward, "terminated": True}

    def close(self, name: str) -> None:
        """Forget a game."""
        self._open.pop(name, None)

    def _make(self) -> Any:
        try:
            return textarena.make(self._id, **self._kwargs)
        except (ImportError, LookupError, OSError, TypeError, ValueError) as error:
            message = f"textarena.make({self._id!r}, **{self._kwargs}): {error}"
            raise UsageError(message[:500]) from error


@contextmanager
def _own_random_state(game: Game) -> Iterator[None]:
    random.setstate(game.random_state)
    try:
        yield
    finally:
        game.random_state = random.getstate()


def _news(game: Game) -> str:
    """Return what the player has not read yet: most games repeat the whole text at every turn."""
    _, observation = game.environment.get_observation()
    text = str(observation)
    news = text[len(game.shown) :] if text.startswith(game.shown) else text
    game.shown = text
    return news
