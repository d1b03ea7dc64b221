"""`headrace run` with a local stack of its own: what happens when it, or its broker, is ended."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from headrace.infra import local
from headrace.infra.local import stack_record as record
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.verify.log_report import LogReport
from headrace.services.operate.verify.verify import check_namespace
from tests.e2e import harness

RECIPE = harness.RECIPES / "frozen-lake.toml"
NAMESPACE = "frozen-lake"
TOPICS = Topics(NAMESPACE, ("default",), 4)
VERSIONS = 60
LONGER = ("--set", f"stop.versions={VERSIONS}")


def bootstrap_servers(state: Path) -> str:
    """Of the stack that runs there."""
    stack = local.find(state)
    assert stack is not None
    return stack.bootstrap_servers


def check(state: Path) -> LogReport:
    """Starts the stack again, on the log that is there, and checks that."""
    stack = local.up(state, kafka_port=0, registry_port=0)
    try:
        place = ClusterConfig(
            state, stack.bootstrap_servers, stack.registry_url, namespace=NAMESPACE
        )
        report = asyncio.run(check_namespace(place, drained=False))
        print(report)
        return report
    finally:
        local.down(state)


def test_a_run_survives_its_brokers_death_and_goes_on_after_its_own(state: Path) -> None:
    async def killed() -> None:
        async with harness.headrace("run", str(RECIPE), *LONGER, "--state", str(state)) as run:
            with harness.usual_ports_taken():
                await run.says("running")
            async with harness.watching(bootstrap_servers(state), TOPICS) as watch:
                await watch.count("policies", 3)
                killed_at = time.time()
                broker = record.load(state).servers["kafka"].process
                harness.kill(broker.pid)
                await run.says("starting it again")
                await watch.until(
                    lambda: any(
                        one.topic == "policies" and one.at > killed_at + 1 for one in watch.written
                    ),
                    "a version after the broker's death",
                )
                print(f"broker            next version {time.time() - killed_at:5.1f} s")
            run.kill()
            await run.ends(5)

    async def interrupted() -> None:
        async with harness.headrace("run", str(RECIPE), *LONGER, "--state", str(state)) as run:
            with harness.usual_ports_taken():
                await run.says("continuing the unfinished run")
            async with harness.watching(bootstrap_servers(state), TOPICS) as watch:
                await watch.count("policies", 3)
                await watch.more("policies", 2)
            async with harness.headrace("down", "--state", str(state)) as down:
                assert await down.ends(15) == 2, down.said
                assert f"runs the namespace {NAMESPACE} now: end it with Ctrl-C" in str(down.said)
            run.kill(signal.SIGINT)
            assert await run.ends(45) == 130, run.said

    harness.run_bounded(killed())
    print(f"run               all gone after {harness.gone(state):5.1f} s")
    harness.run_bounded(interrupted())
    harness.gone(state)
    report = check(state)
    assert report.violations == []
    assert 3 < report.versions["default"] < VERSIONS
