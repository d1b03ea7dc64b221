"""Autoscaling against fixed pools: the same versions with fewer worker-hours."""

from __future__ import annotations

from math import ceil

import pytest

from tests.simulation.scaled_pool import Load, Simulation
from tests.tiers import first_in_every_change

HOUR_S = 3600.0


def grows(now_s: float) -> float:
    """The time of an episode: it grows to three times what it was, as answers get longer."""
    return 120 + 26 * now_s / HOUR_S


def hill(now_s: float) -> float:
    """It grows in four hours, and shrinks again."""
    return 130 + 250 * max(0.0, 1 - abs(now_s / HOUR_S - 5) / 4)


@pytest.mark.parametrize("episode_s", [grows, hill])
@pytest.mark.parametrize("seed", first_in_every_change([0, 1]))
def test_a_scaled_pool_needs_fewer_worker_hours(episode_s: object, seed: int) -> None:
    assert callable(episode_s)
    scaled = Simulation(Load(episode_s, scaled=(2, 16), seed=seed)).run()
    fixed = next(
        result
        for workers in range(9, 17)
        if (result := Simulation(Load(episode_s, workers=workers, seed=seed)).run()).versions
        >= scaled.versions
    )
    assert scaled.worker_hours <= 0.87 * fixed.worker_hours
    assert scaled.versions >= 0.97 * fixed.versions
    # Each decision is the formula's.
    for one in scaled.decisions:
        assert one.wait is not None
        assert one.used is not None
        if one.wait > 0.10:
            assert one.wanted <= ceil(one.workers / (1 - one.wait) + 1e-6)
        elif one.wait < 0.05:
            assert one.wanted == max(2, min(one.workers, ceil(one.workers * one.used * 1.1 - 1e-9)))
        else:
            assert one.wanted == one.workers
    assert len(scaled.pool) >= 4


def test_a_constant_load_costs_little_more_than_the_right_fixed_pool() -> None:
    scaled = Simulation(Load(lambda _: 250.0, scaled=(2, 16))).run()
    fixed = Simulation(Load(lambda _: 250.0, workers=9)).run()
    assert scaled.worker_hours <= 1.06 * fixed.worker_hours
    assert scaled.versions >= 0.98 * fixed.versions


def test_a_wait_for_environments_starts_no_workers() -> None:
    """Episodes spend nearly all their time in their environments, so slots are free."""
    load = Load(lambda _: 20.0, outside_s=600.0, workers=3, scaled=(3, 16), live=1000)
    result = Simulation(load).run()
    assert result.waited_s > 0.3 * load.seconds
    assert result.pool == []
