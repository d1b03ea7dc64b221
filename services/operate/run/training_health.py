"""The metrics by which people steer a policy's training: a few figures, and advice.

A pure fold over the policy's publications. docs/algorithms.md says what each metric means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from headrace.schemas.events import PolicyPublished

KEPT = 64
"""The newest versions whose metrics are kept, for curves."""
RECENT = 5
"""Advice follows from the median of so many versions: a single outlier is no reason to act."""
FEWEST = 3
"""Fewer versions with a metric give no advice."""
CLIPPED = "clip_fraction"
STALE = "stale_groups"
"""The share of the groups that got too stale, which follows from two metrics."""


class Figure(NamedTuple):
    """A part of a row."""

    text: str
    warned: bool
    """Whether there is advice about it."""


class HealthRow(NamedTuple):
    """A line of a view."""

    label: str
    figures: Sequence[Figure]

    def __str__(self) -> str:
        return "   ".join(one.text for one in self.figures)


@dataclass(frozen=True)
class SaneRange:
    """What is usual for a metric, and what to do outside of it."""

    metric: str
    advice: str
    """A format string, in which `{value}` stands for the metric."""
    low: float = float("-inf")
    high: float = float("inf")


@dataclass(frozen=True)
class FigureKind:
    """How one or two metrics are shown."""

    label: str
    """The row that shows them."""
    metrics: Sequence[str]
    text: Callable[..., str]
    """Takes the values of the metrics."""
    others: Sequence[str] = ()
    """Further metrics whose advice concerns the figure."""


def percent(share: float) -> str:
    """Returns a share as text: with one decimal if it is small."""
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


FIGURES = (
    FigureKind("learning", ("entropy",), "entropy {:.3g}".format),
    FigureKind(
        "learning",
        ("clip_low_fraction", "clip_high_fraction"),
        lambda low, high: f"clipped {percent(low)} low, {percent(high)} high",
        (CLIPPED, "masked_updates"),
    ),
    FigureKind("learning", ("truncated",), lambda share: f"cut off {percent(share)}"),
    FigureKind(
        "groups",
        ("groups_solved_by_all", "groups_solved_by_none"),
        lambda by_all, none: f"solved by all {percent(by_all)}, by none {percent(none)}",
        ("groups_equal", STALE),
    ),
    FigureKind(
        "groups",
        ("length_better", "length_worse"),
        "tokens if better {:,.0f}, worse {:,.0f}".format,
    ),
    FigureKind("off-policy", ("engine_gap_p99",), "engine gap {:.2g}".format, ("engine_kl",)),
    FigureKind(
        "off-policy", ("effective_sample_size",), lambda size: f"effective sample {percent(size)}"
    ),
    FigureKind(
        "off-policy",
        ("staleness_mean", "staleness_oldest"),
        "stale {:.1f}, oldest {:.1f}".format,
    ),
)
"""What the views show. `headrace status --metrics` shows the rest."""
RANGES = (
    SaneRange(
        "engine_gap_p99",
        "engine and trainer disagree about fresh tokens by {value:.2g} nats (99th percentile): "
        'let both run the same weights and number format, or use the loss "icepop"',
        high=0.5,
    ),
    SaneRange(
        "engine_kl",
        "engine and trainer disagree about fresh tokens (KL divergence {value:.2g} nats): let both "
        'run the same weights and number format, or use the loss "icepop"',
        high=0.02,
    ),
    SaneRange(
        "effective_sample_size",
        "few tokens outweigh the others (effective sample size {value:.0%}): lower "
        'batches.max_staleness or training.learning_rate, or use the loss "m2po"',
        low=0.5,
    ),
    SaneRange(
        CLIPPED,
        "the loss clips or masks {value:.0%} of the tokens: lower training.learning_rate, "
        "training.epochs or batches.max_staleness, or widen the loss's bounds",
        high=0.5,
    ),
    SaneRange(
        "masked_updates",
        "the loss masks every token of an update, so it teaches nothing: raise its bounds, lower "
        "batches.max_staleness, or choose another loss",
        high=0.5,
    ),
    SaneRange(
        "entropy",
        "the policy hardly explores (entropy {value:.2g} nats per token): set "
        "training.entropy_bonus, or lower training.learning_rate",
        low=0.02,
    ),
    SaneRange(
        "truncated",
        "a limit of tokens cuts {value:.0%} of the episodes: raise sampling.max_tokens and "
        "tasks.max_tokens, or set overlong or overlong_buffer of the agent",
        high=0.25,
    ),
    SaneRange(
        "groups_equal",
        "the rewards of {value:.0%} of the groups are equal, so nothing is learned from them: use "
        'tasks that are sometimes solved, more tasks.samples, or the filter "zero_advantage"',
        high=0.8,
    ),
    SaneRange(
        STALE,
        "{value:.0%} of the groups get too stale: raise batches.max_staleness, or lower "
        "scheduler.live_episodes",
        high=0.25,
    ),
    SaneRange(
        "learning_rate",
        "the learning rate is 0, so the weights do not change any more: end the run, or start a "
        "new namespace with a larger training.total_updates or a training.final_learning_rate",
        low=1e-300,
    ),
    SaneRange(
        "dropped_samples",
        "the trainer leaves out {value:.0f} samples of a batch: its log says why",
        high=0.5,
    ),
    SaneRange(
        "memory_retries",
        "the trainer runs out of memory and repeats its work: lower training.max_tokens",
        high=0.5,
    ),
)


class TrainingHealth:
    """Folds the publications of one policy."""

    def __init__(self, aim: float | None = None) -> None:
        """`aim` is the mean reward at which the run ends, if one is set."""
        self._aim = aim
        self._versions: deque[Mapping[str, float]] = deque(maxlen=KEPT)

    def on_published(self, event: PolicyPublished) -> None:
        """Adds a version, unless its record has no metrics: version 0, or one after a restart."""
        if "loss" not in event.metrics and event.status != "skipped":
            return
        metrics = dict(event.metrics)
        stale = metrics.get("dropped_groups_stale", 0.0)
        if total := stale + metrics.get("groups", 0.0):
            metrics[STALE] = stale / total
        self._versions.append(metrics)

    @property
    def newest(self) -> Mapping[str, float]:
        """The metrics of the newest version that has any."""
        return self._versions[-1] if self._versions else {}

    @property
    def learned_out(self) -> bool:
        """Whether the learning rate is 0, as a schedule without a `final_learning_rate` ends."""
        return self.curve("learning_rate")[-1:] == [0.0]

    def curve(self, metric: str) -> list[float]:
        """Returns the values of a metric, the newest last."""
        return [one[metric] for one in self._versions if metric in one]

    def advice(self, *, limits_known: bool = False) -> dict[str, str]:
        """Returns what to do about metrics that are out of their range, by metric.

        With `limits_known`, something else already says that limits cut episodes.
        """
        found = {}
        for one in RANGES:
            values = self.curve(one.metric)[-RECENT:]
            if len(values) < FEWEST or one.low <= (value := median(values)) <= one.high:
                continue
            if not self._is_meant(one.metric) and not (limits_known and one.metric == "truncated"):
                found[one.metric] = one.advice.format(value=value)
        for stronger, weaker in (("engine_gap_p99", "engine_kl"), ("masked_updates", CLIPPED)):
            if stronger in found:
                found.pop(weaker, None)
        return found

    def _is_meant(self, metric: str) -> bool:
        """Whether a metric is out of its range because the policy has learned its tasks.

        Groups of equal rewards are no problem for a critic or a teacher: these do not compare
        their samples.
        """
        if metric == "entropy":
            reward = self.newest.get("reward_mean")
            return self._aim is not None and reward is not None and reward >= self._aim
        solved = self.newest.get("groups_solved_by_all", 0.0)
        learned = self._aim is not None and solved >= 0.5
        compared = not {"value_loss", "teacher_kl"} & self.newest.keys()
        return metric == "groups_equal" and (learned or not compared)

    def rows(self) -> list[HealthRow]:
        """Returns the figures of the newest version, in at most three short rows."""
        warned, rows = self.advice().keys(), dict[str, list[Figure]]()
        for one in FIGURES:
            values = [self.newest[name] for name in one.metrics if name in self.newest]
            if len(values) == len(one.metrics):
                bad = any(name in warned for name in (*one.metrics, *one.others))
                rows.setdefault(one.label, []).append(Figure(one.text(*values), bad))
        return [HealthRow(label, figures) for label, figures in rows.items()]
