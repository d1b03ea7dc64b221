"""The seconds of a trainer's phases add up to the time that passed."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from headrace.trainer.metrics.exported_metrics import STATUSES, PhaseSeconds, note_version
from headrace.trainer.publish import Status

PHASES = st.sampled_from(["wait", "train", "publish"])


@given(st.lists(st.tuples(PHASES, st.floats(0, 100)), min_size=1), st.floats(0, 100))
def test_the_phases_share_the_time(steps: list[tuple[str, float]], later: float) -> None:
    phases, now_s = PhaseSeconds(), 5.0
    for phase, seconds in steps:
        phases.enter("p", phase, now_s)  # type: ignore[arg-type]
        now_s += seconds
    now_s += later
    spent = phases.spent(now_s)
    assert sum(spent.values()) == pytest.approx(sum(s for _, s in steps) + later)
    assert phases.spent(now_s) == spent


def test_a_phase_that_goes_on_counts() -> None:
    phases = PhaseSeconds()
    phases.enter("p", "train", 10.0)
    phases.enter("p", "wait", 12.0)
    assert phases.spent(20.0) == {("p", "train"): 2.0, ("p", "wait"): 8.0}
    assert phases.spent(21.0)["p", "wait"] == 9.0


def test_an_alert_sees_the_first_batch_that_is_skipped() -> None:
    """The increase of a series that begins with 1 is 0, so it must begin with 0."""
    labels = {"policy": "sees_first", "status": "skipped"}
    note_version("sees_first", 0, "initial", {})
    assert REGISTRY.get_sample_value("headrace_versions_published_total", labels) == 0.0
    note_version("sees_first", 1, "skipped", {})
    assert REGISTRY.get_sample_value("headrace_versions_published_total", labels) == 1.0
    assert set(get_args(Status)) == set(STATUSES)
