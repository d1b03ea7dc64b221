"""The tasks that wait, and which one is next. Pure.

Training and evaluation have a lane each, with a limit of live episodes. In a lane the next task is
the oldest one of the tenant that has the fewest live episodes for its weight (max-min fairness). A
tenant at its own limit, which holds in each lane, is passed over, and so is one whose task can't
start because of its policies. If the lane has no room for the next task, the others wait, too:
otherwise tasks of few samples could overtake one of many for ever.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping

from headrace.schemas.events import QuotaSet, TaskSubmitted
from headrace.schemas.recipe.tenant_settings import Tenant

MOST_PASSED = 64
"""At most so many tenants are passed over because their first task may not start."""
_SPARE = 64
"""A lane's heap has at most about so many entries that are out of date."""


class Tenants:
    """The limits of the tenants."""

    def __init__(self, settings: Mapping[str, Tenant]) -> None:
        self._settings = dict(settings)
        self._lanes: list[Lane] = []

    def join(self, lane: Lane) -> None:
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


class Lane:
    """The tasks of one purpose."""

    def __init__(self, episodes: int, tenants: Tenants) -> None:
        """`episodes` may be live at most. A task that has more samples starts alone."""
        self._episodes = episodes
        self._tenants = tenants
        self._queues: dict[str, OrderedDict[int, TaskSubmitted]] = {}
        """By tenant: its tasks by number, in submission order."""
        self._tenant_of: dict[int, str] = {}
        self._heap: list[tuple[float, int, str]] = []
        """The share and the first task of tenants. Some entries are out of date."""
        self.live = 0
        """Episodes that were started and have not ended."""
        self._live_of: Counter[str] = Counter()
        """Those of each tenant."""
        tenants.join(self)

    def __len__(self) -> int:
        """How many tasks wait."""
        return len(self._tenant_of)

    def __iter__(self) -> Iterator[int]:
        """The numbers of the tasks that wait."""
        return iter(self._tenant_of)

    def __contains__(self, number: int) -> bool:
        return number in self._tenant_of

    def add(self, number: int, submitted: TaskSubmitted) -> None:
        """Adds a task that waits."""
        self._tenant_of[number] = submitted.tenant
        self._queues.setdefault(submitted.tenant, OrderedDict())[number] = submitted
        self.rank(submitted.tenant)

    def remove(self, number: int) -> TaskSubmitted:
        """Removes a task that waits, and returns it."""
        tenant = self._tenant_of.pop(number)
        queue = self._queues[tenant]
        submitted = queue.pop(number)
        if not queue:
            del self._queues[tenant]
        self.rank(tenant)
        return submitted

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
        self, may_start: Callable[[TaskSubmitted], bool] = lambda _: True
    ) -> tuple[int, TaskSubmitted] | None:
        """Returns the task that is next. None if there is none, or if all must wait.

        A tenant whose first task may not start now is passed over.
        """
        passed: list[tuple[float, int, str]] = []
        found = None
        while self._heap and len(passed) < MOST_PASSED:
            rank, number, tenant = self._heap[0]
            if (rank, number) != self._rank_of(tenant):
                heapq.heappop(self._heap)
                continue
            submitted = self._queues[tenant][number]
            if not self._has_room(tenant, submitted.samples):
                heapq.heappop(self._heap)  # It comes back as soon as its episodes end.
                continue
            if self.live and self.live + submitted.samples > self._episodes:
                break
            if may_start(submitted):
                found = number, submitted
                break
            passed.append(heapq.heappop(self._heap))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def _has_room(self, tenant: str, samples: int) -> bool:
        """Whether a task is within its tenant's limit. If it has more samples, it runs alone."""
        most, live = self._tenants.of(tenant).live_episodes, self._live_of[tenant]
        return most is None or live + samples <= most or (most > 0 and not live)

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
        return self._live_of[tenant] / self._tenants.of(tenant).weight, next(iter(queue))
