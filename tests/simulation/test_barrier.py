"""Policies at a version barrier stay together, and always go on."""

from __future__ import annotations

import pytest

from tests.simulation.barrier_schedules import violations_of


@pytest.mark.parametrize("seed", range(20))
def test_no_policy_runs_ahead_and_none_waits_for_ever(seed: int) -> None:
    assert violations_of(seed) == []


@pytest.mark.long
def test_a_thousand_schedules() -> None:
    assert [seed for seed in range(1000) if violations_of(seed)] == []
