"""The tasks that wait, and which one is next. Pure.

Training and evaluation have a lane each, with a limit of live episodes. In a lane the next task is
the oldest one of the tenant that has the fewest live episodes for its weight (max-min fairness). A
tenant at its own limit is passed over. If the lane has no room for the next task, the others wait,
too: otherwise tasks of few samples could overtake one of many for ever.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

from headrace.schemas.events import QuotaSet, TaskSubmitted
from headrace.schemas.recipe.tenant_settings import Tenant

_SPARE = 64
"""A lane's heap has at most about so many entries that are out of date."""


class Tenants:
    """The limits of the tenants, and their live episodes."""

    def __init__(self, settings: Mapping[str, Tenant]) -> None:
        self._settings = dict(settings)
        self._live: Counter[str] = Counter()
        self._lanes: list[Lane] = []

    def join(self, lane: Lane) -> None:
        """Adds a lane, which learns what changes."""
        self._lanes.append(lane)

    def of(self, tenant: str) -> Tenant:
        """Returns a tenant's limits."""
        return self._settings.get(tenant, _DEFAULT)

    def live(self, tenant: str) -> int:
        """Returns how many episodes of a tenant were started and have not ended."""
        return self._live[tenant]

    def share(self, tenant: str) -> float:
        """Returns a tenant's live episodes, divided by its weight."""
        return self._live[tenant] / self.of(tenant).weight

    def has_room(self, tenant: str, samples: int) -> bool:
        """Whether a task is within its tenant's limit. If it has more samples, it runs alone."""
        most, live = self.of(tenant).live_episodes, self._live[tenant]
        return most is None or live + samples <= most or (most > 0 and not live)

    def add(self, tenant: str, episodes: int) -> None:
        """Adds episodes to those that are live. A negative number takes them away."""
        self._live[tenant] += episodes
        if not self._live[tenant]:
            del self._live[tenant]
        self._notify(tenant)

    def set(self, quota: QuotaSet) -> None:
        """Takes a change of a tenant's limits."""
        self._settings[quota.tenant] = Tenant(
            weight=quota.weight, live_episodes=quota.live_episodes
        )
        self._notify(quota.tenant)

    def _notify(self, tenant: str) -> None:
        for lane in self._lanes:
            lane.rank(tenant)


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
        self._tenants.add(tenant, episodes)

    def next(self) -> tuple[int, TaskSubmitted] | None:
        """Returns the task that is next. None if there is none, or if all must wait."""
        while self._heap:
            share, number, tenant = self._heap[0]
            if (share, number) != self._rank_of(tenant):
                heapq.heappop(self._heap)
                continue
            submitted = self._queues[tenant][number]
            if not self._tenants.has_room(tenant, submitted.samples):
                heapq.heappop(self._heap)  # It comes back as soon as its episodes end.
                continue
            if self.live and self.live + submitted.samples > self._episodes:
                return None
            return number, submitted
        return None

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
        return None if queue is None else (self._tenants.share(tenant), next(iter(queue)))
