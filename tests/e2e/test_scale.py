"""Each service as a process of its own: two of a kind share the work, and one's end loses nothing.

What is measured holds for environments that only sleep, few at once: they are what limits the
flow, not this machine.
"""

from __future__ import annotations

import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.run_life import enter
from headrace.services.operate.verify.verify import check_namespace
from tests.e2e import harness

RECIPE = harness.RECIPES / "slow-environments.toml"
SHARED = {
    "agent": "results",
    "env": "observations",
    "inference": "generations",
    "assemble-groups": "groups.default",
}
"""Services of which any number share the work, and a topic that they write."""
WINDOW_S = 5.0
"""How long throughput is measured."""


class Workers:
    """Processes of `headrace serve` in one namespace."""

    def __init__(self, place: ClusterConfig, stack: AsyncExitStack) -> None:
        self._place = place
        self._stack = stack
        self._by_service: dict[str, list[harness.Command]] = {}

    async def add(self, service: str) -> harness.Command:
        """Starts one more."""
        command = await self._stack.enter_async_context(
            harness.headrace("serve", service, str(RECIPE), *arguments_of(self._place))
        )
        self._by_service.setdefault(service, []).append(command)
        return command

    def of(self, service: str) -> list[harness.Command]:
        """Those of a service, in the order of their start."""
        return self._by_service[service]

    @property
    def all(self) -> list[harness.Command]:
        """Every one."""
        return [command for commands in self._by_service.values() for command in commands]


def arguments_of(place: ClusterConfig) -> list[str]:
    assert place.bootstrap_servers is not None
    assert place.registry_url is not None
    assert place.namespace is not None
    return [
        *("--state", str(place.state), "--namespace", place.namespace),
        *("--bootstrap-servers", place.bootstrap_servers, "--registry-url", place.registry_url),
    ]


async def episodes_a_second(watch: harness.LogWatch) -> float:
    """Measured over the episodes that end from now on."""
    began = time.time()
    await watch.until(
        lambda: any(one.at >= began + WINDOW_S for one in watch.of("outcomes")),
        f"outcomes for {WINDOW_S} s",
    )
    return sum(began <= one.at < began + WINDOW_S for one in watch.of("outcomes")) / WINDOW_S


def assert_shared(watch: harness.LogWatch, since: float) -> None:
    """Both workers of each service are at work.

    Each partition of `results` is one agent worker's. The others answer in the partitions of those
    who asked.
    """
    for service, topic in SHARED.items():
        writers = watch.writers(topic, since)
        assert len(set.union(*writers.values())) == 2, f"{service}: {writers}"
        if service == "agent":
            assert all(len(pids) == 1 for pids in writers.values()), f"{service}: {writers}"


async def end_the_run(place: ClusterConfig, topics: Topics) -> None:
    """Says that the run is over, as its operator."""
    recipe = read_recipe(str(RECIPE))
    async with connect(place, "operator-0") as connection:
        log = await connection.writing_log(topics)
        await enter(log, "ending", recipe, "the test is over")
        await enter(log, "ended", recipe, "the test is over")


@pytest.mark.long
def test_two_of_each_share_the_work_and_one_more_env_worker_does_more(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )
    topics = Topics(namespace, ("default",), 4)

    async def main() -> None:
        await harness.headrace_done("apply", str(RECIPE), *arguments_of(place))
        async with AsyncExitStack() as stack:
            watch = await stack.enter_async_context(
                harness.watching(local_stack.bootstrap_servers, topics)
            )
            workers = Workers(place, stack)
            source = await workers.add("source")
            for service in ("scheduler", "trainer", *SHARED):
                await workers.add(service)
            for service in ("scheduler", "agent", "inference", "assemble-groups"):
                await workers.add(service)

            # Two of each but env, then of env, too.
            for service in ("agent", "inference", "assemble-groups"):
                await watch.at_work(service, 2)
            await watch.more("outcomes", 30)
            one_s = await episodes_a_second(watch)
            env_2 = await workers.add("env")
            await watch.at_work("env", 2)
            await watch.more("outcomes", 30)
            since = time.time()
            two_s = await episodes_a_second(watch)
            print(f"episodes/s with one env worker {one_s:.1f}, with two {two_s:.1f}")
            assert_shared(watch, since)
            assert two_s >= 1.4 * one_s > 0

            # One ends in order, then one of each is killed, those that are at work.
            env_1 = workers.of("env")[0]
            env_1.kill(signal.SIGTERM)
            assert await env_1.ends(15) == 0, env_1.said
            await workers.add("env")
            await watch.at_work("env", 3)
            for victim in (env_2, workers.of("agent")[0], workers.of("inference")[0]):
                victim.kill()
            workers.of("assemble-groups")[0].kill()
            (active,) = set.union(*watch.writers("episodes").values())
            next(one for one in workers.of("scheduler") if one.process.pid == active).kill()
            await watch.at_work("scheduler", 2)

            # Nothing is lost: all that was submitted ends.
            source.kill(signal.SIGTERM)
            assert await source.ends(15) == 0, source.said
            await watch.until(lambda: watch.tasks_open() == 0, "the end of every task")
            await end_the_run(place, topics)
            for worker in workers.all:
                assert await worker.ends(15) in (0, -signal.SIGKILL), worker.said
        report = await check_namespace(place)
        print(report)
        assert report.violations == []
        assert report.undecodable == 0
        assert report.tasks_ended == report.tasks > 100

    try:
        harness.run_bounded(main())
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)
