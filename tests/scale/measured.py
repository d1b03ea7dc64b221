"""What a simulated deployment did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean, median, quantiles
from time import process_time
from typing import TypeVar

from headrace.schemas.events import BatchAssembled
from tests.scale.engines import SimulatedEpisode, SimulatedPrompt, SimulatedWorker
from tests.scale.fleet import Fleet

T = TypeVar("T")
TIMED = 32
"""To read the CPU time takes longer than a decision."""


@dataclass
class Measured:
    """Counts after `fleet.warm_s`. Times in seconds."""

    fleet: Fleet
    began_s: float
    waits: list[float] = field(default_factory=list)
    """Of each turn: from prompt to answer."""
    added: list[float] = field(default_factory=list)
    """Those times without what the generation would take on an engine of its own."""
    episodes: list[float] = field(default_factory=list)
    """From the start of an episode to its end."""
    endings: Counter[str] = field(default_factory=Counter)
    tasks: int = 0
    starts: int = 0
    first_start_s: float | None = None
    last_start_s: float = 0.0
    last_end_s: float = 0.0
    live: int = 0
    most_live: int = 0
    published_s: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    """How long the trainer waited before each batch."""
    batch_groups: list[int] = field(default_factory=list)
    stale: int = 0
    trained_samples: int = 0
    staleness: list[int] = field(default_factory=list)
    lost_workers: dict[str, float] = field(default_factory=dict)
    lost_environments: int = 0
    lost_turns: int = 0
    to_dead: list[float] = field(default_factory=list)
    """How long a worker had been gone, for each prompt that was sent to it although another worker
    was alive."""
    waiting: dict[SimulatedPrompt, float] = field(default_factory=dict)
    """Prompts without an answer, and when they were sent."""
    far_bytes: float = 0.0
    """Of records that crossed the link of a region, all regions together."""
    cpu: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)
    """Generated tokens by worker, from the beginning."""
    speeds: dict[str, float] = field(default_factory=dict)
    repeated: int = 0
    hits: float = 0.0
    _called: Counter[str] = field(default_factory=Counter)
    _idle_since: float | None = None
    _now_s: float = 0.0

    def timed(self, what: str, call: Callable[[], T]) -> T:
        """Calls, and counts the CPU time of this process in one of TIMED calls."""
        self._called[what] += 1
        if self._called[what] % TIMED:
            return call()
        began = process_time()
        result = call()
        self.cpu[what] += process_time() - began  # type: ignore[assignment]
        self.calls[what] += 1
        return result

    def started(self, now_s: float) -> None:
        self.starts += 1
        self.first_start_s = now_s if self.first_start_s is None else self.first_start_s
        self.last_start_s = now_s - self.began_s
        self.live += 1
        self.most_live = max(self.most_live, self.live)

    def sent(
        self,
        prompt: SimulatedPrompt,
        owner: SimulatedWorker | None,
        now_s: float,
        workers: Sequence[SimulatedWorker],
    ) -> None:
        """Notes a prompt, and whether it goes to a worker that is gone."""
        self.waiting[prompt] = now_s
        if owner is not None and not owner.alive and any(one.alive for one in workers):
            self.to_dead.append(now_s - self.lost_workers[owner.name])

    def moved(self, delay_s: float, size: float) -> None:
        if delay_s:
            self.far_bytes += size

    def answered(self, prompt: SimulatedPrompt, now_s: float) -> None:
        del self.waiting[prompt]
        if now_s - self.began_s >= self.fleet.warm_s:
            self.waits.append(now_s - prompt.sent_s)
            self.added.append(max(0.0, now_s - prompt.sent_s - prompt.alone_s))

    def ended(self, episode: SimulatedEpisode, ending: str, now_s: float) -> None:
        self.live -= 1
        self.endings[ending] += 1
        self.last_end_s = now_s - self.began_s
        if self.last_end_s >= self.fleet.warm_s:
            self.episodes.append(now_s - episode.began_s)

    def closed(self, now_s: float) -> None:
        self.tasks += 1

    def batched(self, batch: BatchAssembled) -> None:
        self.batch_groups.append(len({sample.task for sample in batch.samples}))
        self.trained_samples += len(batch.samples)
        self.stale += sum(1 for drop in batch.dropped if drop.reason == "stale")
        self.staleness += [batch.version - 1 - one.oldest_version for one in batch.samples]

    def trains(self, now_s: float) -> None:
        if self._idle_since is not None:
            self.idle.append(now_s - self._idle_since)

    def trained(self, now_s: float, version: int) -> None:
        self.published_s.append(now_s - self.began_s)
        self._idle_since = now_s

    def end(self, now_s: float, workers: Sequence[SimulatedWorker]) -> None:
        self.seconds = now_s - self.began_s
        # Routes are generators, and no process can send those to another one.
        self.waiting = {
            replace(one, route=nullcontext()): sent_s for one, sent_s in self.waiting.items()
        }
        self.tokens = {one.name: one.counted.tokens for one in workers}
        self.speeds = {one.name: one.pool.speed for one in workers}
        self.repeated = sum(one.counted.repeated for one in workers)
        prompted = sum(one.counted.prompted for one in workers)
        self.hits = sum(one.counted.cached for one in workers) / max(1, prompted)

    @property
    def oldest_wait_s(self) -> float:
        """For how long the oldest prompt without an answer has waited in the end."""
        now_s = self.began_s + self.seconds
        return max((now_s - sent_s for sent_s in self.waiting.values()), default=0.0)

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return sum(self.tokens.values()) / self.seconds

    def shares(self) -> dict[str, float]:
        """Each worker's share of the generated tokens, over what its speed gives it."""
        tokens, speeds = sum(self.tokens.values()), sum(self.speeds.values())
        return {
            name: count / tokens / (self.speeds[name] / speeds)
            for name, count in self.tokens.items()
        }

    def wait_fraction(self) -> float:
        """The share of its time for which the trainer waits for a batch, after the first fifth of
        the versions."""
        assert self.fleet.training is not None
        idle = self.idle[len(self.idle) // 5 :]
        return sum(idle) / max(1e-9, sum(idle) + len(idle) * self.fleet.training.train_s)

    def iteration_s(self) -> float:
        """Mean time of a version, after the first fifth of them."""
        marks = self.published_s[len(self.published_s) // 5 :]
        return (marks[-1] - marks[0]) / max(1, len(marks) - 1)

    def cpu_us(self, what: str) -> float:
        """Mean CPU time of a decision in microseconds."""
        return 1e6 * self.cpu[what] / max(1, self.calls[what])

    @property
    def stale_share(self) -> float:
        """Of groups."""
        return self.stale / max(1, self.stale + sum(self.batch_groups))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    return median(values), quantiles(values, n=100)[98]


def mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
