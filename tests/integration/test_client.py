"""The client of other teams: tasks in, results and trajectories out, on a real broker."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace import AsyncClient, Client, DependencyError, UsageError
from headrace.errors import RecordsLost
from headrace.infra import local
from headrace.schemas.events import Event, Ref
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import find_namespace
from headrace.services.namespace.run_life import enter
from tests.integration.test_records_lost import delete_records

BOUND_S = 120.0
HEADRACE = (sys.executable, "-m", "headrace")
SETTINGS = ("tasks.options.items=6", "tasks.samples=2")


def arguments(stack: local.LocalStack, namespace: str, state: Path) -> list[str]:
    return [
        *("--namespace", namespace, "--state", str(state)),
        *("--bootstrap-servers", stack.bootstrap_servers, "--registry-url", stack.registry_url),
    ]


@pytest.fixture(scope="module")
def address(
    local_stack: local.LocalStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, str]]:
    """A namespace whose run has not started: its tasks wait."""
    namespace, state = "test-client", tmp_path_factory.mktemp("client")
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    common = ["null", *settings, *arguments(local_stack, namespace, state)]
    subprocess.run([*HEADRACE, "apply", *common], check=True, timeout=BOUND_S)
    running: list[subprocess.Popen[bytes]] = []

    def run() -> None:
        running.append(subprocess.Popen([*HEADRACE, "run", "--quiet", *common]))

    # The run starts a little later, so that results are waited for.
    timer = threading.Timer(1.0, run)
    timer.start()
    yield local_stack.bootstrap_servers, local_stack.registry_url, namespace
    timer.join()
    assert running[0].wait(BOUND_S) == 0


async def end(cluster: ClusterConfig) -> None:
    """Ends a run that nobody works for."""
    async with connect(cluster, "test") as connection:
        topics, life = await find_namespace(connection, cluster.namespace)
        await enter(await connection.writing_log(topics), "ended", life.recipe(), "a test")


def test_submitted_tasks_come_back_as_results_and_trajectories(
    address: tuple[str, str, str],
) -> None:
    with Client(*address, source="notebook") as client:
        assert client.namespace == address[2]
        assert client.recipe.name == "null"
        tasks = client.submit([{"payload": {"question": n}, "samples": n} for n in (1, 2, 3)])
        assert [task.number for task in tasks] == sorted(task.number for task in tasks)
        results = list(client.results(tasks, timeout_s=BOUND_S))
        assert {result.task for result in results} == {task.number for task in tasks}
        assert sorted(len(result.outcomes) for result in results) == [1, 2, 3]
        assert {result.source for result in results} == {"notebook"}

        trajectories = list(client.trajectories(tasks))
        assert len(trajectories) == 6
        for trajectory in trajectories:
            assert trajectory.reward == sum(turn.reward or 0.0 for turn in trajectory.turns)
            assert len(trajectory.turns) == 4
            (path,) = trajectory.paths()
            assert path.turns == (0, 1, 2, 3)
            sampled = np.concatenate([turn.tokens for turn in trajectory.turns])
            assert path.tokens.dtype == np.int32
            assert path.tokens[path.sampled].tolist() == sampled.tolist()
            assert len(path.tokens) == len(path.logprobs) == len(path.versions)
            assert np.isfinite(path.logprobs[path.sampled]).all()
            assert np.isnan(path.logprobs[~path.sampled]).all()
            assert set(path.versions[path.sampled].tolist()) == {0}
            assert all(turn.text for turn in trajectory.turns)
            assert all(turn.context_text is not None for turn in trajectory.turns)
        first = client.trajectory(results[0].outcomes[0])
        assert first is not None
        assert first.task == results[0].task
        assert list(client.results([])) == []
        assert [(one.version, one.status) for one in client.versions()] == [(0, "initial")]
        with pytest.raises(UsageError, match="no policy 'other': it has default"):
            client.versions("other")


def test_the_asynchronous_client_reads_all_that_the_log_holds(
    address: tuple[str, str, str],
) -> None:
    async def main() -> tuple[list[int], list[int]]:
        async with AsyncClient(*address) as client:
            followed = []
            async with aclosing(client.results(follow=True)) as results:
                async for result in results:
                    followed.append(result.task)
                    if len(followed) == 6:
                        break
            numbers = [result.task async for result in client.results(range(6), timeout_s=BOUND_S)]
            return followed, numbers

    followed, numbers = asyncio.run(main())
    assert len(set(followed)) == 6
    assert sorted(numbers) == [0, 1, 2, 3, 4, 5]


def test_a_result_that_does_not_come_is_named(address: tuple[str, str, str]) -> None:
    with (
        closing(Client(*address)) as client,
        pytest.raises(TimeoutError, match=r"1 tasks: \[999\].*headrace show"),
    ):
        list(client.results([999], timeout_s=0.5))


def test_a_wrong_task_and_a_task_of_an_ended_run_write_none(
    local_stack: local.LocalStack, namespace: str, tmp_path: Path
) -> None:
    options = arguments(local_stack, namespace, tmp_path)
    subprocess.run([*HEADRACE, "apply", "null", *options], check=True, timeout=BOUND_S)
    address = local_stack.bootstrap_servers, local_stack.registry_url, namespace
    with Client(*address, state=tmp_path) as client:
        with pytest.raises(UsageError, match=r"sample: .*Nothing was submitted"):
            client.submit([{"payload": {}}, {"sample": 3}])
        (first,) = client.submit([{"payload": {}}])
        assert first.number == 0, "the wrong tasks left nothing"
        servers, registry = address[:2]
        asyncio.run(end(ClusterConfig(tmp_path, servers, registry, namespace=namespace)))
        with pytest.raises(UsageError, match=f"run '{namespace}' has ended"):
            client.submit([{"payload": {}}])
    with pytest.raises(UsageError, match="closed"):
        client.submit([])


def test_trajectories_that_retention_deleted_can_be_left_out(
    address: tuple[str, str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_for: list[Ref] = []
    fetch_each = EventLog.fetch_each

    def noting(log: EventLog, refs: Sequence[Ref]) -> AsyncGenerator[Event | str]:
        looked_for.extend(refs)
        return fetch_each(log, refs)

    monkeypatch.setattr(EventLog, "fetch_each", noting)

    async def delete_first() -> None:
        async with AsyncClient(*address) as client:
            async for result in client.results(timeout_s=BOUND_S):
                for outcome in result.outcomes:
                    if (ref := outcome.trajectory) is not None:
                        at = Partition(ref.topic, ref.partition)
                        await delete_records(address[0], at, ref.offset + 1)
                        return

    with Client(*address) as client:
        list(client.results(range(6), timeout_s=BOUND_S))  # the run has done its work
        every = len(list(client.trajectories()))
    asyncio.run(delete_first())
    with Client(*address) as client:  # the other one may have what it has read
        with pytest.raises(RecordsLost):
            list(client.trajectories())
        left = list(client.trajectories(skip_lost=True))
        assert 0 < len(left) < every
        assert len(looked_for) == len(left), "what is gone is not looked for one by one"
        assert caplog.text.count("were left out") == 1
        following = client.trajectories(follow=True, skip_lost=True)
        next(following)
        following.close()  # it says what it left out, even if the caller stops
        assert caplog.text.count("were left out") == 2


def test_what_is_not_there_is_said(address: tuple[str, str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no namespace 'nowhere'"):
        Client(address[0], address[1], "nowhere")
    with pytest.raises(DependencyError, match="no local stack"):
        Client(state=tmp_path)
    with pytest.raises(UsageError, match="both"):
        Client("localhost:9092")
    with pytest.raises(UsageError, match="not connected"):
        AsyncClient().namespace  # noqa: B018


def test_the_facade_gives_each_name_and_imports_nothing_before() -> None:
    script = """
import sys
import headrace
assert not {"torch", "confluent_kafka", "pydantic", "numpy"} & sys.modules.keys()
print(sorted(headrace.__all__) == sorted(dir(headrace)))
print(headrace.Observation(text="x").text)
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["True", "x"], done.stderr
    for name in headrace.__all__:
        assert getattr(headrace, name).__name__ == name
    with pytest.raises(AttributeError, match=r"has no 'nonsense'; it has: .*Episode"):
        headrace.nonsense  # noqa: B018
    assert json.dumps(headrace.__all__) == json.dumps(sorted(headrace.__all__))
