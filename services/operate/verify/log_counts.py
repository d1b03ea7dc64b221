"""Counts what a log has lost and doubled. Pure, and apart from the code that it counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.schemas.frontier import Frontier
from headrace.services.log.event_log import Delivery


@dataclass(frozen=True)
class LogCounts:
    """The numbers of a log. A task or an episode is counted once, however often it was found."""

    tasks: int
    episodes: int
    """Started."""
    under_way: int
    """Tasks that have not ended."""
    lost_tasks: frozenset[int]
    """Tasks that a batch's frontier passes without training on them or dropping them. If the run
    has ended, also those without a TaskEnded."""
    lost_episodes: frozenset[tuple[int, int]]
    """Episodes whose outcome names a trajectory that the log does not hold. If the run has ended,
    also those without an outcome."""
    doubled_episodes: frozenset[tuple[int, int]]
    """Episodes that two batches of a policy train on as fresh, or one batch twice, or that were
    started twice."""
    doubled_tasks: frozenset[int]
    """Tasks that two batches of a policy decide, or with two results that differ."""

    @property
    def lost(self) -> int:
        """How many tasks and episodes are lost. A lost episode of a lost task is not counted."""
        return len(self.lost_tasks) + sum(
            task not in self.lost_tasks for task, _ in self.lost_episodes
        )

    @property
    def doubled(self) -> int:
        """How many tasks and episodes are doubled, counted alike."""
        return len(self.doubled_tasks) + sum(
            task not in self.doubled_tasks for task, _ in self.doubled_episodes
        )

    def still(self, before: LogCounts) -> LogCounts:
        """Returns these counts with only what was found before, too."""
        return replace(
            self,
            lost_tasks=self.lost_tasks & before.lost_tasks,
            lost_episodes=self.lost_episodes & before.lost_episodes,
            doubled_tasks=self.doubled_tasks & before.doubled_tasks,
            doubled_episodes=self.doubled_episodes & before.doubled_episodes,
        )


class BatchCount:
    """Counts what the batches of one policy lose and double. Batches come in order."""

    def __init__(self) -> None:
        self._decided = Frontier()
        self._newest = 0
        self.lost: set[int] = set()
        self.doubled_tasks: set[int] = set()
        self.doubled_episodes: set[tuple[int, int]] = set()
        self.batches = 0

    def on_batch(self, batch: BatchAssembled) -> None:
        """Adds a batch. A record that repeats an earlier batch is left out."""
        if batch.version <= self._newest:
            return
        self._newest, self.batches = batch.version, self.batches + 1
        fresh = Counter((one.task, one.sample) for one in batch.samples if one.use == 0)
        self.doubled_episodes |= {key for key, times in fresh.items() if times > 1}
        named = {task for task, _ in fresh} | {one.task for one in batch.dropped}
        self.doubled_tasks |= {task for task in named if task in self._decided}
        for task in named:
            self._decided.add(task)
        after = batch.frontier()
        # What the frontier has and nobody named was passed over. Only gaps are looked at: a task
        # that hangs holds the low mark, and the runs above it have all tasks since.
        for begin, end in ((self._decided.low_mark, after.low_mark - 1), *after.runs):
            for first, last in self._decided.gaps(begin, end):
                self.lost.update(range(first, last + 1))
        self._decided = after


def count_log(deliveries: Iterable[Delivery[Event]], *, ended: bool) -> LogCounts:
    """Counts a log. Deliveries of one partition come in offset order. `ended`: the run has."""
    tasks: set[int] = set()
    done: dict[int, TaskEnded] = {}
    starts: Counter[tuple[int, int]] = Counter()
    outcomes: dict[tuple[int, int], EpisodeEnded] = {}
    positions: set[tuple[str, int, int]] = set()
    batches: dict[str, BatchCount] = defaultdict(BatchCount)
    differing: set[int] = set()
    home = ""
    for one in deliveries:
        match one.event:
            case TaskSubmitted():
                tasks.add(one.offset)
            case TaskEnded() as result:
                if done.setdefault(result.task, result) != result:
                    differing.add(result.task)
            case EpisodeStarted() as start:
                starts[start.task, start.sample] += 1
            case EpisodeEnded() as outcome:
                home = one.partition.topic.partition(".")[0]
                outcomes.setdefault((outcome.task, outcome.sample), outcome)
            case TrajectoryRecorded():
                positions.add((one.partition.topic, one.partition.number, one.offset))
            case BatchAssembled() as batch:
                batches[batch.policy].on_batch(batch)
    dangling = {
        key
        for key, outcome in outcomes.items()
        if (ref := outcome.trajectory) is not None
        and ref.topic.partition(".")[0] == home
        and (ref.topic, ref.partition, ref.offset) not in positions
    }
    counted = batches.values()
    unended = tasks - done.keys() if ended else set()
    unplayed = starts.keys() - outcomes.keys() if ended else set()
    return LogCounts(
        tasks=len(tasks),
        episodes=len(starts),
        under_way=len(tasks - done.keys()),
        lost_tasks=frozenset(unended.union(*(one.lost for one in counted))),
        lost_episodes=frozenset(dangling | unplayed),
        doubled_episodes=frozenset(
            {key for key, times in starts.items() if times > 1}.union(
                *(one.doubled_episodes for one in counted)
            )
        ),
        doubled_tasks=frozenset(differing.union(*(one.doubled_tasks for one in counted))),
    )
