"""Tasks of other environments pass one whose environment is full, and it does not starve."""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.events import EnvironmentUse, TaskCancelled, TaskSubmitted
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.scheduler.core import SchedulerCore
from headrace.services.scheduler.environment_room import EnvironmentRoom
from headrace.services.scheduler.lanes import Lane
from headrace.services.tasks.task_maker import Item, TaskMaker

TENANTS = ("a", "b", "c")
IMAGES = {"shell": "small", "desktop": "large", "office": "large", "free": "small"}
"""By environment: its image."""
LIMITED = ("shell", "desktop", "large")
"""Environments and images that have a limit."""
LASTS = 3
"""Ticks that an episode lasts."""


def limited_recipe(limits: dict[str, int], **scheduler: Any) -> Recipe:
    environments = {name: most for name, most in limits.items() if name in IMAGES}
    images = {name: most for name, most in limits.items() if name not in IMAGES}
    return parse_recipe(
        {
            "name": "test",
            "tasks": {"environment": "free"},
            "environments": {
                name: {"use": "null", "options": {"image": image}} for name, image in IMAGES.items()
            },
            "scheduler": {
                "require_reports": False,
                "environments": environments,
                "images": images,
                **scheduler,
            },
            "policies": {"default": {"model": "tiny-llama", "training": False}},
        },
        "the test",
    )


class Scheduling:
    """A scheduler with tasks of three tenants. Each tick ends what has run for LASTS."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.limits = {name: chance.choice([1, 2, 5, 100]) for name in LIMITED}
        self.quotas = {name: chance.choice([None, 2, 4, 9]) for name in TENANTS}
        self.lane = chance.choice([7, 20])
        tenants: dict[str, Any] = {
            name: {"weight": chance.choice([0.5, 1, 3])}
            | ({} if most is None else {"live_episodes": most})
            for name, most in self.quotas.items()
        }
        self.recipe = limited_recipe(self.limits, live_episodes=self.lane, tenants=tenants)
        self.core = SchedulerCore(self.recipe)
        self.core.on_policy("default", 0)
        self._made = TaskMaker(self.recipe, "team").make(Item("item"), "")
        self.tasks: dict[int, TaskSubmitted] = {}
        self.waiting: dict[int, None] = {}
        self.live: Counter[int] = Counter()
        self.ends: deque[tuple[int, int, int]] = deque()
        self.tick = 0

    def submit(self, tenant: str, environment: str, samples: int) -> int:
        number = len(self.tasks)
        self.tasks[number] = self._made.model_copy(
            update={
                "task_id": str(number),
                "environment": EnvironmentUse(use=environment),
                "tenant": tenant,
                "samples": samples,
            }
        )
        self.core.on_task(number, self.tasks[number])
        self.waiting[number] = None
        return number

    def start(self) -> None:
        """Starts all that may start, and checks each."""
        while (chosen := self.core.choose(0.0)) is not None:
            task = self.tasks[chosen.number]
            if chosen.verdict is not None:
                assert chosen.verdict.code == "cancelled"
                self.core.on_outcome(chosen.number, 0)
                continue
            kind = self.kind(chosen.number)
            older = [one for one in self.waiting if one < chosen.number]
            assert all(self.kind(one) != kind for one in older), "a kind starts in order"
            del self.waiting[chosen.number]
            for name, most in self.limits_of(task).items():
                there = [one for one in self.live if name in self.limits_of(self.tasks[one])]
                held = sum(self.live[one] for one in there)
                assert not held or held + task.samples <= most, name
            self.live[chosen.number] = task.samples
            self.ends += [(self.tick + LASTS, chosen.number, i) for i in range(task.samples)]

    def kind(self, number: int) -> tuple[object, ...]:
        task = self.tasks[number]
        return task.tenant, *sorted(self.limits_of(task).keys() & self.limits.keys())

    def limits_of(self, task: TaskSubmitted) -> dict[str, float]:
        assert task.environment is not None
        own = self.quotas[task.tenant]
        found = {
            "lane": self.lane,
            f"tenant {task.tenant}": float("inf") if own is None else own,
        }
        for name in (task.environment.use, IMAGES[task.environment.use]):
            if name in self.limits:
                found[name] = self.limits[name]
        return found

    def end(self) -> None:
        """The next tick."""
        self.tick += 1
        while self.ends and self.ends[0][0] <= self.tick:
            _, number, sample = self.ends.popleft()
            self.core.on_outcome(number, sample)
            self.core.finished(number)
            self.live[number] -= 1
            if not self.live[number]:
                del self.live[number]

    def flood(self) -> None:
        """Keeps small tasks of each tenant and kind waiting."""
        waiting = {self.kind(number) for number in self.waiting}
        for tenant in self.chance.sample(TENANTS, len(TENANTS)):
            for name in self.chance.sample(list(IMAGES), len(IMAGES)):
                number = self.submit(tenant, name, 1)
                if self.kind(number) in waiting and self.chance.random() < 0.7:
                    self.cancel(number)

    def cancel(self, number: int) -> None:
        self.core._cancel(number, "test")
        del self.waiting[number]


def check_any_run(chance: Random) -> None:
    """Limits hold, kinds start in order, and all tasks start."""
    world = Scheduling(chance)
    for _ in range(40):
        act = chance.random()
        if act < 0.5:
            world.submit(
                chance.choice(TENANTS), chance.choice(list(IMAGES)), chance.choice([1, 1, 2, 6])
            )
        elif act < 0.6 and world.waiting:
            world.cancel(chance.choice(list(world.waiting)))
        elif act < 0.8:
            world.end()
        world.start()
    for _ in range(200):
        world.end()
        world.start()
    assert not world.waiting
    assert not any(world.core.environments._live.values())
    assert not world.core.environments._line


def check_a_large_task_starts(chance: Random) -> None:
    """However many small tasks of all tenants come, one of many samples starts in bounded time."""
    world = Scheduling(chance)
    for _ in range(5):
        world.flood()
        world.start()
        world.end()
    tenant, name = chance.choice(TENANTS), chance.choice(list(IMAGES))
    large = world.submit(tenant, name, chance.choice([2, 4, 7]))
    kind = world.kind(large)
    for number in [one for one in world.waiting if one < large and world.kind(one) == kind]:
        world.cancel(number)
    for _ in range(500):
        world.flood()
        world.start()
        if large not in world.waiting:
            return
        world.end()
    raise AssertionError(f"{kind} waits for ever: {world.limits}, {world.quotas}")


def check_many() -> None:
    for seed in range(60):
        check_a_large_task_starts(Random(seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_limits_hold_kinds_start_in_order_and_everything_starts(seed: int) -> None:
    check_any_run(Random(seed))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_large_task_is_not_passed_for_ever(seed: int) -> None:
    check_a_large_task_starts(Random(seed))


def test_a_full_environment_holds_only_the_tasks_that_need_it() -> None:
    world = Scheduling(Random(0))
    world.core = SchedulerCore(limited_recipe({"shell": 1}, live_episodes=9))
    world.core.on_policy("default", 0)
    for name in ("shell", "shell", "free", "desktop", "shell"):
        world.submit("a", name, 1)
    started = []
    while (chosen := world.core.choose(0.0)) is not None:
        started.append(chosen.number)
    assert started == [0, 2, 3]


def nothing_is_held(*_: object) -> bool:
    return False


def all_of_the_limit(
    self: Lane[Any], tenant: str, samples: int, kept: int, has_room: Any = Lane._has_room
) -> bool:
    return bool(has_room(self, tenant, samples, 0))


@pytest.mark.parametrize(
    ("owner", "rule", "without"),
    [
        (EnvironmentRoom, "_is_held", nothing_is_held),
        (Lane, "_has_room", all_of_the_limit),
    ],
    ids=["nobody waits in line", "tasks that pass keep nothing free"],
)
@pytest.mark.long
def test_without_a_rule_a_large_task_waits_for_ever(
    owner: type, rule: str, without: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, rule, without)
    with pytest.raises(AssertionError, match="waits for ever"):
        check_many()


def test_a_cancelled_task_takes_no_room_of_its_environment() -> None:
    core = SchedulerCore(limited_recipe({"shell": 2}))
    core.on_policy("default", 0)
    made = TaskMaker(limited_recipe({"shell": 2}), "team").make(Item("item"), "")
    for number in range(9):
        changed = {"task_id": str(number), "environment": EnvironmentUse(use="shell"), "samples": 1}
        core.on_task(number, made.model_copy(update=changed))
    for number in range(8):
        core.on_cancelled(TaskCancelled(source=made.source, task_id=str(number), reason=""))
    chosen = [core.choose(0.0) for _ in range(9)]
    run = [one.number for one in chosen if one is not None and one.verdict is None]
    assert (run, len(set(chosen))) == ([8], 9)
