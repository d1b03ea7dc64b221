"""Tasks that are not run end without taking room or time of those that are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.schemas.events import EnvironmentUse
from headrace.services.scheduler import service
from headrace.services.scheduler.refused_tasks import REFUSED_LIVE
from tests.unit.scheduler.test_core import cancel, end, numbers, recipe, start_all, task
from tests.unit.scheduler.test_shard import Context, delivery
from tests.whole_core import WholeCore


def crowded(cancelled: int = 2_000) -> WholeCore:
    """A scheduler in which tenant `a` has cancelled many tasks that wait."""
    core = WholeCore(recipe(groups=50, live_episodes=4))
    for number in range(cancelled):
        core.on_task(number, task(number, tenant="a"))
        core.on_cancelled(cancel(number))
    core.on_policy("default", 0)
    return core


def test_cancelled_tasks_keep_nobody_waiting_and_take_no_live_episode() -> None:
    core = crowded()
    for number in (2_000, 2_001, 2_002):
        core.on_task(number, task(number, tenant="b"))
    first = numbers(start_all(core))
    assert first[:4] == [0, 2_000, 1, 2_001]
    assert 2_002 not in first, "the run has four live episodes"
    assert (core.live, core.refused.live) == (4, REFUSED_LIVE)
    end(core, 2_000)
    assert numbers(start_all(core)) == [2_002]


def test_few_refused_tasks_are_live_at_a_time_and_all_of_them_end() -> None:
    core, ended = crowded(), 0
    while started := numbers(start_all(core)):
        assert core.refused.live == len(started) <= REFUSED_LIVE
        for number in started:
            end(core, number, samples=1)
            assert core.finished(number)
        ended += len(started)
    assert (ended, core.refused.live, len(core.refused)) == (2_000, 0, 0)


def test_a_refused_task_counts_against_no_limit_of_its_tenant() -> None:
    core = WholeCore(recipe(groups=50, tenants={"a": {"live_episodes": 2}}))
    core.on_policy("default", 0)
    core.on_task(0, task(0, tenant="a", agent="nobody"))
    core.on_task(1, task(1, tenant="a"))
    assert numbers(start_all(core)) == [0, 1]


def test_a_round_that_a_refused_task_begins_looks_at_every_tenant_again() -> None:
    core = WholeCore(recipe())
    for number in range(2):
        core.on_task(number, task(number))
    assert core.choose(1.0) is None, "there is no version yet"
    core.on_policy("default", 0)
    core.on_cancelled(cancel(0))
    chosen = [core.choose(1.0, new_round=first) for first in (True, False)]
    assert [one and one.number for one in chosen] == [0, 1]


def test_a_successor_counts_refused_tasks_that_are_live() -> None:
    core, successor = crowded(), WholeCore(recipe())
    for start in start_all(core):
        successor.on_started(start)
    assert (successor.live, successor.refused.live) == (0, REFUSED_LIVE)
    successor.on_task(9_000, task(9_000, agent="nobody"))
    assert start_all(successor) == []
    end(successor, 0, samples=1)
    assert numbers(start_all(successor)) == [9_000]


def test_a_record_names_cancelled_tasks_and_ends_before_those_refused_when_read() -> None:
    core = WholeCore(recipe())
    for number in range(1, 4):
        core.on_task(number, task(number))
    core.on_task(4, task(4, environment=EnvironmentUse(use="none")))
    core.on_task(5, task(1))
    core.on_cancelled(cancel(2))
    below = core.refused.first_unrecorded(6)
    assert (below, core.waiting(below)) == (4, [1, 2, 3])
    assert core.refused.unrecorded == 2
    # A successor gets them from the record, and finds out again which are cancelled.
    successor = WholeCore(recipe())
    successor.on_cancelled(cancel(2))
    for number in (1, 2, 3):
        successor.on_task(number, task(number), accepted=True)
    assert [one.task for one in start_all(successor)] == [2]
    # Once these have started, all tasks can be recorded.
    start_all(core)
    assert (core.refused.first_unrecorded(6), core.refused.unrecorded) == (6, 0)


class Paused(Context):
    """A context that says whether its partition is paused."""

    is_paused = False

    async def pause(self) -> None:
        self.is_paused = True


@pytest.mark.parametrize(
    ("limit", "changes"),
    [("UNRECORDED_HIGH", {"agent": "nobody"}), ("QUEUE_HIGH", {}), ("QUEUE_HIGH", {"samples": 0})],
)
def test_reading_tasks_pauses_if_too_many_wait_also_to_be_refused(
    limit: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, limit, 5)
    context = Paused()
    context.caught_up = True

    async def paused() -> list[bool]:
        services: Any = SimpleNamespace(recipe=recipe(), log=None)
        shard = service.SchedulerShard(context, services)  # type: ignore[arg-type]
        found = []
        for number in range(5):
            await shard.on_event(delivery(task(number, **changes), number))
            found.append(context.is_paused)
        return found

    assert asyncio.run(paused()) == [False] * 4 + [True]
