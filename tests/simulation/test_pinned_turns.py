"""Prompts pinned to several versions, in a closed loop with generations of a minute."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.errors import BlobError, InfrastructureError
from headrace.schemas.events import Blob, GenerationRequested, PolicyPublished, Sampling
from headrace.services.base import clock
from headrace.services.inference.engine import Capacity, Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.pinned import PinnedVersions
from headrace.services.inference.serving import ServedPolicy
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.tiers import first_in_every_change

MEDIAN_S, THINK_S, LOAD_S = 60.0, 20.0, 20.0
HOURS = 6.0


@dataclass
class SlowEngine:
    """An engine of 256 slots that takes a while to load."""

    busy: int = 0
    loads: int = 0

    def capacity(self) -> Capacity:
        return Capacity(free_slots=256 - self.busy, context=32_768)

    async def close(self, drain_s: float) -> None:
        pass

    async def load(self, weights: Weights) -> None:
        assert self.busy == 0
        self.loads += 1
        await asyncio.sleep(LOAD_S)


@dataclass
class Loop:
    """Episodes that ask, think, and ask again."""

    seed: int
    deadline_s: float = 24 * 3600.0
    broken: float = 0.0
    """The share of loads that fail. If there are any, an episode asks again after a failure."""
    failed: dict[str, int] = field(default_factory=dict)
    """By the failure's code."""
    answered: dict[int, int] = field(default_factory=dict)
    longest_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.engine = SlowEngine()
        served = SimpleNamespace(
            version=-1,
            engine=self.engine,
            slots=Slots(cast(Any, self.engine)),
            permits=None,
        )
        self.pinned = PinnedVersions(
            "default", lambda: cast(ServedPolicy, served), self._find, self._fetch
        )
        self._random = random.Random(self.seed)
        self._loading = random.Random(self.seed)

    async def _find(self, policy: str, version: int) -> PolicyPublished:
        blob = Blob(sha256=bytes(32), size=0)
        return PolicyPublished(
            policy=policy, version=version, status="trained", digest=bytes(32), full=blob,
            full_version=version,
        )  # fmt: skip

    def _fetch(self, published: PolicyPublished) -> Weights:
        if self._loading.random() < self.broken:
            raise BlobError("it can't be fetched now")
        return Weights(published.policy, published.version, Path("weights"))

    def _draw(self, median: float) -> float:
        return median * math.exp(self._random.gauss(0.0, 1.0))

    async def episode(self, version: int) -> None:
        while True:
            try:
                await self.turn(version)
            except InfrastructureError as error:
                if not self.broken:
                    raise
                self.failed[error.code] = self.failed.get(error.code, 0) + 1
            await asyncio.sleep(self._draw(THINK_S))

    async def turn(self, version: int) -> None:
        asked = clock.now()
        request = GenerationRequested(
            task=1, sample=0, attempt=0, call="0", policy="default", tokens=b"", text="",
            sampling=Sampling(max_tokens=1), digest=bytes(16), pinned=version,
            expires_at=int((asked + self.deadline_s) * 1000),
        )  # fmt: skip
        async with self.pinned.take(request) as (served, slot):
            self.longest_wait_s = max(self.longest_wait_s, clock.now() - asked)
            self.engine.busy += 1
            slot.start()
            try:
                await asyncio.sleep(self._draw(MEDIAN_S))
                assert served.version == version
            finally:
                self.engine.busy -= 1
        self.answered[version] = self.answered.get(version, 0) + 1

    async def run(self, episodes: dict[int, int]) -> int:
        """Returns the prompts answered in six hours, of so many episodes of each version."""
        tasks = [
            asyncio.create_task(self.episode(version))
            for version, count in episodes.items()
            for _ in range(count)
        ]
        await asyncio.sleep(HOURS * 3600.0)
        for task in tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pinned.close()
        return sum(self.answered.values())


SEEDS = first_in_every_change(range(3))


def rate(episodes: dict[int, int], seed: int = 0, **options: Any) -> tuple[float, Loop]:
    """Returns prompts answered, as a share of what the same number of one version would have."""
    total, _ = in_virtual_time(seed, {1: sum(episodes.values())}, **options)
    found, mixed = in_virtual_time(seed, episodes, **options)
    return found / total, mixed


def in_virtual_time(seed: int, episodes: dict[int, int], **options: Any) -> tuple[int, Loop]:
    async def main() -> tuple[int, Loop]:
        world = Loop(seed, **options)
        return await world.run(episodes), world

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main())


@pytest.mark.parametrize("seed", SEEDS)
def test_two_versions_waste_little_time_on_draining(seed: int) -> None:
    found, mixed = rate({1: 150, 2: 150}, seed)
    # One version at a time: half of the episodes wait, so a half would be perfect.
    assert found > 0.3
    assert mixed.engine.loads < 15
    assert min(mixed.answered.values()) > 0.3 * max(mixed.answered.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_few_old_episodes_do_not_hold_the_engine_for_long(seed: int) -> None:
    assert rate({1: 15, 2: 285}, seed)[0] > 0.35


@pytest.mark.parametrize(
    "seed", first_in_every_change([1, 2])
)  # without the rule, prompts expire with both
def test_a_turn_ends_before_the_prompts_of_others_expire(seed: int) -> None:
    in_virtual_time(seed, {1: 150, 2: 150}, deadline_s=2 * 3600.0)


def test_expired_prompts_and_failed_loads_leave_nothing_behind() -> None:
    _, mixed = in_virtual_time(3, {1: 40, 2: 40, 3: 40}, deadline_s=900.0, broken=0.2)
    assert min(mixed.answered[version] for version in (1, 2, 3)) > 100
    assert min(mixed.failed.get(code, 0) for code in ("expired", "version_unavailable")) > 10
    assert (mixed.engine.busy, mixed.pinned._in_flight) == (0, 0)
