"""Runs in which tenants have keys: no forged request has an effect, and no signed one is lost."""

from __future__ import annotations

from collections import Counter

from headrace.schemas.events import TaskSubmitted
from tests.simulation.processes import Run
from tests.simulation.scenario import draw, draw_only
from tests.simulation.simulate import simulate
from tests.simulation.tenant_keys import REQUESTS, has_keys
from tests.simulation.test_seeds import FOUND

FAULTS = (
    *("kill", "freeze", "expel", "rebalance", "restart", "twin", "outage", "retention"),
    *("cancel", "submit again", "waiting tenant"),
)
"""What strikes beside the requests."""


def test_only_signed_requests_count_while_processes_die() -> None:
    written: Counter[tuple[str, bool]] = Counter()
    endings: Counter[str] = Counter()
    for seed in range(4):

        async def count(run: Run, log: object) -> None:
            for one in run.requests:
                kind = "task" if isinstance(one.event, TaskSubmitted) else "cancellation"
                written[kind, bool(one.who)] += 1

        scenario = draw_only(seed, (REQUESTS, *FAULTS))
        result = simulate(seed, scenario=scenario, afterwards=count)
        assert result.violations == []
        endings += result.endings
    assert min(written.values()) > 0
    assert len(written) == 4
    assert min(endings[how] for how in ("finished", "cancelled", "unproved_tenant")) > 0


def test_seeds_draw_it_and_those_that_showed_bugs_are_as_they_were() -> None:
    drawn = [seed for seed in range(200) if REQUESTS in draw(seed).acts]
    assert 10 <= len(drawn) <= 30
    assert not [seed for seed in FOUND if has_keys(draw(seed).recipe)]
