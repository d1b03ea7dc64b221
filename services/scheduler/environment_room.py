"""How many more episodes may use an environment, or a container image. Pure.

An episode counts from its start to its end, whichever worker runs its environment and whatever dies
meanwhile: both are in the log.

Tasks that found too little room stand in a line. A task may start if it leaves enough room for each
one that is before it. Their order is that of start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM
1996): a task gets a time when it comes, and its tenant's next one comes later by its samples over
the tenant's weight. So tenants get room by weight, and neither tasks of few samples nor tenants of
many tasks overtake a task for ever. A task of which a limit is 0 has no place in the line: no room
is left for what can't start anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from headrace.schemas.events import LimitSet
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.scheduler.environment_line import EnvironmentLine
from headrace.services.scheduler.lanes import Tenants
from headrace.services.scheduler.waiting_tasks import WaitingTask
from headrace.services.worker.limits.limits_of import environment_limits, limits_of_use

MOST_NAMES = 10_000
"""Environments and images whose limits are remembered."""


Able = Callable[[WaitingTask], bool]


class EnvironmentRoom:
    """The live episodes of each environment and image that has a limit."""

    def __init__(self, recipe: Recipe, tenants: Tenants) -> None:
        self._recipe = recipe
        self._tenants = tenants
        self._most = {name: limit.units for name, limit in environment_limits(recipe).items()}
        self._names: dict[tuple[str, str], tuple[str, ...]] = {}
        """The limits of an environment and an image."""
        self._live: Counter[str] = Counter()
        self._line = EnvironmentLine()
        self._now = 0.0
        """The latest time of a task that has started."""
        self._next: dict[str, float] = {}
        """By tenant: the time of its next one, if it is later."""

    def on_set(self, event: LimitSet) -> None:
        """Takes a limit's new value. Episodes that run go on."""
        if event.limit in self._most:
            self._most[event.limit] = event.units

    def count(self, task: WaitingTask, episodes: int) -> None:
        """Adds episodes to those that are live. A negative number takes them away."""
        for name in self.limits(task):
            self._live[name] += episodes
        if episodes > 0 and self.limits(task):
            time = self._time(task)
            self.leave(task)
            self._now = max(self._now, time)
            self._next[task.tenant] = time + task.samples / self._tenants.of(task.tenant).weight
            self._next = {name: at for name, at in self._next.items() if at > self._now}

    def has_room(
        self,
        task: WaitingTask,
        *,
        waits: bool,
        able: Able = lambda _: True,
    ) -> bool:
        """Whether a task may start. One with more samples than a limit starts alone.

        `waits`: its tenant's limit has room for it. So if it can't start, it stands in the line.
        `able`: whether another task could start otherwise. If not, it keeps its place in the line,
        and no room is left for it meanwhile.
        """
        names = self.limits(task)
        fits = all(self._fits(name, task.samples) for name in names)
        if not waits or not all(self._most[name] for name in names):
            self.leave(task)
        elif fits and not self._is_held(task, names, able):
            return True
        else:
            self._line.join(task, self._time(task), names)
        return False

    def leave(self, task: WaitingTask) -> None:
        """Takes a task out of the line. If one that is alike waits, it comes back as the last."""
        self._line.leave(task)

    def limits(self, task: WaitingTask) -> tuple[str, ...]:
        """Returns the limits that a task counts for."""
        if task.environment is None:
            return ()
        if (known := self._names.get((task.environment, task.image))) is None:
            names = limits_of_use(self._recipe, task.environment, task.image)
            known = tuple(name for name in names if name in self._most)
            if len(self._names) < MOST_NAMES:
                self._names[task.environment, task.image] = known
        return known

    def _fits(self, name: str, samples: int) -> bool:
        live, most = self._live[name], self._most[name]
        return most > 0 and (not live or live + samples <= most)

    def _is_held(self, task: WaitingTask, names: tuple[str, ...], able: Able) -> bool:
        """Whether a task would take room that one before it in the line needs."""
        for other, needs in self._line.before(task, self._time(task), names):
            if not able(other):
                continue
            may_start = all(self._fits(name, other.samples) for name in needs)
            for name in set(names) & set(needs):
                left = self._most[name] - self._live[name] - task.samples
                # Where nothing runs, it waits for something else, unless it may start.
                if left < other.samples and (may_start or self._live[name]):
                    return True
        return False

    def _time(self, task: WaitingTask) -> float:
        """A task's time, or the one that it would get now."""
        known = self._line.time(task)
        return max(self._now, self._next.get(task.tenant, 0.0)) if known is None else known
