"""Nim: two players take 1 to 3 stones in turn, and who takes the last one wins.

Who leaves a multiple of four stones wins, so every position has a right move or is lost. The agent
lets the role `player` or `opponent` move, as the environment says. In the items with the opponent
`perfect`, the environment makes the opponent's moves itself, without a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace import Environment, Episode, Item, Observation, TaskView

PLAYER, OPPONENT = "player", "opponent"
"""The roles."""
MOST = 3
"""Most stones that a move takes."""


def games(*, largest: int = 9) -> Iterator[Item]:
    """Yields a game for every number of stones from 2 to `largest`, begun by each of the roles."""
    for stones in range(2, largest + 1):
        for begins in (PLAYER, OPPONENT):
            yield Item(f"{stones}-{begins}", {"stones": stones, "begins": begins})


def winnable(*, largest: int = 9) -> Iterator[Item]:
    """Yields the games that the player wins against a perfect opponent if it plays perfectly."""
    for item in games(largest=largest):
        if (item.payload["stones"] % (MOST + 1) > 0) == (item.payload["begins"] == PLAYER):
            yield Item(item.item_id, {**item.payload, "opponent": "perfect"})


class Nim(Environment):
    """Shows who moves and how many stones there are, and takes the number of stones to take.

    A move that is not possible loses. Each role's reward is 1 if it wins, and 0 if it loses.
    """

    replayable = True

    async def reset(self, task: TaskView) -> Observation:
        """Begins the game of the task."""
        payload: Mapping[str, Any] = task.payload
        self._stones = int(payload["stones"])
        self._moves = str(payload["begins"])
        self._perfect = payload.get("opponent") == "perfect"
        return self._shown()

    async def step(self, action: str) -> Observation:
        """Makes the move of the role whose turn it is."""
        self._move(int(action) if action in {"1", "2", "3"} else 0)
        return self._shown()

    async def aclose(self) -> None:
        """Holds nothing."""

    def _shown(self) -> Observation:
        """Lets a perfect opponent move, and shows the position or the result."""
        if self._perfect and self._moves == OPPONENT and self._stones > 0:
            self._move(max(1, self._stones % (MOST + 1)))
        if self._stones > 0:
            return Observation(f"{self._moves} {self._stones}")
        # The other one took the last stone, or made a move that is not possible.
        rewards = {role: float(role != self._moves) for role in (PLAYER, OPPONENT)}
        return Observation(rewards=rewards, terminated=True)

    def _move(self, taken: int) -> None:
        possible = 1 <= taken <= self._stones
        other = OPPONENT if self._moves == PLAYER else PLAYER
        if possible:
            self._stones -= taken
            self._moves = other
        else:  # the one who moves loses
            self._stones = 0


async def play(episode: Episode) -> None:
    """Lets the role move whose turn it is, until the game ends. A move needs no history."""
    shown = await episode.reset()
    while not shown.terminated:
        moves, stones = shown.text.split()
        move = await episode.new_conversation(moves).generate(f"{stones}:")
        shown = await episode.step(move.text)
