"""How published weights reach the simulated workers: whole or as deltas, over the regions' links.

As in the product, a worker fetches the newest version while it serves the one before, and skips
those that became old meanwhile. It needs the whole weights if its own version is older than the
last whole one (`docs/weights.md`). A link is shared by all that is fetched over it at one time.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.scale.engines import SimulatedWorker
from tests.scale.fleet import Fleet, Region
from tests.scale.fluid import Events, Shared

_Fetch = tuple[tuple[SimulatedWorker, ...], int]


class WeightsModel:
    """Follows the publications for all workers."""

    def __init__(self, events: Events, fleet: Fleet, workers: Sequence[SimulatedWorker]) -> None:
        self._events = events
        self._training = fleet.training
        self._workers = workers
        self._newest = 0
        self._links: dict[Region, Shared[_Fetch]] = {}
        self._fetching: set[int] = set()

    def publish(self, version: int) -> None:
        """Notes a new version. Workers learn of it after the delay of their region."""
        self._newest = version
        for region in dict.fromkeys(worker.pool.region for worker in self._workers):
            self._events.after(region.delay_s, lambda region=region: self._learn(region, version))  # type: ignore[misc]

    def _learn(self, region: Region, version: int) -> None:
        for worker in self._workers:
            if worker.pool.region is region:
                worker.newest = max(worker.newest, version)
        for host in self._hosts(region):
            self._fetch(host)

    def _hosts(self, region: Region) -> list[tuple[SimulatedWorker, ...]]:
        """The workers of a region that fetch together."""
        hosts: dict[object, list[SimulatedWorker]] = {}
        for number, worker in enumerate(self._workers):
            pool = worker.pool
            if worker.alive and pool.region is region:
                key = (id(pool), number % pool.hosts) if pool.hosts else number
                hosts.setdefault(key, []).append(worker)
        return [tuple(one) for one in hosts.values()]

    def _fetch(self, host: tuple[SimulatedWorker, ...]) -> None:
        first = min(host, key=lambda one: one.version)
        key = int(host[0].name)
        if key in self._fetching or first.newest <= first.version or not first.alive:
            return
        assert self._training is not None
        self._fetching.add(key)
        job: _Fetch = host, first.newest
        region = first.pool.region
        if region.bytes_per_s is None:
            self._events.after(self._training.home_load_s, lambda: self._fetched(job))
            return
        size = self._size(first.version, first.newest)
        link = self._links.get(region)
        if link is None:
            link = self._links[region] = Shared(self._events, self._fetched, lambda: 1.0)
        link.add(job, size / region.bytes_per_s + 2 * region.delay_s, 1.0)

    def _size(self, have: int, version: int) -> float:
        assert self._training is not None
        full = version - version % self._training.full_every
        if have >= full:
            return (version - have) * self._training.delta_bytes
        return self._training.full_bytes + (version - full) * self._training.delta_bytes

    def _fetched(self, job: _Fetch) -> None:
        host, version = job
        self._fetching.discard(int(host[0].name))
        for worker in host:
            if worker.alive:
                worker.load(version)
        pause_s = self._training.pause_s if self._training else 0.0
        self._events.after(pause_s + 0.01, lambda: self._fetch(host))
