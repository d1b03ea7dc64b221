"""The tasks that wait, and which one is next. Pure.

Training and evaluation have a lane each, with a limit of live episodes. In a lane the next task is
the oldest one of the tenant that has the fewest live episodes for its weight (max-min fairness).

- A tenant at its own limit, which holds in each lane, is passed over, and so is one whose task
  can't start because of its policies.
- If the environment or image of a task is full, the tenant's tasks that need others pass it, as far
  as the tenant's limit has room for them beside it. It gets room in its environment in its turn
  (`environment_room.py`).
- If the lane has no room for the next task, all others wait: otherwise tasks of few samples could
  overtake one of many for ever.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from headrace.schemas.events import QuotaSet
from headrace.schemas.recipe.limit_settings import Tenant
from headrace.services.scheduler.tenant_queue import TenantQueue

_SPARE = 64
"""A lane's heap has at most about so many entries that are out of date."""


class Chance(Enum):
    """Whether a task may start, apart from the limits of its lane and its tenant."""

    STARTS = "it may start"
    FULL = "its environment or image is full"
    WAITS = "it waits for something else"


class Waiting(Protocol):
    """What a lane must know about a task that waits. Many tasks may share one object."""

    @property
    def tenant(self) -> str:
        """Whose task it is."""

    @property
    def samples(self) -> int:
        """How many episodes it has."""


W = TypeVar("W", bound=Waiting)


class Tenants:
    """The limits of the tenants."""

    def __init__(self, settings: Mapping[str, Tenant]) -> None:
        self._settings = dict(settings)
        self._lanes: list[Lane[Any]] = []

    def join(self, lane: Lane[Any]) -> None:
        """Adds a lane, which learns what changes."""
        self._lanes.append(lane)

    def of(self, tenant: str) -> Tenant:
        """Returns a tenant's limits."""
        return self._settings.get(tenant, _DEFAULT)

    def set(self, quota: QuotaSet) -> None:
        """Takes a change of a tenant's limits."""
        self._settings[quota.tenant] = Tenant(
            weight=quota.weight, live_episodes=quota.live_episodes
        )
        for lane in self._lanes:
            lane.rank(quota.tenant)


_DEFAULT = Tenant()


class Lane(Generic[W]):
    """The tasks of one purpose. A task takes about 100 bytes."""

    def __init__(
        self, episodes: int, tenants: Tenants, kind: Callable[[W], Hashable] = lambda _: None
    ) -> None:
        """`episodes` may be live at most. A task that has more samples starts alone.

        `kind` says what a task needs. A task never passes an older one of its tenant and kind.
        """
        self._episodes = episodes
        self._tenants = tenants
        self._kind = kind
        self._queues: dict[str, TenantQueue] = {}
        """By tenant: its tasks that wait."""
        self._waiting: dict[int, W] = {}
        """The tasks that wait, by number."""
        self._heap: list[tuple[float, int, str]] = []
        """The share and the first task of tenants. Some entries are out of date, or there twice."""
        self._aside: set[str] = set()
        """Tenants of which no task may start in this round."""
        self.live = 0
        """Episodes that were started and have not ended."""
        self._live_of: Counter[str] = Counter()
        """Those of each tenant."""
        tenants.join(self)

    def __len__(self) -> int:
        """How many tasks wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[int]:
        """The numbers of the tasks that wait."""
        return iter(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def add(self, number: int, task: W) -> None:
        """Adds a task that waits. The tasks come in ascending order of their numbers."""
        self._waiting[number] = task
        self._queues.setdefault(task.tenant, TenantQueue()).add(number, self._kind(task))
        self.rank(task.tenant)

    def remove(self, number: int) -> W:
        """Removes a task that waits, and returns it."""
        task = self._waiting.pop(number)
        queue = self._queues[task.tenant]
        queue.remove(number, self._kind(task), self._waiting)
        if not queue:
            del self._queues[task.tenant]
        self.rank(task.tenant)
        return task

    def count(self, tenant: str, episodes: int) -> None:
        """Adds episodes to those that are live. A negative number takes them away."""
        self.live += episodes
        self._live_of[tenant] += episodes
        if not self._live_of[tenant]:
            del self._live_of[tenant]
        self.rank(tenant)

    def live_of(self, tenant: str) -> int:
        """Returns how many of a tenant's episodes are live."""
        return self._live_of[tenant]

    def next(
        self,
        may_start: Callable[[W, bool], Chance] = lambda *_: Chance.STARTS,
        *,
        new_round: bool = True,
    ) -> tuple[int, W] | None:
        """Returns the task that is next. None if there is none, or if all must wait.

        `may_start` is also passed whether the tenant's limit has room for the task. In a round,
        tasks are only started, which takes room. So a tenant of which no task may start is looked
        at once in a round.
        """
        if new_round:
            aside, self._aside = self._aside, set()
            for tenant in aside:
                self.rank(tenant)
        passed: dict[str, tuple[float, int, str]] = {}
        best: tuple[float, int] | None = None
        while self._heap:
            rank, number, tenant = self._heap[0]
            if best is not None and best < (rank, number):
                break
            entry = heapq.heappop(self._heap)
            if tenant in passed or tenant in self._aside or entry[:2] != self._rank_of(tenant):
                continue
            chosen, is_at_limit = self._choose(tenant, may_start)
            if chosen is not None:
                passed[tenant] = entry
                best = min(best or (rank, chosen), (rank, chosen))
            elif not is_at_limit:  # Else it comes back as soon as its episodes end.
                self._aside.add(tenant)
        for entry in passed.values():
            heapq.heappush(self._heap, entry)
        if best is None:
            return None
        task = self._waiting[best[1]]
        fits = not self.live or self.live + task.samples <= self._episodes
        return (best[1], task) if fits else None

    def _choose(
        self, tenant: str, may_start: Callable[[W, bool], Chance]
    ) -> tuple[int | None, bool]:
        """Returns a tenant's next task, for which the lane may lack room. None if it must wait.

        Also returns whether that is because of the tenant's limit alone.
        """
        kept, stopped, is_at_limit = 0, False, False
        for number in self._queues[tenant].heads():
            task = self._waiting[number]
            within_limit = not stopped and self._has_room(tenant, task.samples, kept)
            chance = may_start(task, within_limit)  # If not, it leaves its line.
            if stopped:
                continue
            if within_limit and chance is Chance.STARTS:
                return number, False
            if within_limit and chance is Chance.FULL:
                kept = max(kept, task.samples)
                continue
            stopped, is_at_limit = True, not within_limit and not kept
        return None, is_at_limit

    def _has_room(self, tenant: str, samples: int, kept: int) -> bool:
        """Whether a task is within its tenant's limit, of which so many episodes are `kept` free.

        If nothing is kept, a task that has more samples than the limit runs alone.
        """
        most, live = self._tenants.of(tenant).live_episodes, self._live_of[tenant]
        if most is None or live + samples + kept <= most:
            return True
        return most > 0 and not live and not kept

    def rank(self, tenant: str) -> None:
        """Takes note that something about a tenant has changed."""
        rank = self._rank_of(tenant)
        if rank is None:
            return
        heapq.heappush(self._heap, (*rank, tenant))
        if len(self._heap) > 2 * len(self._queues) + _SPARE:
            ranks = ((self._rank_of(one), one) for one in self._queues)
            self._heap = [(*found, one) for found, one in ranks if found is not None]
            heapq.heapify(self._heap)

    def _rank_of(self, tenant: str) -> tuple[float, int] | None:
        """Returns a tenant's share and its first task. None if it has no task that waits."""
        queue = self._queues.get(tenant)
        if queue is None:
            return None
        return self._live_of[tenant] / self._tenants.of(tenant).weight, queue.first
