"""The real routes, with engines of different speeds, long contexts and prefix caches."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from tests.simulation.inference_pool import Pool, Simulation
from tests.tiers import first_in_every_change

SPEEDS = (1.0, 0.6, 0.3)
MIXED = Pool(speeds=SPEEDS, live=600, turns=1, shared=100, thinking_s=1.0)
LONG = Pool(live=400)
AGENTS = first_in_every_change([4, 1])


@pytest.mark.parametrize("agents", AGENTS)
def test_shares_are_in_proportion_to_speed(agents: int) -> None:
    mixed = Simulation(replace(MIXED, agents=agents)).run()
    for worker, share in mixed.shares().items():
        assert share == pytest.approx(SPEEDS[int(worker)] / sum(SPEEDS), rel=0.1)
    alone = [Simulation(replace(MIXED, speeds=(one,), live=600)).run().total for one in SPEEDS]
    assert mixed.total >= 0.95 * sum(alone)


def test_a_key_leaves_the_fast_workers_idle() -> None:
    routed, keyed = (Simulation(replace(MIXED, routed=one)).run() for one in (True, False))
    assert routed.total > 1.5 * keyed.total


@pytest.mark.parametrize("agents", AGENTS)
def test_prefix_caches_hit_about_as_often_as_if_the_task_decided(agents: int) -> None:
    routed, keyed = (
        Simulation(replace(LONG, agents=agents, routed=one)).run() for one in (True, False)
    )
    assert routed.hits > 0.95 * keyed.hits
    assert routed.total > 0.95 * keyed.total
    assert routed.p99() < 1.2 * keyed.p99()


def test_long_contexts_on_workers_of_different_speeds() -> None:
    pool = replace(LONG, speeds=SPEEDS, live=300, seconds=1200.0)
    routed, keyed = (Simulation(replace(pool, routed=one)).run() for one in (True, False))
    assert routed.total > 1.3 * keyed.total
    assert routed.p99() < 0.7 * keyed.p99()


def test_twelve_workers_all_work() -> None:
    result = Simulation(Pool(speeds=(1.0,) * 12, slots=8, live=300, turns=5)).run()
    assert min(result.shares().values()) > 0.9 / 12


@pytest.mark.parametrize("live", first_in_every_change([300, 600]))
def test_a_new_worker_contributes_at_once(live: int) -> None:
    results = [Simulation(Pool(live=live, joins_s=300.0, seed=seed)).run() for seed in range(3)]
    fastest_s = 0.02 * 20
    # Its first answer may be a long one.
    assert median(one.first_s["3"] for one in results) - 300.0 < 12.0 + fastest_s
    assert all(one.shares()["3"] > 0.1 for one in results)
