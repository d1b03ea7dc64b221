"""What an evaluation says of a policy's version: avg@k and pass@k, with 95 % intervals. Pure.

The unit is the item (one task of k samples). Its pass@k is estimated from n >= k samples, c of
them passed, by 1 - C(n-c, k) / C(n, k), which is unbiased: Chen et al., "Evaluating Large Language
Models Trained on Code" (arXiv:2107.03374), equation 1. avg@k is the mean over items of the mean
reward; its interval is the mean's, over items as clusters, by the central limit theorem (Miller,
"Adding Error Bars to Evals", arXiv:2411.00640, section 2.2). That of pass@k is Wilson's (JASA 22,
1927) for as many trials as there are items: what lies in [0, 1] varies at most as a coin does, so
it is never too narrow, and never of width 0 as the former is where all items agree.

A sample that the infrastructure, the operator or nobody's reward failed says nothing of the policy
and is left out; one that ran into a limit without a reward has failed, with reward 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from headrace.schemas.events import EpisodeEnded, TaskEnded

Z = 1.959963984540054
"""Of the normal distribution: 95 % lie within so many deviations."""
LIMITS = frozenset({"turn_limit", "token_limit", "overflow"})
"""Endings that are the policy's own doing."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The chance that one of k samples passes, without bias, of `samples` of which `passed` did."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed among {samples} samples is not defined")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and where it lies at 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_tree(self) -> dict[str, float]:
        """For JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def clustered(means: Sequence[float]) -> Estimate:
    """The mean of items' means. A single item says nothing of others: its interval has no end."""
    value = fmean(means)
    if len(means) < 2:
        return Estimate(value, -math.inf, math.inf)
    error = Z * stdev(means) / math.sqrt(len(means))
    return Estimate(value, value - error, value + error)


def wilson(value: float, trials: int) -> Estimate:
    """A share of `trials`, in [0, 1]."""
    spread = Z * Z / trials
    middle = (value + spread / 2) / (1 + spread)
    error = Z / (1 + spread) * math.sqrt(value * (1 - value) / trials + spread / (4 * trials))
    return Estimate(value, max(0.0, middle - error), min(1.0, middle + error))


@dataclass
class EvaluationResult:
    """One version of one policy, measured. Add each task once."""

    passing: float = 1.0
    """The reward from which on a sample has passed."""
    rewards: list[tuple[float, ...]] = field(default_factory=list)
    """Of each item, its samples' that count."""
    asked: int = 0
    """Most samples of one item: the k that was asked for."""
    failed: int = 0
    """Samples that say nothing of the policy."""

    def add(self, ended: TaskEnded) -> None:
        """Takes a task in."""
        rewards = [reward_of(outcome) for outcome in ended.outcomes]
        counted = tuple(reward for reward in rewards if reward is not None)
        self.asked = max(self.asked, len(rewards))
        self.failed += len(rewards) - len(counted)
        if counted:
            self.rewards.append(counted)

    @property
    def average(self) -> Estimate | None:
        """avg@k; None where no sample counts."""
        return clustered([fmean(item) for item in self.rewards]) if self.rewards else None

    def passes(self, k: int) -> Estimate | None:
        """pass@k over the items that have so many samples; None where none has."""
        values = [
            pass_at_k(len(item), sum(reward >= self.passing for reward in item), k)
            for item in self.rewards
            if len(item) >= k
        ]
        return wilson(fmean(values), len(values)) if values else None

    def powers(self) -> Iterator[int]:
        """1, 2, 4, … and the k that was asked for."""
        k = 1
        while k < self.asked:
            yield k
            k *= 2
        if self.asked:
            yield self.asked

    def brief(self) -> str:
        """avg@k in a word."""
        return "-" if self.average is None else f"{self.average.value:.3f}"

    def __str__(self) -> str:
        k = self.asked
        figures = {f"avg@{k}": self.average, f"pass@{k}": self.passes(k) if k else None}
        told = [f"{name} {value}" for name, value in figures.items() if value is not None]
        failed = f"   failed {self.failed}" if self.failed else ""
        return "   ".join([*told, f"{len(self.rewards)} items"]) + failed

    def to_tree(self) -> dict[str, object]:
        """For JSON. An interval without an end is null there."""
        passes = {str(k): one.to_tree() for k in self.powers() if (one := self.passes(k))}
        average = self.average
        mean = None
        if average is not None:
            mean = {
                name: value if math.isfinite(value) else None
                for name, value in average.to_tree().items()
            }
        return {
            "items": len(self.rewards),
            "samples": self.asked,
            "failed": self.failed,
            "avg": mean,
            "pass": passes,
        }


def reward_of(outcome: EpisodeEnded) -> float | None:
    """What a sample is worth to an evaluation; None where it says nothing of the policy."""
    if outcome.failure is not None and outcome.failure.origin != "policy":
        return None
    if outcome.reward is not None and math.isfinite(outcome.reward):
        return outcome.reward
    return 0.0 if outcome.ending in LIMITS else None


class Evaluations:
    """The evaluations of a run, by policy and version."""

    def __init__(self, passing: float = 1.0) -> None:
        self._passing = passing
        self._measured: dict[str, dict[int, EvaluationResult]] = {}

    def on_task_ended(self, ended: TaskEnded) -> None:
        """Takes a task in, once; what does not evaluate, or was cancelled, says nothing."""
        if ended.purpose != "evaluate" or ended.closed_by != "all":
            return
        # All of a task's tokens are of the versions that its start names.
        versions = {
            use.policy: use.oldest_version
            for outcome in ended.outcomes
            for use in outcome.policies
            if use.oldest_version >= 0
        }
        for policy, version in versions.items():
            known = self._measured.setdefault(policy, {})
            known.setdefault(version, EvaluationResult(self._passing)).add(ended)

    def of(self, policy: str) -> dict[int, EvaluationResult]:
        """One policy's, by version, in order."""
        known = self._measured.get(policy, {})
        return {version: known[version] for version in sorted(known)}

    def to_tree(self) -> dict[str, object]:
        """For JSON."""
        return {
            policy: {str(version): one.to_tree() for version, one in self.of(policy).items()}
            for policy in sorted(self._measured)
        }
