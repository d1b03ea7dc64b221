"""Limits that workers share: the cores of scheduler and workers, with delays and faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.events import (
    LimitSet,
    LimitShare,
    LimitShared,
    LimitUse,
    LoadReported,
)
from headrace.services.scheduler.limits.fair_shares import Wish, fair_shares
from headrace.services.scheduler.limits.limit_division import (
    DIVIDE_S,
    MARGIN_S,
    DividedLimit,
    DividedLimits,
)
from headrace.services.worker.limits.held_limits import HeldLimits, Permit
from headrace.services.worker.limits.limits_of import LEASE_S, Limit
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.tiers import first_in_every_change

IN_FLIGHT, CALLS = "policies.p.limits.in_flight", "policies.p.limits.calls"
EXACT = 1e-9


def report(worker: str, *uses: LimitUse, lease: int = 1, leaving: bool = False) -> LoadReported:
    """A report about limits alone."""
    return LoadReported(
        worker=worker, number=0, every_ms=1000, pools=(), lease=lease, limits=uses, leaving=leaving
    )


def use(number: int, held: int, wanted: int) -> LimitUse:
    """What a worker says about the limit in flight."""
    return LimitUse(limit=IN_FLIGHT, number=number, held=held, wanted=wanted)


def shares(event: LimitShared | None) -> dict[str, tuple[int, int]]:
    """Worker to its units and its reserved ones."""
    assert event is not None
    return {one.worker: (one.units, one.reserved) for one in event.shares}


def hear(limit: DividedLimit, worker: str, seen: LimitUse, now_s: float) -> None:
    """Passes one report."""
    limit.on_report(report(worker, seen), seen, now_s)


def test_a_share_that_shrinks_is_given_on_only_when_its_worker_holds_no_more() -> None:
    limit = DividedLimit(IN_FLIGHT, Limit(10))
    limit.begin(0.0)
    hear(limit, "a", use(-1, 0, 20), 0.0)
    assert shares(limit.divide(0.0)) == {"a": (10, 10)}
    hear(limit, "a", use(0, 10, 20), 1.0)
    hear(limit, "b", use(-1, 0, 20), 1.0)
    assert shares(limit.divide(1.0)) == {"a": (5, 10)}  # b gets nothing yet
    hear(limit, "a", use(0, 10, 20), 2.0)
    assert limit.divide(2.0) is None  # a does not obey yet
    hear(limit, "a", use(1, 8, 20), 3.0)
    assert shares(limit.divide(3.0)) == {"a": (5, 8), "b": (2, 2)}
    hear(limit, "a", use(2, 5, 20), 4.0)
    assert shares(limit.divide(4.0)) == {"a": (5, 5), "b": (5, 5)}
    hear(limit, "a", use(3, 5, 20), 5.0)
    hear(limit, "b", use(3, 5, 20), 5.0)
    assert limit.divide(5.0) is None


def test_a_silent_worker_loses_its_units_only_when_all_reports_were_read() -> None:
    limit = DividedLimit(IN_FLIGHT, Limit(4))
    limit.begin(0.0)
    hear(limit, "a", use(-1, 0, 4), 0.0)
    limit.divide(0.0)
    later = LEASE_S + MARGIN_S
    hear(limit, "b", use(-1, 0, 4), later)
    assert limit.overdue(later)
    assert shares(limit.divide(later)) == {"a": (2, 4)}  # it may only have read slowly
    limit.on_heard(later - 0.001)
    assert limit.divide(later + 1) is None
    limit.on_heard(later)
    assert shares(limit.divide(later + 2)) == {"b": (4, 4)}


def test_the_units_of_a_silent_worker_cool_down_before_others_get_them() -> None:
    limit = DividedLimit(CALLS, Limit(4, 60_000))
    limit.begin(0.0)
    hear(limit, "a", use(-1, 0, 4), 0.0)
    limit.divide(0.0)
    hear(limit, "b", use(-1, 0, 4), 60.0)
    limit.on_heard(60.0)
    assert shares(limit.divide(60.0)) == {"a": (0, 4)}
    hear(limit, "b", use(-1, 0, 4), 67.0)
    limit.on_heard(67.9)
    assert limit.divide(67.9) is None
    limit.on_heard(68.0)
    assert shares(limit.divide(68.0)) == {"b": (4, 4)}


def test_a_successor_goes_on_with_what_is_reserved() -> None:
    limit = DividedLimit(IN_FLIGHT, Limit(10))
    limit.begin(0.0)
    hear(limit, "a", use(-1, 0, 20), 0.0)
    first = limit.divide(0.0)
    hear(limit, "b", use(-1, 0, 20), 1.0)
    second = limit.divide(1.0)
    assert first is not None
    assert second is not None
    successor = DividedLimit(IN_FLIGHT, Limit(10))
    for event in (first, second):
        successor.on_shared(event)
    successor.begin(100.0)
    hear(successor, "b", use(1, 0, 20), 100.0)
    hear(successor, "a", use(0, 10, 20), 100.0)
    assert successor.divide(100.0) is None
    hear(successor, "a", use(1, 5, 20), 101.0)
    assert shares(successor.divide(101.0)) == {"a": (5, 5), "b": (5, 5)}


def test_a_new_value_holds_once_what_runs_has_drained() -> None:
    limit = DividedLimit(IN_FLIGHT, Limit(10))
    limit.begin(0.0)
    hear(limit, "a", use(-1, 0, 20), 0.0)
    limit.divide(0.0)
    limit.on_set(LimitSet(limit=IN_FLIGHT, set_at=1, units=2))
    lowered = limit.divide(1.0)
    assert lowered is not None
    assert lowered.units == 2
    assert shares(lowered) == {"a": (2, 10)}
    limit.on_set(LimitSet(limit=IN_FLIGHT, set_at=2, units=0))
    assert shares(limit.divide(2.0)) == {"a": (0, 10)}
    limit.on_set(LimitSet(limit=IN_FLIGHT, set_at=3, units=20))
    hear(limit, "a", use(2, 9, 20), 3.0)
    assert shares(limit.divide(3.0)) == {"a": (20, 20)}


def test_workers_take_turns_if_there_are_fewer_units_than_workers() -> None:
    limit = DividedLimit(IN_FLIGHT, Limit(1))
    limit.begin(0.0)
    now_s, number, had = 0.0, -1, []
    while now_s < 20:
        for worker in "abc":
            hear(limit, worker, use(number, 0, 3), now_s)
        if (event := limit.divide(now_s)) is not None:
            number = event.number
            had += [one.worker for one in event.shares if one.units]
        now_s += 0.5
    assert set(had[:3]) == set("abc")
    assert len(had) >= 6


@pytest.mark.parametrize(("workers", "units", "call_s"), [(50, 50, 30.0), (50, 20, 3.0)])
@pytest.mark.slow
def test_no_worker_starves_if_calls_are_long(workers: int, units: int, call_s: float) -> None:
    limit = DividedLimit(IN_FLIGHT, Limit(units))
    limit.begin(0.0)
    share, busy_until, number = Counter[str](), dict[str, float](), -1
    served = set[str]()
    for tick in range(100 * 300):
        now_s, worker = tick / 100, f"w{tick % workers}"
        if tick // workers < tick % workers % 7:
            continue  # some come later than others, and find all units in use
        held = int(busy_until.get(worker, 0.0) > now_s)
        if not held and share[worker]:
            busy_until[worker], held = now_s + call_s, 1
            served.add(worker)
        hear(limit, worker, use(number, held, held + 3), now_s)
        if (event := limit.divide(now_s)) is not None:
            number = event.number
            share = Counter({one.worker: one.units for one in event.shares})
    assert len(served) == workers


def test_a_worker_that_drains_keeps_the_units_that_it_still_needs() -> None:
    limit = DividedLimit(IN_FLIGHT, Limit(10))
    limit.begin(0.0)

    def drains(number: int, wanted: int, now_s: float) -> None:
        seen = use(number, wanted, wanted)
        limit.on_report(report("a", seen, leaving=True), seen, now_s)
        hear(limit, "b", use(number, 0, 20), now_s)

    hear(limit, "a", use(-1, 0, 20), 0.0)
    assert shares(limit.divide(0.0)) == {"a": (10, 10)}
    drains(0, 8, 1.0)
    assert shares(limit.divide(1.0))["a"][0] > 0
    drains(1, 0, 10.0)
    assert shares(limit.divide(10.0))["a"][0] == 0


@pytest.mark.parametrize(
    ("of_limit", "of_worker", "share"), [(0, 0, 0.0), (4, 0, 1.0), (4, 3, 3.0)]
)
def test_only_a_limit_of_0_means_that_a_worker_will_never_be_free(
    of_limit: int, of_worker: int, share: float
) -> None:
    held = HeldLimits("a", {IN_FLIGHT: Limit(of_limit)}, lease=1)
    own = LimitShare(worker="a", lease=1, units=of_worker, reserved=of_worker)
    held.on_shared(
        LimitShared(limit=IN_FLIGHT, number=0, units=of_limit, period_ms=0, shares=(own,))
    )
    assert held.share([IN_FLIGHT]) == share


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8),
)
def test_shares_are_max_min_fair(units: int, both: list[tuple[int, int]]) -> None:
    wishes = [Wish(has, wanted, 0.0) for has, wanted in both]
    found = fair_shares(units, wishes, 100.0)
    assert sum(found) == units
    if units < len(wishes):
        assert set(found) <= {0, 1}
        return
    wanted = [max(1, one.wanted) for one in wishes]
    for share, want in zip(found, wanted, strict=True):
        if share < want:  # nobody has two more than a worker that lacks some
            assert max(min(a, b) for a, b in zip(found, wanted, strict=True)) <= share + 1
            assert all(a <= b for a, b in zip(found, wanted, strict=True))


@given(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_equal_wishes_move_nothing(units: int, more: list[int]) -> None:
    """Workers that all want more than their share keep what they have."""
    first = fair_shares(units, [Wish(0, units, 0.0) for _ in more], 0.0)
    if units >= len(more):
        again = [Wish(has, units + extra, 0.0) for has, extra in zip(first, more, strict=True)]
        assert fair_shares(units, again, 9.0) == first


@dataclass(eq=False)
class Log:
    """A topic that all read: a reader gets each record a moment after it was written, in order."""

    records: list[object] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, record: object) -> None:
        self.records.append(record)
        self.grown.set()
        self.grown = asyncio.Event()


class World:
    """Four workers and a scheduler. Each is paused, killed and replaced by chance."""

    def __init__(self, seed: int, limits: dict[str, Limit]) -> None:
        self.chance = Random(seed)
        self.limits = limits
        self.loads, self.shares = Log(), Log()
        self.paused: dict[str, float] = {}
        """Worker or scheduler, to when it wakes."""
        self.held: dict[str, HeldLimits] = {}
        self.running: dict[str, set[Permit]] = {}
        self.begun: list[float] = []
        self.most = 0
        self.healed = False
        self.loop = asyncio.get_running_loop()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.calls: set[asyncio.Task[None]] = set()

    async def rest(self, name: str, seconds: float) -> None:
        """Sleeps, and for as long as the process is paused."""
        await asyncio.sleep(seconds * self.chance.uniform(0.5, 1.5))
        while (wakes := self.paused.get(name, 0.0)) > self.loop.time():
            await asyncio.sleep(wakes - self.loop.time())

    async def read(
        self, name: str, log: Log, start: int, take: Callable[[int, object], None]
    ) -> None:
        at = start
        while True:
            while at < len(log.records):
                await self.rest(name, self.chance.choice([0.001, 0.01, 0.3]))
                take(at, log.records[at])
                at += 1
            await log.grown.wait()

    async def work(self, name: str) -> None:
        """One worker's process."""
        held = HeldLimits(name, self.limits, round(1000 * self.loop.time()))
        self.held[name] = held
        running = self.running[name] = set()
        names = tuple(self.limits)

        def on_shared(_: int, event: object) -> None:
            assert isinstance(event, LimitShared)
            held.on_shared(event)

        async def reports() -> None:
            while True:
                sent_s, waiting = self.loop.time(), self.chance.choice([0, 2, 20])
                uses = held.uses(sent_s, dict.fromkeys(names, waiting))
                sent = report(name, *uses, lease=held.lease)
                lease = held.lease
                on_its_way_s = self.chance.choice([0.01, 0.01, 0.1, 4.0])
                await asyncio.sleep(0.01 if self.healed else on_its_way_s)
                self.loads.append(sent)
                await self.rest(name, 0.05)
                held.on_delivered(lease, sent_s, self.loop.time())
                await self.rest(name, self.chance.choice([0.2, 1.0]))

        async def call(permit: Permit) -> None:
            try:
                await self.rest(name, self.chance.choice([0.05, 0.5, 3.0]))
            finally:
                permit.release()
                running.discard(permit)

        async def calls() -> None:
            making: dict[Permit, asyncio.Task[None]] = {}
            while True:
                if held.is_over(self.loop.time()):
                    for task in making.values():
                        task.cancel()
                    making.clear()
                    for permit in list(running):
                        permit.release()
                    running.clear()
                while held.any_free(names, self.loop.time()) and self.chance.random() < 0.8:
                    permit = held.take(names, self.loop.time())
                    permit.begun(self.loop.time())
                    self.begun.append(self.loop.time())
                    running.add(permit)
                    making[permit] = asyncio.create_task(call(permit))
                    self.calls.add(making[permit])
                    self.count()
                await self.rest(name, 0.1)

        reading = self.read(name, self.shares, 0, on_shared)
        await asyncio.gather(reports(), calls(), reading)

    def count(self) -> None:
        now_s = self.loop.time()
        awake = (
            len(running)
            for name, running in self.running.items()
            # Calls end with the lease, and nothing runs in a process that is paused.
            if self.paused.get(name, 0.0) <= now_s < self.held[name].lease_until
        )
        self.most = max(self.most, sum(awake))

    async def schedule(self) -> None:
        """One scheduler's process."""
        divided = DividedLimits(self.limits)
        for event in self.shares.records:
            assert isinstance(event, LimitShared)
            divided.on_shared(event)
        read = start = len(self.loads.records)
        divided.begin(self.loop.time())

        def on_report(at: int, event: object) -> None:
            nonlocal read
            assert isinstance(event, LoadReported)
            read = at + 1
            divided.on_report(event, self.loop.time())

        async def decide() -> None:
            probe: tuple[float, int] | None = None
            while True:
                if probe is not None and read >= probe[1]:
                    divided.on_heard(probe[0])
                    probe = None
                if probe is None:
                    probe = self.loop.time(), len(self.loads.records)
                for event in divided.divide(self.loop.time()):
                    self.shares.append(event)
                await self.rest("scheduler", DIVIDE_S)

        await asyncio.gather(decide(), self.read("scheduler", self.loads, start, on_report))

    async def run(self, seconds: float) -> None:
        starts: dict[str, Callable[[], object]] = {f"w{i}": lambda: None for i in range(4)}
        number = len(starts)
        for name in starts:
            self.tasks[name] = asyncio.create_task(self.work(name))
        self.tasks["scheduler"] = asyncio.create_task(self.schedule())
        while self.loop.time() < seconds:
            await asyncio.sleep(self.chance.expovariate(0.5))
            victim = self.chance.choice(list(self.tasks))
            act = self.chance.choice(["pause", "kill", "nothing"])
            if act == "pause":
                self.paused[victim] = self.loop.time() + self.chance.choice([0.5, 5.0, 9.0, 20.0])
            elif act == "kill":
                self.tasks.pop(victim).cancel()
                self.running.pop(victim, None)
                if victim == "scheduler":
                    self.tasks[victim] = asyncio.create_task(self.schedule())
                else:
                    number += 1
                    self.tasks[f"w{number}"] = asyncio.create_task(self.work(f"w{number}"))
            for task in self.tasks.values():
                if task.done():
                    task.result()


@pytest.mark.parametrize("units", first_in_every_change([3, 1, 16]))
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_limits_hold_in_every_window_whatever_dies_or_sleeps(units: int, seed: int) -> None:
    loop = VirtualTimeLoop(seed)

    async def main() -> World:
        limits = {IN_FLIGHT: Limit(units), CALLS: Limit(units + 2, 2_000)}
        world = World(seed, limits)
        await world.run(60.0)
        world.paused.clear()
        world.healed = True
        await asyncio.sleep(60.0)
        tasks = (*world.tasks.values(), *world.calls)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return world

    try:
        world = loop.run_until_complete(main())
    finally:
        loop.close()
    assert world.most <= units
    begun = world.begun
    for first, after in zip(begun, begun[units + 2 :], strict=False):
        assert after - first >= 2.0 - EXACT
    assert sum(at > 80.0 for at in begun) > 3  # nothing that died holds units for ever
