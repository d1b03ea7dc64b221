"""Agents that kill their worker, on a real broker: their tasks end as poison, the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.infra import local
from headrace.schemas.events import EpisodeEnded
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.log_report import examine
from headrace.services.operate.verify.verify import read_all
from tests.e2e import harness

RECIPE = harness.RECIPES / "killers.toml"
KILLERS = {3, 8}
RUN_S = 200.0


@pytest.mark.long
def test_what_kills_its_worker_ends_as_poison_and_the_run_ends_well(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )
    recipe = read_recipe(str(RECIPE), [])

    async def main() -> None:
        arguments = (
            *("run", str(RECIPE), "--check", "episodes==24", "--check", "failures==4"),
            *("--check", "restarts>=3", "--check", "restarts<=4"),
            *("--state", str(tmp_path), "--namespace", namespace),
            *("--bootstrap-servers", local_stack.bootstrap_servers),
            *("--registry-url", local_stack.registry_url),
        )
        async with harness.headrace(*arguments) as run:
            assert await run.ends(RUN_S) == 0, run.said
        async with open_namespace(place, "test") as (log, _):
            deliveries, undecodable = await read_all(log)
        report = examine(recipe, deliveries, undecodable=undecodable)
        assert not report.violations, str(report)
        for one in Facts.of(deliveries).all(EpisodeEnded):
            outcome = one.event
            code = outcome.failure.code if outcome.failure else outcome.ending
            assert code == ("poison" if outcome.task in KILLERS else "finished")

    try:
        harness.run_bounded(main())
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)
