"""The environment: the policy pays an amount exactly, with a few coins."""

from __future__ import annotations

from headrace import Observation, TaskView, UsageError

COINS = ("1", "2", "5")


class ExactChange:
    """An action is one coin. The observation is the amount that is still to be paid."""

    replayable = True  # The same task and the same coins always give the same observations.

    def __init__(self, coins: int = 3) -> None:
        """`coins` is an option: the recipe sets it in `[environments.default.options]`."""
        self._coins = coins

    async def reset(self, task: TaskView) -> Observation:
        """Starts an episode. The payload is a line of tasks.jsonl."""
        try:
            self._amount = int(task.payload["amount"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"task {task.number}: its payload has no number `amount`") from error
        self._paid = 0
        return Observation(text=str(self._amount))

    async def step(self, action: str) -> Observation:
        """Takes a coin. The reward is 1 if the amount is paid exactly, else 0."""
        if action not in COINS:
            # A wrong answer of the policy is no error: it ends the episode without success.
            return Observation(text="unknown coin", reward=0.0, terminated=True)
        self._paid += 1
        self._amount -= int(action)
        if self._amount == 0:
            return Observation(text="thanks", reward=1.0, terminated=True)
        if self._amount < 0 or self._paid == self._coins:
            return Observation(text="not exact", reward=0.0, terminated=True)
        return Observation(text=str(self._amount))

    async def aclose(self) -> None:
        """Releases what the environment holds: nothing here."""
