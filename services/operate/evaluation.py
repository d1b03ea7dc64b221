"""Computes avg@k and pass@k of a policy's version, with 95 % intervals. Pure functions and classes.

The unit is the item: one task of k samples. If c of an item's n >= k samples passed, its pass@k is
1 - C(n-c, k) / C(n, k). This estimate is unbiased: Chen et al., "Evaluating Large Language Models
Trained on Code" (arXiv:2107.03374), equation 1. avg@k is the mean over items of the mean reward.
Its interval treats items as clusters, with the standard error of Miller, "Adding Error Bars to
Evals" (arXiv:2411.00640), section 2.2, and the quantile of Student's t ("The Probable Error of a
Mean", Biometrika 6, 1908) with one degree of freedom less than there are items. With few items the
standard error itself is uncertain, and the quantile of a normal distribution ignores that.

The interval of pass@k is Wilson's (JASA 22, 1927) with one trial per item. A value in [0, 1] varies
at most as much as a coin, so this interval is never too narrow, and it never has width 0.

If all rewards lie in [0, 1], so does their mean. The interval of avg@k is then cut to [0, 1], which
never removes the true value. If moreover all items agree, their standard error is 0 and says
nothing: then avg@k has Wilson's interval, too. If all differences between two runs are equal, items
that were not played may still differ in any way. Wilson's interval bounds the share of such items,
and so the mean. If rewards lie elsewhere, nothing bounds what other items have: if all items agree,
or if there is only one, the interval is infinite, which says that it is not known.

A sample is left out if it failed because of anything but the policy, or if it has no reward: it
says nothing about the policy. But a sample that ended at a limit or at its deadline without a
reward counts with reward 0. If these were left out, the samples of hard items would be missing.

Each policy is measured by its own reward: the mean of its roles' rewards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev

from headrace.schemas.events import EpisodeEnded, TaskEnded
from headrace.schemas.role_rewards import are_equal, passes, policy_reward

Z = 1.959963984540054
"""95 % of a normal distribution lie within this many standard deviations."""
SHARE = (0.0, 1.0)
"""The bounds of a share, and of a mean of rewards in [0, 1]."""
LIMITS = frozenset(
    {"turn_limit", "token_limit", "overflow", "deadline", "step_timeout", "exception"}
)
"""Endings that the policy caused. Who is too slow for the deadline has not solved the item."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimates the chance that at least one of k samples passes, without bias.

    `passed` of `samples` samples have passed. Raises ValueError unless 1 <= k <= samples.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed among {samples} samples is not defined")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_tree(self) -> dict[str, float | None]:
        """Returns JSON values, with null for an infinite end of the interval."""
        return {
            name: value if math.isfinite(value) else None for name, value in asdict(self).items()
        }


def student_t(freedom: int) -> float:
    """Returns how many standard errors hold 95 % of Student's t with `freedom` >= 1 degrees.

    Exact for 1 and 2 degrees. Else the expansion of Abramowitz and Stegun, "Handbook of
    Mathematical Functions", 26.7.5, which is at most 0.12 % too small (at 3 degrees).
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92_160,
    )
    return Z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def clustered(
    means: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Estimate:
    """Estimates the mean from the items' means. It is known to lie within `bounds`.

    With a single item the interval is all that the bounds allow, and so it is without bounds if all
    means are equal, but for rounding.
    """
    value, (lowest, highest) = fmean(means), bounds
    equal = are_equal(min(means), max(means))
    if len(means) < 2 or (equal and math.isinf(highest - lowest)):
        return Estimate(value, lowest, highest)
    if equal and bounds == SHARE:
        return wilson(value, len(means))
    if equal:
        other = wilson(0.0, len(means)).high
        low, high = value - other * (value - lowest), value + other * (highest - value)
        return Estimate(value, low, high)
    error = student_t(len(means) - 1) * stdev(means) / math.sqrt(len(means))
    return Estimate(value, max(lowest, value - error), min(highest, value + error))


def wilson(value: float, trials: int) -> Estimate:
    """Estimates a share in [0, 1] from its observed value in `trials` trials."""
    spread = Z * Z / trials
    middle = (value + spread / 2) / (1 + spread)
    error = Z / (1 + spread) * math.sqrt(value * (1 - value) / trials + spread / (4 * trials))
    return Estimate(value, max(0.0, middle - error), min(1.0, middle + error))


@dataclass
class EvaluationResult:
    """The evaluation of one version of one policy. Add each task once."""

    passing: float = 1.0
    """The lowest reward with which a sample passes, but for rounding."""
    policy: str = ""
    """The policy whose own reward counts. Empty: the episode's reward counts."""
    rewards: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """The rewards of each item's samples that count, by the source and the id of its task."""
    asked: int = 0
    """The most samples of one item, which is the requested k."""
    failed: int = 0
    """The number of samples that are left out."""
    players: set[str] = field(default_factory=set)
    """The policies that have a turn in any sample."""
    _tree: dict[str, object] | None = field(default=None, init=False, repr=False, compare=False)
    """What `to_tree` returned since the newest task was added: a page asks again and again."""

    def add(self, ended: TaskEnded) -> None:
        """Adds a task that has ended."""
        self._tree = None
        rewards = [reward_of(outcome, self.policy) for outcome in ended.outcomes]
        counted = tuple(reward for reward in rewards if reward is not None)
        self.asked = max(self.asked, len(rewards))
        self.failed += len(rewards) - len(counted)
        self.players |= {use.policy for one in ended.outcomes for use in one.policies}
        if counted:
            self.rewards[ended.source, ended.task_id] = counted

    @property
    def average(self) -> Estimate | None:
        """avg@k; None if no sample counts."""
        if not self.rewards:
            return None
        means = [fmean(item) for item in self.rewards.values()]
        return clustered(means, SHARE) if self._are_shares else clustered(means)

    @property
    def _are_shares(self) -> bool:
        """Whether all rewards lie in [0, 1]."""
        return all(0 <= reward <= 1 for item in self.rewards.values() for reward in item)

    def passes(self, k: int) -> Estimate | None:
        """Returns pass@k over the items with at least k samples; None if no item has so many."""
        values = [
            pass_at_k(len(item), sum(passes(reward, self.passing) for reward in item), k)
            for item in self.rewards.values()
            if len(item) >= k
        ]
        return wilson(fmean(values), len(values)) if values else None

    def minus(self, other: EvaluationResult) -> Estimate | None:
        """Returns this avg@k minus another one, over the tasks that both have measured.

        The differences are taken within each task. Hard and easy tasks then cancel out, which
        usually makes the interval narrower. Tasks are the same if their source and their id are.
        None if there is no such task.
        """
        differences = [
            fmean(rewards) - fmean(other.rewards[task])
            for task, rewards in self.rewards.items()
            if task in other.rewards
        ]
        if not differences:
            return None
        shares = self._are_shares and other._are_shares
        return clustered(differences, (-1.0, 1.0)) if shares else clustered(differences)

    def powers(self) -> Iterator[int]:
        """Yields 1, 2, 4, … and the requested k."""
        k = 1
        while k < self.asked:
            yield k
            k *= 2
        if self.asked:
            yield self.asked

    def brief(self) -> str:
        """Returns avg@k as text, or "-"."""
        return "-" if self.average is None else f"{self.average.value:.3f}"

    def __str__(self) -> str:
        k = self.asked
        figures = {f"avg@{k}": self.average, f"pass@{k}": self.passes(k) if k else None}
        known = [f"{name} {value}" for name, value in figures.items() if value is not None]
        failed = f"   failed {self.failed}" if self.failed else ""
        return "   ".join([*known, f"{len(self.rewards)} items"]) + failed

    def to_tree(self) -> dict[str, object]:
        """Returns JSON values."""
        if self._tree is None:
            self._tree = self._to_tree()
        return self._tree

    def _to_tree(self) -> dict[str, object]:
        average = self.average
        return {
            "items": len(self.rewards),
            "samples": self.asked,
            "failed": self.failed,
            "avg": None if average is None else average.to_tree(),
            "pass": {str(k): one.to_tree() for k in self.powers() if (one := self.passes(k))},
        }


def reward_of(outcome: EpisodeEnded, policy: str) -> float | None:
    """Returns the policy's reward with which a sample counts, or None if it is left out."""
    if outcome.ending in LIMITS and outcome.reward is None:
        return 0.0
    if outcome.failure is not None and outcome.failure.origin != "policy":
        return None
    reward = policy_reward(outcome, policy)
    return reward if reward is not None and math.isfinite(reward) else None


class Evaluations:
    """The evaluations of a run, by policy and version."""

    def __init__(self, passing: float = 1.0, fixed: Collection[str] = ()) -> None:
        """`fixed` are policies of the tasks that have only version 0.

        They are measured there even if no sample of them has a turn, for example if all fail.
        """
        self._passing = passing
        self._fixed = dict.fromkeys(fixed, 0)
        self._measured: dict[str, dict[int, EvaluationResult]] = {}

    def on_task_ended(self, ended: TaskEnded) -> None:
        """Adds a task that has ended. Ignores tasks that are cancelled or not for evaluation."""
        if ended.purpose != "evaluate" or ended.closed_by != "all":
            return
        # An item counts although none of its episodes has a turn, for example if all overflow. An
        # older record names no versions, but all tokens of its policies come from the pinned ones.
        pinned = {policy: one for policy, one in ended.versions.items() if one >= 0}
        versions = pinned or self._fixed | {
            use.policy: use.oldest_version
            for outcome in ended.outcomes
            for use in outcome.policies
            if use.oldest_version >= 0
        }
        for policy, version in versions.items():
            known = self._measured.setdefault(policy, {})
            known.setdefault(version, EvaluationResult(self._passing, policy)).add(ended)

    def of(self, policy: str) -> dict[int, EvaluationResult]:
        """Returns one policy's results by version, sorted by version.

        A version is left out if only other policies have turns in all its samples: their reward
        says nothing of it.
        """
        known = self._measured.get(policy, {})
        if policy in self._fixed:
            known.setdefault(0, EvaluationResult(self._passing, policy))
        return {
            version: one
            for version, one in sorted(known.items())
            if policy in one.players or not one.players
        }

    def to_tree(self) -> dict[str, object]:
        """Returns JSON values, by policy and version."""
        return {
            policy: {str(version): one.to_tree() for version, one in results.items()}
            for policy in sorted(self._measured)
            if (results := self.of(policy))
        }
