"""The rewards of the turns as they are, for a critic in the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.stream_jobs.advantages import TurnAdvantage


class TurnRewards(TurnAdvantage):
    """Passes the rewards of the turns on: the trainer's critic makes advantages of them.

    A recipe with `training.critic` needs this estimator, and no other recipe can have it. The
    samples of a group are not compared, so one sample for each task is enough. If the rewards of a
    sample's turns are not in the log, the reward of the episode belongs to its last turn.
    """

    def __call__(
        self, rewards: Sequence[float], turn_rewards: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        """Returns the rewards of each sample's turns, or its one reward."""
        return [
            list(turns) or [reward] for reward, turns in zip(rewards, turn_rewards, strict=True)
        ]
