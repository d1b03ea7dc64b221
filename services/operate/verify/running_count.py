"""Counts what a run loses and doubles while it goes on, from what `headrace run` reads anyway.

It sees tasks, results and batches: which tasks ended, and that each is trained on or dropped once.
It can't see what workers did with an episode. `headrace verify` reads all of the log for that.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable

from headrace.schemas.events import BatchAssembled, Event, TaskEnded
from headrace.schemas.frontier import Frontier
from headrace.services.operate.verify.log_counts import BatchCount

MOST_RESULTS = 100_000
"""Results whose digests are remembered. A repetition usually comes within seconds."""


class RunningCount:
    """Folds the events of a run, in the order of their offsets."""

    def __init__(self) -> None:
        self._ended = Frontier()
        self._results: OrderedDict[int, bytes] = OrderedDict()
        self._differing: set[int] = set()
        self._repeated = 0
        self._batches: dict[str, BatchCount] = defaultdict(BatchCount)

    def on_event(self, event: Event) -> None:
        """Adds an event."""
        if isinstance(event, BatchAssembled):
            self._batches[event.policy].on_batch(event)
        elif isinstance(event, TaskEnded):
            self._on_result(event)

    def _on_result(self, result: TaskEnded) -> None:
        known = self._results.get(result.task)
        if self._ended.add(result.task):
            self._results[result.task] = _digest(result)
            if len(self._results) > MOST_RESULTS:
                self._results.popitem(last=False)
            return
        self._repeated += 1
        if known is not None and known != _digest(result):
            self._differing.add(result.task)

    def line(self) -> str:
        """Returns the counts so far in one line."""
        batches = self._batches.values()
        lost = sum(len(one.lost) for one in batches)
        doubled = len(self._differing) + sum(
            len(one.doubled_tasks) + len(one.doubled_episodes) for one in batches
        )
        return (
            f"so far {lost:,} lost, {doubled:,} doubled, of {len(self._ended):,} ended tasks in "
            f"{sum(one.batches for one in batches):,} batches; {self._repeated:,} results were "
            "written again by a worker that took over. `headrace verify` checks everything"
        )


def _digest(result: TaskEnded) -> bytes:
    """Returns a digest of a result, 16 bytes."""
    return hashlib.blake2b(repr(result).encode(), digest_size=16).digest()


class RestartCounts:
    """Says what was counted after each restart of a child."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._count = RunningCount()
        self._say = say
        self._known = 0

    def add(self, event: Event) -> None:
        """Counts an event."""
        self._count.on_event(event)

    def on_restarts(self, restarts: int) -> int:
        """Takes how many restarts there were, and returns it. Says the counts if there are more."""
        if restarts > self._known:
            self._known = restarts
            self._say(self._count.line())
        return restarts
