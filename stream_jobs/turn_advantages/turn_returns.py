"""An advantage for each turn, from the rewards that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from pydantic import Field

from headrace.stream_jobs.advantages import GRPO_EPSILON, TurnAdvantage, deviation, dr_grpo
from headrace.stream_jobs.counted_samples import ROUNDING


class TurnReturns(TurnAdvantage):
    """Compares each turn's discounted return with that of the same turn in the group's samples.

    With r the rewards that follow the turns of a sample, its return from turn k on is

        G[k] = sum over l >= k of discount^(l - k) * r[l]

    and the advantage of turn k, with R the episode's reward, is

        (R - mean R) / (deviation R + 1e-6) + weight * (G[k] - mean G[k]) / (deviation G[k] + 1e-6)

    over the group's samples that have a turn k. It is the sum that GiGPO uses (arXiv 2505.10978),
    but GiGPO compares turns that begin in equal states. The results of a task don't record states,
    so this compares turns of equal number. Both are the same for the first turn, because every
    sample begins in the same state. A turn that no other sample has gets the first part alone, and
    so does every turn of a sample whose rewards of turns are not in the log.

    The log has rewards of turns as float32. Returns are equal if they differ by at most 1e-6 times
    the sum of the absolute rewards of a sample's turns, the largest such sum of those compared.
    """

    discount: float = Field(default=0.95, ge=0, le=1)
    """How much a reward counts per turn that it comes later."""
    weight: float = Field(default=1.0, ge=0)
    """Weight of the turn's part of the advantage beside the episode's."""
    normalize: bool = True
    """Whether both parts are divided by their deviation."""

    def __call__(
        self, rewards: Sequence[float], turn_rewards: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        """Returns the advantages of each sample's turns."""
        of_episodes = self._compared(rewards)
        returns = [self._returns(one) for one in turn_rewards]
        sizes = [fsum(map(abs, one)) for one in turn_rewards]
        found = [
            [first] * max(1, len(one)) for first, one in zip(of_episodes, returns, strict=True)
        ]
        for turn in range(max(map(len, returns), default=0)):
            samples = [number for number, one in enumerate(returns) if turn < len(one)]
            values = [returns[number][turn] for number in samples]
            rounding = ROUNDING * max(sizes[number] for number in samples)
            equal = max(values) - min(values) <= rounding
            compared = [0.0] * len(values) if equal else self._compared(values)
            for number, value in zip(samples, compared, strict=True):
                found[number][turn] += self.weight * value
        return found

    def _compared(self, values: Sequence[float]) -> list[float]:
        scale = deviation(values) + GRPO_EPSILON if self.normalize else 1.0
        return [value / scale for value in dr_grpo(values)]

    def _returns(self, rewards: Sequence[float]) -> list[float]:
        found: list[float] = []
        following = 0.0
        for reward in reversed(rewards):
            following = reward + self.discount * following
            found.append(following)
        return found[::-1]
