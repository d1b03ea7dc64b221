"""The tasks that are not run and have not started. Pure.

Tasks that no key of their tenant has signed may come from anybody, and in any number. So they have
limits of their own and take no room of other tasks: they start after all tasks that may run, few
of them are live at a time, and none of these counts as a live episode of the run.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.schemas.events import Failure
from headrace.services.scheduler.starts import NO_TENANT, unproved
from headrace.services.scheduler.waiting_tasks import WaitingTask

UNPROVED_LIVE = 32
"""At most so many tasks that no key has signed have started and have not ended. The body of each,
of some MiB at most, is in memory when it starts."""
UNPROVED_TASK = WaitingTask("train", NO_TENANT, 1)
"""What counts of each of them. This object itself marks them: a task may claim any tenant."""
_UNPROVED = unproved("no trusted key has signed it")


@dataclass(frozen=True, slots=True)
class RefusedTask:
    """A task that starts only to end."""

    number: int
    task: WaitingTask
    verdict: Failure


class RefusedTasks:
    """What is known of these tasks. Of one that no key has signed, only the number."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[int, RefusedTask] = OrderedDict()
        """By number."""
        self._unproved: OrderedDict[int, None] = OrderedDict()
        """The numbers of those that no key has signed, ascending."""
        self.live = 0
        """How many of those have started and have not ended."""

    def __contains__(self, number: int) -> bool:
        return number in self._verdicts or number in self._unproved

    def add(self, number: int, task: WaitingTask, verdict: Failure) -> None:
        """Adds a task that can't be run, for a reason that is known only here."""
        self._verdicts[number] = RefusedTask(number, task, verdict)

    def add_unproved(self, number: int) -> None:
        """Adds a task that no key of its tenant has signed. They come in ascending order."""
        self._unproved[number] = None

    @property
    def unproved(self) -> int:
        """How many tasks that no key has signed have not started."""
        return len(self._unproved)

    def first_unproved(self, default: int) -> int:
        """Returns the lowest number of these, or `default` if there are none."""
        return next(iter(self._unproved), default)

    @property
    def has_verdicts(self) -> bool:
        """Whether any of the others has not started."""
        return bool(self._verdicts)

    def take(self) -> RefusedTask | None:
        """Takes the next task to end that may have been signed. None if there is none."""
        return self._verdicts.popitem(last=False)[1] if self._verdicts else None

    def take_unproved(self) -> RefusedTask | None:
        """Takes the next one that no key has signed. None if enough of them are live."""
        if not self._unproved or self.live >= UNPROVED_LIVE:
            return None
        return RefusedTask(self._unproved.popitem(last=False)[0], UNPROVED_TASK, _UNPROVED)
