"""Unmodified clients of OpenAI's API play episodes, and a policy is trained on what they did."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.infra import local
from headrace.infra.local.detached import free_port
from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    PolicyPublished,
    TrajectoryRecorded,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.log_report import examine
from headrace.services.operate.verify.verify import read_all
from tests.e2e import harness

CLIENTS = Path(__file__).with_name("clients.py")
MODELS = Path(local.__file__).parents[1] / "models"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<end>{% endfor %}"
    "assistant: "
)
BOUND_S = 200.0


def chat_model(folder: Path) -> Path:
    """The tiny model with a chat template, and room for what frameworks say."""
    shutil.copytree(MODELS / "tiny-llama", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_recipe(folder: Path, text: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text)
    return read_recipe(str(path))


def place(state: Path, stack: local.LocalStack, namespace: str) -> ClusterConfig:
    return ClusterConfig(state, stack.bootstrap_servers, stack.registry_url, namespace=namespace)


async def whole(cluster: ClusterConfig) -> Facts:
    """What is in the log, with which nothing is wrong."""
    async with open_namespace(cluster, "checker") as (log, life):
        deliveries, undecodable = await read_all(log)
    report = examine(life.recipe(), deliveries, undecodable=undecodable)
    print(report)
    assert report.violations == []
    assert report.undecodable == 0
    assert report.episodes_ended == report.episodes > 0
    return Facts.of(deliveries)


def alive(mark: Path) -> list[psutil.Process]:
    return harness.processes_of(mark)


def test_a_policy_learns_from_programs_and_their_worker_may_die(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    mark = tmp_path / "mark"
    command = json.dumps([sys.executable, str(CLIENTS), str(mark)])
    recipe = write_recipe(
        tmp_path,
        f"""
        name = "programs"
        partitions = 2
        [stop]
        versions = 2
        [tasks]
        samples = 2
        environment = false
        max_tokens = 512
        deadline_s = 180
        [environments]
        [agents.default]
        use = "command"
        options = {{ command = {command} }}
        [scheduler]
        live_episodes = 4
        [policies.default]
        model = "{chat_model(tmp_path / "model")}"
        engine = {{ device = "cpu" }}
        sampling = {{ max_tokens = 120 }}
        batches = {{ groups = 1 }}
        training = {{ device = "cpu" }}
        """,
    )
    cluster = place(tmp_path, local_stack, namespace)

    async def main() -> None:
        async with harness.headrace(
            *harness.arguments_of(tmp_path / "recipe.toml", cluster)
        ) as run:
            await run.says("running", BOUND_S)
            topics = Topics(namespace, tuple(recipe.policies), recipe.partitions)
            async with harness.watching(local_stack.bootstrap_servers, topics):
                async with asyncio.timeout(BOUND_S):
                    while not mark.exists():
                        await asyncio.sleep(0.05)
                doomed = alive(mark)
                assert len(doomed) >= 4  # a guard, a program, its children
                harness.child_of(tmp_path, "agent").kill()
                assert not psutil.wait_procs(doomed, timeout=60)[1]
                assert await run.ends(BOUND_S) == 0, run.said
        logs = [path.read_text() for path in tmp_path.rglob("agent*.log")]
        # That of the worker that was killed, and that of the next one.
        assert sum(log.count("attempts are forks of process") for log in logs) == 2
        facts = await whole(cluster)
        trained = [
            trajectory
            for batch in facts.events(BatchAssembled)
            for sample in batch.samples
            if isinstance(trajectory := facts.resolve(sample.trajectory), TrajectoryRecorded)
        ]
        for sample in (0, 1):  # one was played by the package, the other by the framework
            played = [one for one in trained if one.sample == sample]
            assert played
            for one in played:
                assert [turn.parent for turn in one.turns] == [-1, 0]
                assert all(turn.trainable and turn.tokens for turn in one.turns)
                assert all(turn.text.startswith("<tool_call>\n") for turn in one.turns)
                assert one.reward is not None
        for published in facts.events(PolicyPublished):
            # What was forced is trained on as it was drawn.
            if published.status == "trained":
                assert abs(published.metrics["importance_mean"] - 1) < 0.2
            assert published.status != "skipped"
        assert max(one.attempt for one in facts.events(EpisodeEnded)) > 0

    try:
        harness.run_bounded(main())
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)


KEY = "a key of this test alone"


@pytest.mark.long
@pytest.mark.parametrize("clients", [64, 200])
def test_many_clients_from_outside_play_at_once(
    clients: int,
    tmp_path: Path,
    local_stack: local.LocalStack,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = write_recipe(
        tmp_path,
        f"""
        name = "clients"
        [tasks]
        options = {{ items = {clients // 2} }}
        epochs = 1
        samples = 2
        environment = false
        deadline_s = 180
        [environments]
        [agents.default]
        use = "client"
        [policies.default]
        model = "{chat_model(tmp_path / "model")}"
        training = false
        engine = {{ use = "scripted", options = {{ text = "fine", count = 4 }} }}
        """,
    )
    cluster = place(tmp_path, local_stack, namespace)
    port = free_port()
    monkeypatch.setenv("HEADRACE_GATEWAY_KEY", KEY)
    monkeypatch.setenv("HEADRACE_GATEWAY_LISTEN", f"127.0.0.1:{port}")

    async def main() -> None:
        async with harness.headrace(
            *harness.arguments_of(tmp_path / "recipe.toml", cluster)
        ) as run:
            await run.says(f"waiting for clients at http://127.0.0.1:{port}/v1: ", BOUND_S)
            async with harness.watching(
                local_stack.bootstrap_servers, Topics(namespace, ("default",), recipe.partitions)
            ) as watch:
                await watch.count("episodes", clients, BOUND_S)
            await play_at_once(f"http://127.0.0.1:{port}/v1", clients)
            assert await run.ends(BOUND_S) == 0, run.said
        facts = await whole(cluster)
        outcomes = facts.events(EpisodeEnded)
        assert len(outcomes) == clients
        assert {one.ending for one in outcomes} == {"finished"}
        assert sorted(one.reward for one in outcomes if one.reward is not None) == [
            *map(float, range(clients))
        ]
        for one in facts.events(TrajectoryRecorded):
            assert [turn.parent for turn in one.turns] == [-1, 0]

    try:
        harness.run_bounded(main())
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)


async def play_at_once(base_url: str, clients: int) -> None:
    """So many clients take an episode each, and end it once all of them have played."""
    from openai import AsyncOpenAI

    all_have_played = asyncio.Barrier(clients)
    # The package allows 5 s for a connection, and this process alone makes up to 200.
    patient = AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0, timeout=BOUND_S)
    async with patient as gateway:

        async def play(reward: int) -> None:
            taken: Any = await gateway.post("/episodes/take", cast_to=object, body={})
            client = gateway.with_options(api_key=taken["api_key"])
            messages: list[Any] = [{"role": "user", "content": f"How are you, {reward}?"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                assert answer.choices[0].message.content == "fine"
                messages += [answer.choices[0].message, {"role": "user", "content": "And you?"}]
            await all_have_played.wait()
            reporter = gateway.with_options(api_key=taken["report_key"])
            await reporter.post("/episode/end", cast_to=object, body={"reward": reward})

        await asyncio.gather(*(play(number) for number in range(clients)))
