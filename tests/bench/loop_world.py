"""What the closed loop meets, and what it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

MEDIANS_S = (5.0, 20.0, 120.0, 300.0)
SIGMAS = (0.3, 0.6, 0.9, 1.2)
KEPT = (1.0, 0.4, 0.2)
LONGER = 10.0
"""How many times as long the attempts at a long task take."""


@dataclass(frozen=True)
class World:
    """What the loop meets."""

    median_s: float
    """Median length of an attempt."""
    sigma: float
    """Standard deviation of the logarithm of the length."""
    kept: float = 1.0
    """Share of the groups that no filter drops."""
    train_s: float = 1.0
    deaths: float = 0.0
    """Share of the attempts that die with their worker at a random moment, and begin again."""
    long: float = 0.0
    """Share of the tasks whose attempts take LONGER times as long as those of the others."""
    hung: float = 0.0
    """Share of the attempts that hang until the deadline."""
    load_s: float = 0.0
    """Seconds from the publication of a version until the engines have it."""
    waits: bool = True
    """Whether engines wait for the version that a start names."""
    tasks: int = 400
    seed: int = 0

    @property
    def longest_s(self) -> float:
        """Median length of an attempt at the longest tasks."""
        return self.median_s * (LONGER if self.long else 1.0)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Which worlds each recipe meets."""

    medians_s: Sequence[float] = MEDIANS_S
    sigmas: Sequence[float] = SIGMAS
    kept: Sequence[float] = KEPT
    seeds: int = 1
    batches: int = 40
    """As many tasks as fill so many batches."""
    hung: float = 0.0
    """The share of attempts that hang."""
    long: float = 0.0
    """The share of tasks that take LONGER times as long."""
    load: float = 0.0
    """How many medians engines take to load."""

    def worlds(self, median_s: float, groups: int) -> Iterator[World]:
        """Yields the worlds with a median length, for batches of so many groups."""
        for sigma, kept, seed in product(self.sigmas, self.kept, range(self.seeds)):
            yield World(
                median_s, sigma, kept, median_s / 10, deaths=0.02, hung=self.hung,
                long=self.long, load_s=self.load * median_s,
                tasks=int(self.batches * groups / kept), seed=seed,
            )  # fmt: skip


@dataclass
class LoopResult:
    """What the loop did. Times are of whole episodes."""

    batches: list[int] = field(default_factory=list)
    """Groups in each batch that was made before the tasks were exhausted."""
    replayed: list[int] = field(default_factory=list)
    """Those of them that an earlier batch was trained on."""
    tokens: list[int] = field(default_factory=list)
    """Trainable tokens in each of these batches: seconds, rounded."""
    uses: dict[tuple[int, int], int] = field(default_factory=dict)
    """Task and sample to the number of batches that trained on it."""
    ages: list[int] = field(default_factory=list)
    """Of each replayed sample: how many versions its oldest token was behind."""
    closes: list[float] = field(default_factory=list)
    """When each group was closed."""
    made: list[tuple[float, int]] = field(default_factory=list)
    """When each batch was made, and the newest published version then."""
    stale: int = 0
    """Samples that were kept by the filter and dropped as stale."""
    stale_long: int = 0
    """Those of them whose task was a long one."""
    trained_long: int = 0
    generated: list[float] = field(default_factory=list)
    """Lengths of the episodes that were kept by the filter."""
    trained: list[float] = field(default_factory=list)
    """Lengths of those of them that were trained on, also after the tasks were exhausted."""
    staleness: list[int] = field(default_factory=list)
    """Of each sample of a batch that is fresh: how many versions its oldest token was behind."""
    seconds: float = 0.0
    """Until the tasks were exhausted."""
    parts: int = 0
    """Groups that were trained in part."""
    undecided: int = 0
    """Tasks that no batch decided in the end."""
    closed_s: float = 0.0
    """When the last group was closed."""
    decided_s: float = 0.0
    """When the last batch was made."""

    def full(self, groups: int) -> float:
        return sum(size == groups for size in self.batches) / max(1, len(self.batches))

    @property
    def stale_share(self) -> float:
        return self.stale / max(1, self.stale + len(self.staleness))

    @property
    def stale_long_share(self) -> float:
        """Share of the samples of long tasks that were dropped as stale."""
        return self.stale_long / max(1, self.stale_long + self.trained_long)

    @property
    def mean_staleness(self) -> float:
        return mean(self.staleness)

    @property
    def length_ratio(self) -> float:
        """Mean length of what was trained, divided by that of what was generated."""
        return mean(self.trained) / mean(self.generated)

    @property
    def rate(self) -> float:
        """Trained samples a second."""
        return len(self.staleness) / self.seconds


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / max(1, len(values))
