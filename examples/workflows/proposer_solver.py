"""A proposer that chooses sums, and a solver that answers them.

The proposer completes a sum whose first number is given. It gets a reward if the solver fails, and
the solver gets one if it does not fail. So the proposer looks for the sums that the solver can't do
yet, and the solver practises these. All sums can be solved, so no proposal is unfair.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace import Environment, Episode, Item, Observation, TaskView

NUMBERS = 4
"""The numbers of the sums are below it."""


def beginnings() -> Iterator[Item]:
    """Yields the first number of each sum. The proposer chooses the second one."""
    for first in range(NUMBERS):
        yield Item(str(first), {"first": first})


def all_sums() -> Iterator[Item]:
    """Yields every sum, so that the solver is evaluated without a proposer."""
    for first in range(NUMBERS):
        for second in range(NUMBERS):
            yield Item(f"{first}+{second}", {"first": first, "second": second})


class ProposedSums(Environment):
    """Shows the beginning of a sum, takes the second number, and then takes the answer.

    If the task has both numbers, it shows the whole sum at once. A proposal that is not a number
    below NUMBERS ends the episode, and neither role gets a reward.
    """

    replayable = True

    async def reset(self, task: TaskView) -> Observation:
        """Shows the beginning of the task's sum, or the whole sum."""
        self._first = int(task.payload["first"])
        second = task.payload.get("second")
        self._second = int(second) if second is not None else None
        self._proposed = self._second is None
        return self._shown()

    async def step(self, action: str) -> Observation:
        """Takes the second number if it is missing, else the answer."""
        if self._second is None:
            if action not in map(str, range(NUMBERS)):
                return Observation(rewards={"proposer": 0.0, "solver": 0.0}, terminated=True)
            self._second = int(action)
            return self._shown()
        solved = float(action == str(self._first + self._second))
        rewards = {"solver": solved}
        if self._proposed:
            rewards["proposer"] = 1 - solved
        return Observation(rewards=rewards, terminated=True)

    async def aclose(self) -> None:
        """Holds nothing."""

    def _shown(self) -> Observation:
        whole = f"{self._second}=" if self._second is not None else ""
        return Observation(f"{self._first}+{whole}")


async def propose_and_solve(episode: Episode) -> None:
    """The proposer completes the sum, unless it is whole, and the solver answers it."""
    shown = await episode.reset()
    if not shown.text.endswith("="):
        proposed = await episode.generate(shown.text, role="proposer")
        shown = await episode.step(proposed.text)
    if not shown.terminated:
        answer = await episode.generate(shown.text, role="solver")
        await episode.step(answer.text)
