"""Tasks whose tenant is not proved: they end at once, and take nothing from the tenant."""

from __future__ import annotations

from headrace.schemas.events import TaskCancelled
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.scheduler.refused_tasks import UNPROVED_LIVE
from headrace.services.scheduler.starts import NO_TENANT, UNPROVED
from headrace.services.tasks.cancellation import CancelledTasks
from tests.unit.scheduler.test_core import end, numbers, recipe, start_all, task
from tests.unit.schemas.test_trusted_keys import OPERATOR, TREE, A, B
from tests.whole_core import WholeCore


def keyed(live_episodes: int = 2) -> Recipe:
    """Tenant `a` has a key, and as many live episodes as one task has samples."""
    tenants = {**TREE["tenants"], "a": {"keys": [A], "live_episodes": live_episodes}}
    return recipe(groups=50, **{**TREE, "tenants": tenants})


def test_an_unproved_task_ends_alone_and_counts_against_no_tenant() -> None:
    core = WholeCore(keyed())
    core.on_policy("default", 0)
    for number in range(5):
        core.on_forged(number, task(number, tenant="a"))
    core.on_task(5, task(5, tenant="a"))
    starts = start_all(core)
    assert numbers(starts) == [5, 0, 1, 2, 3, 4]
    refused = [one for one in starts if one.verdict is not None]
    assert [one.task for one in refused] == [0, 1, 2, 3, 4]
    assert {(one.submitted.tenant, one.submitted.samples) for one in refused} == {(NO_TENANT, 1)}
    assert {one.verdict.code for one in refused if one.verdict} == {UNPROVED}


def test_an_unproved_task_does_not_take_the_id_of_a_later_one() -> None:
    core = WholeCore(keyed(4))
    core.on_policy("default", 0)
    core.on_forged(0, task(7, tenant="a"))
    core.on_task(1, task(7, tenant="c"))  # an open tenant takes the id in its own scope only
    core.on_task(2, task(7, tenant="a"))
    core.on_task(3, task(7, tenant="a"))
    codes = {one.task: one.verdict.code if one.verdict else "" for one in start_all(core)}
    assert codes == {0: UNPROVED, 1: "", 2: "", 3: "duplicate"}


def test_a_task_that_was_refused_before_a_restart_is_not_refused_again() -> None:
    core = WholeCore(keyed())
    core.on_policy("default", 0)
    core.on_forged(0, task(0, tenant="a"))
    successor = WholeCore(keyed())
    for start in start_all(core):
        successor.on_started(start)
    successor.on_forged(0, task(0, tenant="a"))
    assert start_all(successor) == []


def cancel(task_id: str, reason: str = "") -> TaskCancelled:
    return TaskCancelled(source="test", task_id=task_id, reason=reason)


def test_a_cancellation_counts_for_the_tenants_of_its_key() -> None:
    core = WholeCore(keyed(0))
    core.on_policy("default", 0)
    core.on_task(0, task(0, tenant="a"))
    core.on_task(1, task(1, tenant="a"))
    core.on_cancelled(cancel("0"))
    core.on_cancelled(cancel("0"), B)
    assert start_all(core) == []
    core.on_cancelled(cancel("0", "mine"), A)
    core.on_cancelled(cancel("1", "operator's"), OPERATOR)
    verdicts = {one.task: one.verdict.message for one in start_all(core) if one.verdict}
    assert verdicts == {0: "mine", 1: "operator's"}


def test_a_cancellation_counts_also_for_a_task_that_comes_later() -> None:
    tasks = CancelledTasks(keyed().scheduler.trusted)
    assert tasks.add(cancel("1", "forged")) == [("test", "1")]
    assert tasks.reason(task(1, tenant="a")) is None
    assert tasks.reason(task(1, tenant="c")) == "forged"
    assert tasks.add(cancel("1", "true"), A) == [("test", "1", "a"), ("test", "1", "b")]
    assert tasks.reason(task(1, tenant="a")) == "true"
    assert tasks.add(cancel("1", "again"), A) == []


def test_nobody_displaces_the_cancellations_of_a_tenant_with_keys() -> None:
    tasks = CancelledTasks(keyed().scheduler.trusted, kept=3)
    tasks.add(cancel("mine"), A)
    for number in range(10):
        tasks.add(cancel(str(number)))
    assert tasks.reason(task(0, task_id="mine", tenant="a")) == ""
    assert tasks.reason(task(0, task_id="mine", tenant="c")) is None


def test_unproved_tasks_take_no_live_episode_and_no_turn_of_others() -> None:
    core = WholeCore(recipe(groups=50, **TREE, live_episodes=4))
    core.on_policy("default", 0)
    for number in range(1_000):
        core.on_forged(number, task(number, tenant="a"))
    core.on_task(1_000, task(1_000, tenant="a"))
    core.on_task(1_001, task(1_001, tenant="c"))
    first = numbers(start_all(core))
    assert first[:2] == [1_000, 1_001]
    assert core.live == 4
    end(core, 1_000)
    core.on_task(1_002, task(1_002, tenant="a"))
    assert numbers(start_all(core)) == [1_002]


def test_few_unproved_tasks_are_live_at_a_time_and_all_of_them_end() -> None:
    core = WholeCore(keyed())
    for number in range(1_000):
        core.on_forged(number, task(number, tenant="a"))
    started = numbers(start_all(core))
    assert started == list(range(UNPROVED_LIVE))
    assert core.refused.unrecorded == 1_000 - UNPROVED_LIVE
    assert core.queued == 0
    while live := started[:]:
        for number in live:
            end(core, number)
            assert core.finished(number)
        started = numbers(start_all(core))
        assert len(started) <= UNPROVED_LIVE
    assert live == []
    assert (core.refused.unrecorded, core.refused.live_unproved) == (0, 0)


def test_a_successor_counts_unproved_tasks_that_are_live() -> None:
    core, successor = WholeCore(keyed()), WholeCore(keyed())
    for number in range(UNPROVED_LIVE):
        core.on_forged(number, task(number, tenant="a"))
    for start in start_all(core):
        successor.on_started(start)
    successor.on_forged(UNPROVED_LIVE, task(UNPROVED_LIVE, tenant="a"))
    assert start_all(successor) == []
    assert successor.live == 0
    end(successor, 3)
    assert numbers(start_all(successor)) == [UNPROVED_LIVE]


def test_a_task_that_claims_the_tenant_of_unproved_ones_takes_room_like_any_other() -> None:
    core = WholeCore(keyed())
    core.on_policy("default", 0)
    core.on_task(0, task(0, tenant=NO_TENANT))
    assert numbers(start_all(core)) == [0]
    assert (core.live, core.refused.live_unproved) == (2, 0)
