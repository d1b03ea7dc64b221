"""The cost report equals a sum that is made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import (
    EpisodeEnded,
    InstanceStateEntered,
    PolicyPublished,
    TaskEnded,
)
from headrace.services.operate.cost.cost_report import CostReport, CostSum
from headrace.services.operate.cost.worker_lives import GRACE_S

HOUR_S = 3600


def state(
    instance: str, service: str, state: str, began_s: int, every_s: int = 60, policy: str = ""
) -> InstanceStateEntered:
    return InstanceStateEntered.model_validate(
        {
            "instance": instance,
            "worker": instance,
            "number": 0,
            "kind": "worker",
            "state": state,
            "service": service,
            "policy": policy,
            "began_at": 1000 * began_s,
            "every_ms": 1000 * every_s,
        }
    )


def result(task: int, *rewards: float | None, closed_by: str = "all") -> TaskEnded:
    return TaskEnded.model_validate(
        {
            "task": task,
            "source": "s",
            "task_id": str(task),
            "item_id": "i",
            "closed_by": closed_by,
            "outcomes": [
                EpisodeEnded(
                    task=task, sample=number, item_id="i", ending="finished", reward=reward
                ).model_dump()
                for number, reward in enumerate(rewards)
            ],
        }
    )


def version(number: int, policy: str = "default") -> PolicyPublished:
    return PolicyPublished(
        policy=policy, version=number, status="trained", digest=bytes(32), full_version=0
    )


def report(total: CostSum, until_s: float, **prices: float) -> CostReport:
    return total.report("n", until_s, {name.replace("_", "-"): p for name, p in prices.items()})


def test_worker_hours_prices_tasks_and_versions() -> None:
    total = CostSum(passing=1.0)
    for instance, begin_s, end_s in (("a", 0, HOUR_S), ("b", 1800, HOUR_S), ("c", 5400, 7200)):
        total.on_event(state(instance, "inference", "ready", begin_s), begin_s + 5)
        total.on_event(state(instance, "inference", "gone", begin_s, every_s=0), end_s)
    total.on_event(state("t", "trainer", "ready", 0, every_s=2 * HOUR_S, policy="solver"), 10)
    for event in (result(0, 1.0, 0.0), result(1, 0.5), result(0, 1.0), result(2, None)):
        total.on_event(event, 50)
    total.on_event(result(3, closed_by="cancelled"), 60)
    for one in (0, 1, 2, 2):
        total.on_event(version(one), 100)
    found = report(total, 7200, inference=2.0, trainer=1.0, trainer_solver=3.0)
    inference, trainer = found.pools
    assert (inference.pool, inference.workers, inference.peak, inference.alive) == (
        *("inference", 3, 2),
        0,
    )
    assert inference.hours == 1 + 0.5 + 0.5
    assert (inference.fixed_hours, inference.cost, inference.fixed_cost) == (4.0, 4.0, 8.0)
    assert (trainer.pool, trainer.alive, trainer.hours, trainer.cost) == (
        *("trainer-solver", 1, 2.0),
        6.0,
    )
    assert (found.tasks, found.solved, found.versions) == (3, 1, {"default": 2})
    assert (found.cost, found.fixed_cost, found.active_hours) == (10.0, 14.0, 2.0)
    assert found.each() == {
        "task": pytest.approx(10 / 3),
        "solved task": 10.0,
        "version": 5.0,
    }


def test_a_killed_worker_counts_to_its_last_record() -> None:
    total = CostSum(passing=1.0)
    total.on_event(state("a", "env", "ready", 0, every_s=90), 1000)
    (alive,) = report(total, 1000 + 90 + GRACE_S).pools
    assert (alive.alive, alive.hours * HOUR_S, alive.unsure_hours) == (1, 1000 + 90 + GRACE_S, 0)
    (killed,) = report(total, 1000 + 91 + GRACE_S).pools
    assert (killed.alive, killed.hours * HOUR_S) == (0, 1000)
    assert killed.unsure_hours * HOUR_S == 90


def test_a_worker_that_starts_again_under_its_name_has_another_life() -> None:
    total = CostSum(passing=1.0)
    for began_s in (0, 3000):
        total.on_event(state("env-pod-1", "env", "ready", began_s), began_s + 1)
        total.on_event(state("env-pod-1", "env", "gone", began_s), began_s + 600)
    (pool,) = report(total, 7200).pools
    assert (pool.workers, pool.hours * HOUR_S, pool.peak) == (2, 1200, 1)


def test_a_killed_worker_and_its_successor_do_not_count_as_two_at_once() -> None:
    total = CostSum(passing=1.0)
    total.on_event(state("killed", "env", "ready", 0, every_s=90), 1000)
    total.on_event(state("successor", "env", "ready", 1005, every_s=90), 1006)
    (pool,) = report(total, 1020).pools
    assert (pool.alive, pool.peak) == (2, 1)
    total.on_event(state("killed", "env", "ready", 0, every_s=90), 1090)  # it lives after all
    (pool,) = report(total, 1100).pools
    assert (pool.alive, pool.peak) == (2, 2)


def test_without_prices_there_is_no_cost_and_sandboxes_are_no_workers() -> None:
    total = CostSum(passing=1.0)
    total.on_event(state("box", "", "ready", 0), 1)
    total.on_event(state("a", "env", "ready", 0), 60)
    found = report(total, 60)
    assert [pool.pool for pool in found.pools] == ["env"]
    assert found.cost is None
    assert found.each() == {"task": None, "solved task": None, "version": None}
    assert "no price is known" in "\n".join(found.lines())


@given(
    st.lists(
        st.tuples(st.sampled_from(("inference", "env")), st.integers(0, 50), st.integers(1, 40)),
        min_size=1,
        max_size=12,
    )
)
def test_the_report_equals_a_count_of_every_second(lives: list[tuple[str, int, int]]) -> None:
    total = CostSum(passing=1.0)
    for number, (service, begin_s, seconds) in enumerate(lives):
        total.on_event(state(str(number), service, "ready", begin_s), begin_s)
        total.on_event(state(str(number), service, "gone", begin_s), begin_s + seconds)
    found = report(total, 1000, env=HOUR_S)
    seconds_of = range(100)
    alive = {
        pool: [
            sum(service == pool and begin <= now < begin + s for service, begin, s in lives)
            for now in seconds_of
        ]
        for pool in {service for service, _, _ in lives}
    }
    active = sum(any(counts[now] for counts in alive.values()) for now in seconds_of)
    assert found.active_hours * HOUR_S == pytest.approx(active)
    for pool in found.pools:
        counts = alive[pool.pool]
        assert pool.hours * HOUR_S == pytest.approx(sum(counts))
        assert pool.peak == max(counts)
        assert pool.fixed_hours * HOUR_S == pytest.approx(max(counts) * active)
        expected = sum(counts) if pool.pool == "env" else None
        assert pool.cost == (expected if expected is None else pytest.approx(expected))


def test_a_reward_that_was_rounded_solves_its_task() -> None:
    total = CostSum(1.0)
    total.on_event(result(0, 1 - 1e-16), 1.0)
    total.on_event(result(1, 1 - 1e-6), 1.0)
    assert total.report("exp", 2.0, {}).solved == 1
