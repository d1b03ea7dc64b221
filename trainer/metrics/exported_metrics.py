"""The metrics of a trainer's process, for Prometheus."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

VERSION = Gauge("headrace_policy_version", "The newest published version.", ["policy"])
STATUSES = ("initial", "trained", "skipped", "resumed")
VERSIONS = Counter(
    "headrace_versions_published_total",
    "Versions published, by status: initial, trained, skipped or resumed.",
    ["policy", "status"],
)
REWARD = Gauge("headrace_reward_mean", "Mean reward of the newest version's batch.", ["policy"])
STALENESS = Gauge(
    "headrace_staleness",
    "Staleness of the newest version's fresh tokens: mean, max, or oldest, the mean over samples.",
    ["policy", "over"],
)
SAMPLES = Counter(
    "headrace_trainer_samples_total",
    "Samples of batches that the trainer got, by result: trained or dropped.",
    ["policy", "result"],
)
TOKENS = Counter("headrace_trained_tokens_total", "Sampled tokens of trained batches.", ["policy"])

Phase = Literal["wait", "train", "publish"]


class PhaseSeconds(Collector):
    """Counts the seconds that the trainer spends in each phase.

    A scrape also counts the seconds of the phase that still goes on, so that a trainer that waits
    for ever shows it.
    """

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str], float] = defaultdict(float)
        self._current: dict[str, tuple[str, float]] = {}
        """By policy: the phase, and when it began."""

    def enter(self, policy: str, phase: Phase, now_s: float | None = None) -> None:
        """Ends the current phase of the policy's trainer and begins another one.

        `now_s` is by a monotonic clock. [default: now]
        """
        now_s = time.monotonic() if now_s is None else now_s
        if policy in self._current:
            before, since = self._current[policy]
            self._spent[policy, before] += now_s - since
        self._current[policy] = phase, now_s

    def spent(self, now_s: float) -> dict[tuple[str, str], float]:
        """Returns the seconds by policy and phase."""
        spent = defaultdict(float, self._spent)
        for policy, (phase, since) in list(self._current.items()):
            spent[policy, phase] += now_s - since
        return spent

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the counter of all policies and phases."""
        family = CounterMetricFamily(
            "headrace_trainer_seconds",
            "Seconds of the trainer by phase: wait for a batch, train, or publish and save.",
            labels=["policy", "phase"],
        )
        for labels, seconds in sorted(self.spent(time.monotonic()).items()):
            family.add_metric(labels, seconds)
        yield family


PHASES = PhaseSeconds()
REGISTRY.register(PHASES)


def note_version(policy: str, version: int, status: str, metrics: Mapping[str, float]) -> None:
    """Notes a version that was published, with the metrics of its batch."""
    VERSION.labels(policy).set(version)
    for each in STATUSES:  # An alert sees no increase of a series that begins with 1.
        VERSIONS.labels(policy, each)
    VERSIONS.labels(policy, status).inc()
    if "reward_mean" in metrics:
        REWARD.labels(policy).set(metrics["reward_mean"])
    for over in ("mean", "max", "oldest"):
        if (staleness := metrics.get(f"staleness_{over}")) is not None:
            STALENESS.labels(policy, over).set(staleness)


def note_batch(policy: str, samples: int, dropped: int, tokens: int) -> None:
    """Notes a batch that was trained on: how many samples it has, and how many were dropped."""
    SAMPLES.labels(policy, "trained").inc(max(0, samples - dropped))
    SAMPLES.labels(policy, "dropped").inc(dropped)
    TOKENS.labels(policy).inc(tokens)
