"""Which versions play when a run and its replay are evaluated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished
from headrace.services.operate.compare.compare import choose_players
from headrace.services.operate.run_versions import RunVersion


def a_version(namespace: str, policy: str, number: int) -> RunVersion:
    published = PolicyPublished(
        policy=policy, version=number, status="trained", digest=bytes(32), full_version=number
    )
    return RunVersion(namespace, published, {}, {})


def test_runs_are_evaluated_beside_the_same_policies() -> None:
    judge, partner = a_version("exp", "judge", 0), a_version("exp", "partner", 9)
    newest = {"main": a_version("exp", "main", 9), "judge": judge, "partner": partner}
    replayed = a_version("exp-replay", "main", 7)
    found = {"main": replayed, "judge": None, "partner": a_version("exp-replay", "partner", 7)}

    players = choose_players(newest, found, "main", 7)
    assert players == {"main": replayed, "judge": judge, "partner": partner}
    recorded = replace(replayed, namespace="exp")
    assert choose_players(newest, {**found, "main": recorded}, "main", 7)["main"] is recorded
    with pytest.raises(UsageError, match="'main' of the run has published no version 7"):
        choose_players(newest, {**found, "main": None}, "main", 7)
