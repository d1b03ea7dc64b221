"""Who stands in the line for room in environments, and who of them is before a task."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import LimitSet
from headrace.services.scheduler import environment_line
from headrace.services.scheduler.environment_line import EnvironmentLine
from headrace.services.scheduler.environment_room import EnvironmentRoom
from headrace.services.scheduler.lanes import Tenants
from headrace.services.scheduler.waiting_tasks import WaitingTask
from tests.unit.scheduler.test_environment_room import a_recipe

NEEDS = {"shell": ("shell",), "desktop": ("desktop", "large"), "office": ("large",)}


def a_task(tenant: str, samples: int = 1, environment: str = "shell") -> WaitingTask:
    return WaitingTask("train", tenant, samples, frozenset({"default"}), environment)


@given(st.integers(0, 2**32 - 1))
def test_the_first_of_all_that_are_alike_and_need_the_same_room_is_before_a_task(seed: int) -> None:
    chance, line = Random(seed), EnvironmentLine()
    came: dict[WaitingTask, float] = {}
    tasks = [a_task(t, n, e) for t in "abcd" for n in (1, 3) for e in NEEDS]
    for _ in range(60):
        task = chance.choice(tasks)
        if chance.random() < 0.4:
            line.leave(task)
            came.pop(task, None)
        else:
            time = chance.choice([0.0, 1.0, 2.5])
            line.join(task, time, NEEDS[task.environment or ""])
            came.setdefault(task, time)
        asked = chance.choice(tasks)
        order = sorted(came, key=lambda one: came[one])  # equal ones in the order they came in
        time = came.get(asked, 1.0)
        until = order.index(asked) if asked in came else sum(at <= time for at in came.values())
        names = NEEDS[asked.environment or ""]
        first: dict[WaitingTask, WaitingTask] = {}
        for one in order[:until]:
            if set(NEEDS[one.environment or ""]) & set(names):
                first.setdefault(replace(one, tenant=""), one)
        found = [one for one, _ in line.before(asked, time, names)]
        # Of those that are like the task, any that is before it says the same.
        assert sorted(map(repr, found)) == sorted(map(repr, first.values()))
        assert len(line) == len(came)
    for one in tasks:
        line.leave(one)
    assert (len(line), line._alike) == (0, {})
    assert not any(line._needing.values())


def test_of_thousands_of_tenants_that_need_the_same_one_task_is_looked_at() -> None:
    line = EnvironmentLine()
    for number in range(5_000):
        line.join(a_task(str(number)), float(number), NEEDS["shell"])
    large = a_task("large", 8)
    assert [one.tenant for one, _ in line.before(large, 9_000.0, NEEDS["shell"])] == ["0"]


def test_the_line_has_so_many_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_line, "MOST_IN_LINE", 2)
    line = EnvironmentLine()
    for tenant in "aabc":
        line.join(a_task(tenant), 0.0, NEEDS["shell"])
    assert len(line) == 2
    line.leave(a_task("a"))
    line.join(a_task("c"), 0.0, NEEDS["shell"])
    assert line.time(a_task("c")) == 0.0


def test_those_that_wait_for_another_environment_keep_no_place_from_a_large_task() -> None:
    room = EnvironmentRoom(a_recipe(environments={"shell": 8, "other": 1}), Tenants({}))
    long, small = a_task("long", environment="other"), a_task("small")
    room.count(long, 1)
    for number in range(200):
        assert not room.has_room(a_task(str(number), environment="other"), waits=True)
    room.count(small, 8)
    large = a_task("large", 8)
    assert not room.has_room(large, waits=True)
    room.count(small, -1)
    assert not room.has_room(small, waits=True), "the large task came first"


def test_a_task_of_which_a_limit_is_0_holds_no_room_and_comes_back_as_the_last() -> None:
    room = EnvironmentRoom(a_recipe(environments={"shell": 2}, images={"a": 4}), Tenants({}))
    held, other = a_task("held", 2), a_task("other", 1)
    assert room.has_room(other, waits=True)
    room.count(other, 1)
    assert not room.has_room(held, waits=True)
    assert not room.has_room(other, waits=True), "there is room, but not beside the task before it"
    room.on_set(LimitSet(limit="scheduler.images.a", units=0, set_at=0))
    assert not room.has_room(held, waits=True)
    assert not room.has_room(other, waits=True)
    assert len(room._line) == 0
    room.on_set(LimitSet(limit="scheduler.images.a", units=4, set_at=1))
    assert room.has_room(other, waits=True)
