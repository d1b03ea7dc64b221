"""A run is recorded, its trainer killed amid it; then each part of it is replayed from the log."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.infra import local
from headrace.schemas.events import BatchAssembled, GroupClosed, PolicyPublished
from headrace.schemas.topics import BATCHES, DEAD_LETTERS, GROUPS, POLICIES, Topics
from headrace.services.kafka.broker import Partition
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.log.log_reader import WHOLE, read_records
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.replay.recording import read_topic
from tests.commands import cluster_variables
from tests.e2e import harness, notebook

RECIPE = harness.RECIPES / "frozen-lake.toml"
VERSIONS = 6
RUN_S = 240.0
"""Bounds for a busy machine; on a quiet one the run takes half a minute."""
COMMAND_S = 240
MY_AGENTS = """
    async def polite(episode):
        observation = await episode.reset()
        turn = 0
        while not observation.done:
            turn += 1
            text = observation.text if turn < 3 else f"please {observation.text}"
            generation = await episode.generate(text)
            observation = await episode.step(generation.text)
"""


class Recorded:
    """A run that has ended, on the session's broker."""

    def __init__(self, state: Path, stack: local.LocalStack, namespace: str) -> None:
        self.state = state
        self.namespace = namespace
        self.cluster = ClusterConfig(
            state, stack.bootstrap_servers, stack.registry_url, namespace=namespace
        )
        self.environment = cluster_variables(stack, namespace, state)

    def replay(self, *arguments: str, code: int = 0) -> Any:
        """What `headrace replay … --json` prints."""
        return self.headrace("replay", *arguments, code=code)

    def headrace(self, *arguments: str, code: int = 0) -> Any:
        """What a command prints with `--json`, or its message if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *arguments, "--json"],
            env={**os.environ, **self.environment, "PYTHONPATH": f"{os.getcwd()}:{self.state}"},
            capture_output=True, text=True, timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout) if done.stdout else done.stderr


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, local_stack: local.LocalStack
) -> Iterator[Recorded]:
    """A run of some versions, whose trainer is killed in the middle: it resumes and goes on."""
    state = tmp_path_factory.mktemp("replay")
    run = Recorded(state, local_stack, f"recorded-{os.getpid()}")
    os.environ.update(run.environment)
    try:
        harness.run_bounded(_record(run), 2 * RUN_S)
        yield run
    finally:
        for name in run.environment:
            del os.environ[name]
        harness.end_all_of(state)


@pytest.fixture(scope="module")
def rloo(recorded: Recorded) -> Any:
    """What a replay of the run's trajectories with another estimator printed."""
    return recorded.replay("trajectories", "--set", "policies.default.groups.advantage=rloo")


async def _record(run: Recorded) -> None:
    settings = (
        f"stop.versions={VERSIONS}",
        "policies.default.training.checkpoint_every=2",
        # So small a lake that most batches teach: one episode in eight succeeds by chance.
        'environments.default.options.kwargs.desc=["SFF", "FHF", "FFG"]',
    )
    arguments = [part for setting in settings for part in ("--set", setting)]
    async with harness.headrace("run", str(RECIPE), *arguments) as command:
        await command.says("running", RUN_S)
        assert run.cluster.bootstrap_servers is not None
        topics = Topics(run.namespace, ("default",), 4)
        async with harness.watching(run.cluster.bootstrap_servers, topics) as watch:
            await watch.count("policies", 4, RUN_S)
            harness.kill(harness.child_of(run.state, "trainer").pid)
            assert await command.ends(RUN_S) == 0, command.said


def records(run: Recorded, namespace: str) -> dict[Partition, list[tuple[bytes | None, bytes]]]:
    """All that a namespace holds, as bytes."""

    async def read() -> dict[Partition, list[tuple[bytes | None, bytes]]]:
        assert run.cluster.bootstrap_servers is not None
        broker = KafkaBroker(KafkaSettings(run.cluster.bootstrap_servers, "test"))
        found: dict[Partition, list[tuple[bytes | None, bytes]]] = {
            partition: []
            for topic in Topics(namespace, ("default",), 4)
            for partition in topic.all_partitions()
        }
        async for record in read_records(broker, dict.fromkeys(found, WHOLE)):
            found[record.partition].append((record.key, record.value or b""))
        await broker.close()
        return found

    return asyncio.run(asyncio.wait_for(read(), 60))


def events(run: Recorded, namespace: str, topic: Any, kind: type[Any]) -> list[Any]:
    async def read() -> list[Any]:
        cluster = ClusterConfig(
            run.state, run.cluster.bootstrap_servers, run.cluster.registry_url, namespace=namespace
        )
        async with open_namespace(cluster, "test") as (log, _):
            return [one.event async for one in read_topic(log, topic) if type(one.event) is kind]

    return asyncio.run(asyncio.wait_for(read(), 60))


def test_the_same_batches_give_the_same_weights_in_one_go(recorded: Recorded) -> None:
    """What was trained by two processes, one killed, is what one process makes of the batches."""
    before = records(recorded, recorded.namespace)
    replayed = recorded.replay("batches")

    rows = replayed["versions"]
    assert len(rows) >= VERSIONS + 1
    assert {(row["batch"], row["same"]) for row in rows} == {("same", True)}
    assert len({row["replayed"] for row in rows}) > 2, "something was learned"
    after = records(recorded, recorded.namespace)
    assert after == before, "the recorded namespace is never written"
    fresh = records(recorded, replayed["namespace"])
    [copied] = [found for partition, found in fresh.items() if ".batches." in partition.topic]
    [original] = [found for partition, found in before.items() if ".batches." in partition.topic]
    assert copied == original[: len(copied)], "byte by byte"
    assert not fresh[Partition(f"{replayed['namespace']}.{DEAD_LETTERS.name}.v1", 0)]
    published = events(recorded, recorded.namespace, POLICIES, PolicyPublished)
    assert {one.version: one.digest.hex() for one in published} == {
        row["version"]: row["replayed"] for row in rows
    }


def test_another_estimator_gives_other_batches_of_the_same_trajectories(
    recorded: Recorded, rloo: Any
) -> None:
    name = rloo["namespace"]
    versions = rloo["policies"]["default"]["versions"]
    assert [row["version"] for row in versions] == list(range(len(versions)))
    assert {row["status"] for row in versions} == {"initial", "trained"}
    old = {one.task: one for one in events(recorded, recorded.namespace, GROUPS, GroupClosed)}
    new = {one.task: one for one in events(recorded, name, GROUPS, GroupClosed)}
    assert new.keys() >= old.keys(), "the last results may have come as the run ended"
    others = 0
    for task, group in old.items():
        assert (group.verdict, group.mean) == (new[task].verdict, new[task].mean)
        for theirs, ours in zip(group.samples, new[task].samples, strict=True):
            assert ours.trajectory == theirs.trajectory
            others += ours.advantages != theirs.advantages
    assert others > 0
    batches = events(recorded, name, BATCHES, BatchAssembled)
    assert [batch.version for batch in batches] == [row["version"] for row in versions[1:]]
    assert all(batch.samples for batch in batches[:-1]), "the last one may decide what is left"
    samples = [(one.task, one.sample) for batch in batches for one in batch.samples]
    assert len(samples) == len(set(samples)), "each sample is trained once"


def test_a_replay_is_compared_with_its_run(recorded: Recorded, rloo: Any) -> None:
    plot = recorded.state / "compared.svg"
    compared = recorded.headrace("compare", "--plot", str(plot))
    first, replay = compared["runs"]

    assert (first["namespace"], replay["replay_of"]) == (recorded.namespace,) * 2
    assert replay["namespace"] == rloo["namespace"], "the newest replay of this run"
    assert replay["changes"] == ["policies.default.groups.advantage: 'grpo' -> 'rloo'"]
    replayed = rloo["policies"]["default"]["versions"]
    assert [(one["version"], one["digest"], one["metrics"]) for one in replay["versions"]] == [
        (one["version"], one["digest"], one["metrics"]) for one in replayed
    ]
    assert len(first["versions"]) >= VERSIONS + 1
    trained = [one for one in first["versions"][1:] if one["status"] != "skipped"]
    assert all("loss" in one["metrics"] for one in trained), "also after the trainer's death"
    pairs = zip(first["versions"], replay["versions"], strict=False)
    others = [a["version"] for a, b in pairs if a["digest"] != b["digest"]]
    assert replay["first_other_weights"] == others[0] > 0
    assert "grad_norm" in plot.read_text()

    message = recorded.headrace("compare", recorded.namespace, code=2)
    assert "compare different runs" in message
    none = recorded.headrace("compare", "--namespace", rloo["namespace"], code=2)
    assert f"{rloo['namespace']} has no replay to compare with" in none


@pytest.mark.long
def test_a_comparison_evaluates_the_run_and_its_replay(recorded: Recorded, rloo: Any) -> None:
    compared = recorded.headrace("compare", rloo["namespace"], "--evaluate")
    first, replay = (run["evaluation"] for run in compared["runs"])
    versions = [{one["version"] for one in run["versions"]} for run in compared["runs"]]
    assert first["version"] == replay["version"] == max(versions[0] & versions[1])
    whole = {"items": 64, "samples": 8, "failed": 0}
    assert all({name: one[name] for name in whole} == whole for one in (first, replay))
    difference = replay["avg"]["value"] - first["avg"]["value"]
    assert replay["minus_first"]["value"] == pytest.approx(difference), "the same tasks"
    assert first["minus_first"] is None
    assert not any("lets both policies play" in note for note in compared["notes"])


def test_the_notebook_reads_a_run(recorded: Recorded, tmp_path: Path) -> None:
    cluster = recorded.cluster
    assert cluster.bootstrap_servers is not None
    assert cluster.registry_url is not None
    cells = notebook.execute(
        tmp_path, cluster.bootstrap_servers, cluster.registry_url, recorded.namespace
    )
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "recipe frozen-lake:" in printed
    assert re.search(r"'\w' -> '[LDRU]'\n  id \d+ +logprob +-?\d+\.\d+  version \d", printed)
    pictures = [output for cell in cells for output in cell.outputs if "data" in output]
    assert sum("image/png" in picture.data for picture in pictures) == 3


def test_an_agent_that_has_not_changed_asks_the_same(recorded: Recorded) -> None:
    replayed = recorded.replay("episodes")
    assert replayed["episodes"] > 8 * 4 * VERSIONS / 2
    assert (replayed["divergences"], replayed["no_longer_kept"]) == ([], 0)


def test_a_changed_agent_is_shown_where_it_first_asks_otherwise(recorded: Recorded) -> None:
    (recorded.state / "my_agents.py").write_text(textwrap.dedent(MY_AGENTS))
    mine = ("--set", "agents.default.use=my_agents:polite")
    replayed = recorded.replay("episodes", *mine, "--limit", "40", code=1)

    assert replayed["episodes"] == 40
    assert replayed["divergences"]
    for one in replayed["divergences"]:
        assert one["call"] == "6", "reset, then two turns alike, then the third generation"
        assert one["now"]["text"] == f"please {one['then']['text']}"
        assert one["now"]["tokens"] == one["then"]["tokens"]
    first = replayed["divergences"][0]["task"]
    alone = recorded.replay("episodes", *mine, "--task", str(first), code=1)
    assert {one["task"] for one in alone["divergences"]} == {first}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["batches", "--until", "999"], 2, "trained policy default up to version"),
        (["batches", "--policy", "nope"], 2, "name one with --policy"),
        (["trajectories", "--set", "tasks.samples=3"], 2, "tasks.samples: 8 -> 3"),
        (["trajectories", "--tasks", "100000-"], 2, "no ended task from 100000"),
        (["episodes", "--task", "100000"], 2, "no episode of tasks 100000"),
    ],
)
def test_what_cant_be_replayed_is_said(
    recorded: Recorded, arguments: list[str], code: int, message: str
) -> None:
    assert message in recorded.replay(*arguments, code=code)


def test_a_replay_goes_into_no_namespace_that_is_there(recorded: Recorded) -> None:
    said = recorded.replay("batches", "--into", recorded.namespace, code=2)
    assert "exists already" in said
