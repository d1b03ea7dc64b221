"""How many episodes ended when, as numbers in buckets of equal width. Pure.

An episode is added once. So what is counted stays, even if the index forgets the episode, and an
answer takes no longer the more episodes a run has.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MOST_BUCKETS = 16_384
"""If there are more, neighbours are merged, and all buckets become twice as wide."""
FIRST_WIDTH_S = 1 / 64
RECENT_S = 600
"""The newest seconds with an end, whose counts are kept one by one: at least so many."""


@dataclass(slots=True)
class _Bucket:
    episodes: int = 0
    tokens: int = 0
    rewarded: int = 0
    rewards: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Bucket) -> None:
        self.episodes += other.episodes
        self.tokens += other.tokens
        self.rewarded += other.rewarded
        self.rewards += other.rewards
        self.failures.update(other.failures)


class EndedByTime:
    """Counts the ends of episodes. All times are in seconds since the epoch."""

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self._most = most
        self._width_s = FIRST_WIDTH_S
        self._buckets: dict[int, _Bucket] = {}
        self._recent: dict[int, list[int]] = {}
        """By whole second: episodes and tokens."""

    def add(self, at: float, reward: float | None, origin: str) -> None:
        """Adds an episode that ended. `origin` says who made it fail; empty if it did not fail."""
        one = _Bucket(episodes=1)
        if reward is not None and math.isfinite(reward):
            one.rewarded, one.rewards = 1, reward
        if origin:
            one.failures[origin] = 1
        self._add(at, one)

    def add_tokens(self, at: float, tokens: int) -> None:
        """Adds the tokens of an episode that ended at `at`: they may be read after its end."""
        self._add(at, _Bucket(tokens=tokens))

    def recent(self, since: float) -> tuple[int, int]:
        """Returns how many episodes ended from a time on, and how many tokens they have."""
        found = [counts for second, counts in self._recent.items() if second >= int(since)]
        return sum(episodes for episodes, _ in found), sum(tokens for _, tokens in found)

    def curves(self, begin: float, step_s: float, count: int) -> dict[str, Any]:
        """Returns `count` curves' points from `begin` on, each of `step_s` seconds, as JSON values.

        What ended earlier or later is in the first or in the last one.
        """
        points = [_Bucket() for _ in range(count)]
        for number, bucket in self._buckets.items():
            at = (number + 0.5) * self._width_s
            points[min(count - 1, max(0, int((at - begin) / step_s)))].add(bucket)
        origins = dict.fromkeys(origin for one in points for origin in one.failures)
        return {
            "episodes": [one.episodes for one in points],
            "tokens": [one.tokens for one in points],
            "failures": {origin: [one.failures[origin] for one in points] for origin in origins},
            "reward": [one.rewards / one.rewarded if one.rewarded else None for one in points],
        }

    def _add(self, at: float, one: _Bucket) -> None:
        self._buckets.setdefault(int(at / self._width_s), _Bucket()).add(one)
        while len(self._buckets) > self._most:
            self._merge()
        counts = self._recent.setdefault(int(at), [0, 0])
        counts[0] += one.episodes
        counts[1] += one.tokens
        if len(self._recent) > 2 * RECENT_S:
            for second in sorted(self._recent)[:-RECENT_S]:
                del self._recent[second]

    def _merge(self) -> None:
        self._width_s *= 2
        before, self._buckets = self._buckets, {}
        for number, bucket in before.items():
            self._buckets.setdefault(number // 2, _Bucket()).add(bucket)
