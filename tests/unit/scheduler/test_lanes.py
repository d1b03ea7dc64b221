"""Which task is next: submission order, fair shares of tenants, and their limits."""

from __future__ import annotations

import heapq
from collections import Counter
from functools import cache
from random import Random
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.events import QuotaSet, TaskSubmitted
from headrace.schemas.recipe.limit_settings import Tenant
from headrace.services.scheduler.lanes import Chance, Lane, Tenants
from tests.unit.scheduler.test_core import task


@cache
def of(tenant: str, number: int, samples: int = 1) -> TaskSubmitted:
    return task(number, tenant=tenant, samples=samples)


def quota(tenant: str, weight: float = 1.0, live_episodes: int | None = None) -> QuotaSet:
    return QuotaSet(tenant=tenant, set_at=0, weight=weight, live_episodes=live_episodes)


def filled(
    lane_episodes: int, *queued: tuple[str, int], samples: int = 1, **tenants: Tenant
) -> Lane[TaskSubmitted]:
    """A lane with so many tasks of each tenant, one tenant after the other."""
    lane = Lane[TaskSubmitted](lane_episodes, Tenants(tenants))
    number = 0
    for tenant, count in queued:
        for _ in range(count):
            lane.add(number, of(tenant, number, samples))
            number += 1
    return lane


def start(lane: Lane[TaskSubmitted], most: int = 1000) -> list[str]:
    """Starts what may start. Returns the tenants."""
    found: list[str] = []
    while len(found) < most and (one := lane.next()) is not None:
        number, submitted = one
        lane.remove(number)
        lane.count(submitted.tenant, submitted.samples)
        found.append(submitted.tenant)
    return found


def test_tasks_of_one_tenant_start_in_submission_order() -> None:
    lane = filled(100, ("a", 5))
    numbers = []
    while (one := lane.next()) is not None:
        numbers.append(one[0])
        lane.remove(one[0])
        lane.count("a", 1)
    assert numbers == [0, 1, 2, 3, 4]


def test_a_tenant_that_comes_late_is_not_behind_the_queue_of_another() -> None:
    lane = filled(4, ("busy", 100), ("late", 2))
    assert sorted(start(lane)) == ["busy", "busy", "late", "late"]


def test_live_episodes_follow_the_weights() -> None:
    lane = filled(40, ("a", 100), ("b", 100), b=Tenant(weight=3.0))
    assert Counter(start(lane)) == {"a": 10, "b": 30}
    lane.count("b", -4)
    assert start(lane) == ["b"] * 4
    lane.count("a", -4)
    assert start(lane) == ["a"] * 4


def test_an_idle_share_goes_to_whoever_has_tasks() -> None:
    lane = filled(40, ("a", 100), b=Tenant(weight=1000.0))
    assert start(lane) == ["a"] * 40


def test_a_tenant_at_its_limit_waits_while_others_go_on() -> None:
    lane = filled(40, ("a", 100), ("b", 100), a=Tenant(live_episodes=3))
    assert Counter(start(lane)) == {"a": 3, "b": 37}
    lane.count("b", -2)
    assert start(lane) == ["b", "b"]
    lane.count("a", -1)
    assert start(lane) == ["a"]


def test_a_task_larger_than_its_tenants_limit_runs_alone() -> None:
    lane = filled(40, ("a", 2), samples=8, a=Tenant(live_episodes=3))
    assert start(lane) == ["a"]
    lane.count("a", -7)
    assert start(lane) == []
    lane.count("a", -1)
    assert start(lane) == ["a"]


def test_with_a_limit_of_0_tasks_wait_until_it_is_changed() -> None:
    tenants = Tenants({"a": Tenant(live_episodes=0)})
    lane = Lane[TaskSubmitted](10, tenants)
    lane.add(0, of("a", 0))
    assert start(lane) == []
    tenants.set(quota("a", live_episodes=1))
    assert start(lane) == ["a"]


def test_a_large_task_is_not_overtaken_for_ever() -> None:
    lane = filled(10, ("small", 100))
    start(lane, 9)
    lane.add(1000, of("large", 1000, 8))
    assert lane.next() is None, "the tasks of the other tenant would fit"
    lane.count("small", -7)
    assert start(lane, 1) == ["large"]


def test_a_limit_holds_in_each_lane() -> None:
    """Otherwise evaluations of few samples could keep training tasks of many waiting for ever."""
    tenants = Tenants({"a": Tenant(live_episodes=2)})
    train, evaluate = Lane[TaskSubmitted](10, tenants), Lane[TaskSubmitted](10, tenants)
    for number in range(4):
        train.add(number, of("a", number))
        evaluate.add(10 + number, of("a", 10 + number))
    assert start(train) == ["a", "a"]
    assert start(evaluate) == ["a", "a"]


def test_a_tenant_whose_task_may_not_start_is_passed_over() -> None:
    lane = filled(10, ("a", 2), ("b", 2))
    found = lane.next(lambda task, _: Chance.STARTS if task.tenant == "b" else Chance.WAITS)
    assert found is not None
    assert found[1].tenant == "b"
    assert lane.next(lambda *_: Chance.FULL) is None
    assert lane.next() == (0, of("a", 0)), "a is still the first one"


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
@pytest.mark.slow
def test_the_next_task_is_that_of_a_simple_search(chance: Random) -> None:
    """The heap gives what a search of all tenants gives, whatever happened before."""
    names = "abcd"
    limits = {
        name: Tenant(
            weight=chance.choice([0.5, 1, 2]), live_episodes=chance.choice([None, 0, 2, 5])
        )
        for name in names
    }
    tenants = Tenants(limits)
    lanes = [Lane(chance.choice([3, 12]), tenants), Lane[TaskSubmitted](4, tenants)]
    waiting: list[dict[int, TaskSubmitted]] = [{}, {}]
    for number in range(80):
        at = chance.randrange(2)
        lane, queue = lanes[at], waiting[at]
        act = chance.random()
        if act < 0.4:
            queue[number] = of(chance.choice(names), number, chance.choice([1, 1, 3]))
            lane.add(number, queue[number])
        elif act < 0.5 and queue:
            lane.remove(gone := chance.choice(list(queue)))
            del queue[gone]
        elif act < 0.6:
            name = chance.choice(names)
            tenants.set(quota(name, chance.choice([0.5, 1, 4]), chance.choice([None, 0, 3])))
        elif act < 0.8 and (busy := [one for one in names if lane.live_of(one)]):
            lane.count(chance.choice(busy), -1)
        elif (found := lane.next()) is not None:
            lane.remove(found[0])
            lane.count(found[1].tenant, found[1].samples)
            del queue[found[0]]
        assert lane.next() == _searched(lane, queue, tenants)
        assert len(lane) == len(queue)
        assert list(lane) == list(queue)


def _searched(
    lane: Lane[TaskSubmitted], queue: dict[int, TaskSubmitted], tenants: Tenants
) -> tuple[int, TaskSubmitted] | None:
    first: dict[str, int] = {}
    for number in sorted(queue):
        first.setdefault(queue[number].tenant, number)
    able = [
        (lane.live_of(name) / tenants.of(name).weight, number)
        for name, number in first.items()
        if _has_room(lane, tenants.of(name), name, queue[number].samples)
    ]
    if not able:
        return None
    number = min(able)[1]
    if lane.live and lane.live + queue[number].samples > lane._episodes:
        return None
    return number, queue[number]


def _has_room(lane: Lane[TaskSubmitted], limits: Tenant, tenant: str, samples: int) -> bool:
    live, most = lane.live_of(tenant), limits.live_episodes
    if most is None or live + samples <= most:
        return True
    return live == 0 and most > 0


def test_however_many_tenants_are_blocked_the_others_start() -> None:
    lane = filled(100, *((f"blocked {one}", 3) for one in range(200)), ("free", 2))
    looked: Counter[str] = Counter()

    def may_start(task: TaskSubmitted, _: bool) -> Chance:
        looked[task.tenant] += 1
        return Chance.STARTS if task.tenant == "free" else Chance.WAITS

    found: list[str] = []
    while (one := lane.next(may_start, new_round=not found)) is not None:
        found.append(lane.remove(one[0]).tenant)
        lane.count("free", 1)
    assert found == ["free", "free"]
    assert set(looked.values()) == {1, 2}, "a blocked tenant is looked at once in a round"
    assert looked["free"] == 2
    # In the next round they may start.
    assert start(lane, 1) == ["blocked 0"]


def test_a_tenant_of_many_blocked_tasks_stops_nobody() -> None:
    lane = filled(100, ("blocked", 65), ("free", 1))

    def may_start(task: TaskSubmitted, _: bool) -> Chance:
        return Chance.STARTS if task.tenant == "free" else Chance.WAITS

    found = lane.next(may_start)
    assert found is not None
    assert found[1].tenant == "free"


def test_memory_is_bounded_by_the_tenants_that_wait() -> None:
    lane = filled(10**6, ("a", 1), ("b", 1), a=Tenant(live_episodes=0))
    for _ in range(1000):
        lane.count("a", 1)
        lane.count("a", -1)
    assert len(lane._heap) < 100
    for number in range(2, 5000):
        lane.add(number, of(f"tenant {number}", number))
    while (one := lane.next()) is not None:
        lane.remove(one[0])
    assert len(lane) == 1
    assert len(lane._queues) == 1


def latencies(
    load: dict[str, float], limits: dict[str, Tenant], seed: int
) -> dict[str, list[float]]:
    """From submission to end, by tenant: 64 episodes at once, of 60 s in the median.

    `load` is how many of the 64 places each tenant needs on average.
    """
    chance = Random(seed)
    lane = Lane[TaskSubmitted](64, Tenants(limits))
    events: list[tuple[float, int, str, str]] = []
    mean_s = 60 * 2.718281828**0.5
    for tenant, places in load.items():
        now = 0.0
        while now < 8 * 3600:
            now += chance.expovariate(places / mean_s)
            events.append((now, len(events), "comes", tenant))
    heapq.heapify(events)
    came: dict[int, float] = {}
    taken: dict[str, list[float]] = {tenant: [] for tenant in load}
    tasks = {tenant: of(tenant, 0) for tenant in load}
    while events:
        now, number, what, tenant = heapq.heappop(events)
        if now > 8 * 3600:
            break
        if what == "comes":
            came[number] = now
            lane.add(number, tasks[tenant])
        else:
            taken[tenant].append(now - came[number])
            lane.count(tenant, -1)
        while (found := lane.next()) is not None:
            begun, submitted = found
            lane.remove(begun)
            lane.count(submitted.tenant, 1)
            end = now + chance.lognormvariate(4.0943, 1.0)
            heapq.heappush(events, (end, begun, "ends", submitted.tenant))
    return taken


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_at_ten_times_its_limit_hardly_slows_another_one(seed: int) -> None:
    limits = {"greedy": Tenant(live_episodes=24), "polite": Tenant()}
    alone = latencies({"polite": 30.0}, limits, seed)["polite"]
    beside = latencies({"polite": 30.0, "greedy": 240.0}, limits, seed)["polite"]
    assert quantiles(beside, n=100)[98] <= 1.2 * quantiles(alone, n=100)[98]
