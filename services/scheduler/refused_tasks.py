"""The tasks that are not run and have not started. Pure.

Anybody may submit such tasks, and in any number. So they take no room of other tasks: few of them
are live at a time, and none of these counts as a live episode of the run or of a tenant. They take
turns with the tasks that may run. Those that no key of their tenant has signed start after both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.schemas.events import Failure
from headrace.services.scheduler.starts import NO_TENANT, UNPROVED, unproved
from headrace.services.scheduler.waiting_tasks import WaitingTask

REFUSED_LIVE = 512
"""At most so many tasks that are not run have started and have not ended."""
UNPROVED_LIVE = 32
"""The same for tasks that no key has signed, beside those. The body of each, of some MiB at most,
is in memory when it starts."""
REFUSED_TASK = WaitingTask("train", "(refused)", 1)
"""What counts of a task that is not run. This object itself marks them, here and below: a task may
claim any tenant."""
UNPROVED_TASK = WaitingTask("train", NO_TENANT, 1)
"""What counts of a task that no key has signed."""
_UNPROVED = unproved("no trusted key has signed it")


@dataclass(frozen=True, slots=True)
class RefusedTask:
    """A task that starts only to end."""

    number: int
    verdict: Failure


def not_run(verdict: Failure) -> WaitingTask:
    """Returns what counts of a task that starts with this verdict."""
    return UNPROVED_TASK if verdict.code == UNPROVED else REFUSED_TASK


class RefusedTasks:
    """What is known of these tasks. Of one that no key has signed, only the number."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[int, Failure] = OrderedDict()
        """By number: why a task is not run."""
        self._unrecorded: OrderedDict[int, None] = OrderedDict()
        """The numbers of those whose verdict a successor finds only if it reads them, ascending."""
        self._unproved: OrderedDict[int, None] = OrderedDict()
        """The numbers of those that no key has signed, ascending."""
        self._latest: Failure | None = None
        """The latest verdict. Tasks that are refused for one reason in a row share it."""
        self.live = 0
        """How many have started and have not ended, without those that no key has signed."""
        self.live_unproved = 0
        """How many of those."""

    def __contains__(self, number: int) -> bool:
        return number in self._verdicts or number in self._unproved

    def __iter__(self) -> Iterator[int]:
        """The numbers of those that have not started and that may have been signed."""
        return iter(self._verdicts)

    def __len__(self) -> int:
        """How many these are."""
        return len(self._verdicts)

    def add(self, number: int, verdict: Failure, *, when_read: bool = False) -> None:
        """Adds a task that can't be run.

        `when_read`: only who reads the task finds out. Such tasks come in ascending order. Whether
        another one is cancelled or lost, a successor finds out by the record that it waits.
        """
        self._latest = self._verdicts[number] = (
            self._latest if self._latest == verdict and self._latest is not None else verdict
        )
        if when_read:
            self._unrecorded[number] = None

    def add_unproved(self, number: int) -> None:
        """Adds a task that no key of its tenant has signed. They come in ascending order."""
        self._unproved[number] = None

    @property
    def unrecorded(self) -> int:
        """How many have not started, and can't be recorded as tasks that wait."""
        return len(self._unrecorded) + len(self._unproved)

    def first_unrecorded(self, default: int) -> int:
        """Returns the lowest number of these, or `default` if there are none."""
        firsts = (next(iter(some), default) for some in (self._unrecorded, self._unproved))
        return min(firsts)

    def count(self, task: WaitingTask, episodes: int) -> bool:
        """Adds episodes to those that are live. Returns False if the task is one that is run."""
        if task is UNPROVED_TASK:
            self.live_unproved += episodes
        elif task is REFUSED_TASK:
            self.live += episodes
        return task is UNPROVED_TASK or task is REFUSED_TASK

    def take(self) -> RefusedTask | None:
        """Takes the next task to end that may have been signed. None if enough are live."""
        if not self._verdicts or self.live >= REFUSED_LIVE:
            return None
        number, verdict = self._verdicts.popitem(last=False)
        self._unrecorded.pop(number, None)
        return RefusedTask(number, verdict)

    def take_unproved(self) -> RefusedTask | None:
        """Takes the next one that no key has signed. None if enough of them are live."""
        if not self._unproved or self.live_unproved >= UNPROVED_LIVE:
            return None
        return RefusedTask(self._unproved.popitem(last=False)[0], _UNPROVED)
