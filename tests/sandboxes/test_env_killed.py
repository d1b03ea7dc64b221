"""The env worker is killed with live containers: they are found again, and none is left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from headrace.infra import local
from headrace.schemas.events import (
    ActionRequested,
    EnvironmentUse,
    InstanceStateEntered,
    ObservationRecorded,
)
from headrace.schemas.topics import INSTANCES, OBSERVATIONS, Topics
from headrace.services.base.clock import now_ms
from headrace.services.env.sandbox import container_names as names
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, EventStream, follow_events
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.hardened import Limits
from headrace.services.processes.kubernetes.cluster_address import is_cluster
from headrace.services.processes.kubernetes.pods_engine import PodsEngine
from tests.commands import cluster_variables
from tests.sandboxes.image_registry import image_registry

RECIPE = str(Path(__file__).parent / "recipe.toml")
EPISODES = 4
ANSWER_S = 120.0
LIFE_MS = 3 * 3_600_000
"""Until the deadline of an episode, which must survive all kills: no attempt need be lost."""
GONE_S = 90.0


class Actor:
    """Acts in one episode's shell: what an agent worker would write and await."""

    def __init__(self, log: EventLog, task: int, image: str = "") -> None:
        self._log = log
        self._task = task
        self._image = image
        self._attempt = 0
        self._index = -1
        self.steps = 0
        """Of this attempt, answered."""
        self.lost = 0
        self.answers: asyncio.Queue[ObservationRecorded] = asyncio.Queue()

    async def ask(
        self, kind: Literal["reset", "step", "close"], command: str = ""
    ) -> ObservationRecorded | None:
        """An action and its answer; None where none is due."""
        self._index = 0 if kind == "reset" else self._index + 1
        await self._log.send(
            ActionRequested(
                task=self._task, sample=0, attempt=self._attempt, call=str(self._index + 1),
                index=self._index, kind=kind,
                environment=EnvironmentUse(use="default", image=self._image),
                payload=json.dumps({"action": command}), expires_at=now_ms() + LIFE_MS,
                digest=bytes(16),
            )
        )  # fmt: skip
        while kind != "close":
            answer = await asyncio.wait_for(self.answers.get(), ANSWER_S)
            if (answer.attempt, answer.index) == (self._attempt, self._index):
                return answer
        return None

    async def step(self) -> None:
        """Adds a line to a file, which says how many steps were done: none is done twice."""
        said = await self.ask("step", "sleep 0.2; echo x >> n; wc -l < n")
        assert said is not None
        if said.failure is None:
            self.steps += 1
            assert said.text.strip() == str(self.steps)
            return
        assert said.reward is None
        assert (said.failure.origin, said.failure.code) == ("infrastructure", "sandbox_lost")
        self.lost += 1
        await self.begin(self._attempt + 1)

    async def begin(self, attempt: int = 0) -> None:
        self._attempt, self.steps = attempt, 0
        answer = await self.ask("reset")
        assert answer is not None
        assert answer.failure is None, answer.failure


async def route(reader: EventStream, actors: dict[int, Actor]) -> None:
    async for item in reader:
        if not isinstance(item, CaughtUp) and isinstance(item.event, ObservationRecorded):
            actors[item.event.task].answers.put_nowait(item.event)


class Workers:
    """The env worker's process, killed and started again."""

    def __init__(self, environment: dict[str, str], folder: Path, recipe: str = RECIPE) -> None:
        self._recipe = recipe
        self._environment = environment
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "env.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "serve", "env", self._recipe],
                env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


async def none_left(engine: DockerEngine | PodsEngine, namespace: str) -> None:
    """Waits until no container of the namespace is there."""
    async with asyncio.timeout(GONE_S):
        while await engine.containers({"headrace.namespace": namespace}):
            await asyncio.sleep(0.5)


async def kill_again_and_again(
    host: str,
    stack: local.LocalStack,
    namespace: str,
    state: Path,
    kills: int,
    path: str = RECIPE,
    seed: int = 0,
) -> tuple[int, int]:
    """Steps answered in all, and attempts lost. `path` is the recipe's."""
    cluster = ClusterConfig(state, stack.bootstrap_servers, stack.registry_url, namespace=namespace)
    recipe = read_recipe(path)
    variables = {**os.environ, **cluster_variables(stack, namespace, state)}
    engine: DockerEngine | PodsEngine
    if is_cluster(host):
        engine = PodsEngine(host, Limits(), names.read)
    else:
        engine, variables["DOCKER_HOST"] = DockerEngine(host), host
    workers, draw, answered = Workers(variables, state, path), random.Random(seed), 0
    async with connect(cluster, "test") as connection:
        topics = Topics(namespace, tuple(recipe.policies), recipe.partitions)
        log = await connection.writing_log(topics)
        await apply(log, recipe)
        actors = {task: Actor(log, task) for task in range(EPISODES)}
        partitions = [Partition(topics.name(OBSERVATIONS), number) for number in range(2)]
        reader = follow_events(log, dict.fromkeys(partitions, "first"))
        routing = asyncio.create_task(route(reader, actors))
        workers.start()
        try:
            await asyncio.gather(*(actor.begin() for actor in actors.values()))
            for _ in range(kills):
                acting = [asyncio.create_task(actor.step()) for actor in actors.values()]
                await asyncio.sleep(draw.random() * 0.8)
                workers.kill()
                workers.start()
                await asyncio.gather(*acting)
                answered += EPISODES
            await asyncio.gather(*(actor.step() for actor in actors.values()))
            # Closed while no worker lives: whoever comes next has to see that nobody needs them.
            workers.kill()
            await asyncio.gather(*(actor.ask("close") for actor in actors.values()))
            workers.start()
            await none_left(engine, namespace)
            await check_states(log, topics)
        finally:
            workers.kill()
            routing.cancel()
            await asyncio.gather(routing, return_exceptions=True)
            await reader.aclose()
            await engine.aclose()
    return answered, sum(actor.lost for actor in actors.values())


async def check_states(log: EventLog, topics: Topics) -> None:
    """Sandboxes and workers reported their states."""
    reported: dict[str, list[str]] = {}
    reader = follow_events(log, {Partition(topics.name(INSTANCES), 0): "first"})
    async for item in reader:
        if isinstance(item, CaughtUp):
            break
        assert isinstance(item.event, InstanceStateEntered)
        reported.setdefault(item.event.instance, []).append(item.event.state)
    await reader.aclose()
    sandboxes = [states for name, states in reported.items() if name.startswith("sandbox-")]
    assert len(sandboxes) >= EPISODES
    assert all(states[0] in ("provisioning", "busy") for states in sandboxes)
    workers = [states for name, states in reported.items() if name.startswith("env-")]
    # All of them were killed, some while they opened.
    assert all(set(states) <= {"provisioning", "ready"} for states in workers)
    assert ["provisioning", "ready"] in workers


@pytest.mark.long
def test_kills_leave_no_container_and_do_no_step_twice(
    engine: str, local_stack: local.LocalStack, namespace: str, tmp_path: Path
) -> None:
    killing = kill_again_and_again(engine, local_stack, namespace, tmp_path, kills=7)
    answered, lost = asyncio.run(asyncio.wait_for(killing, 600))
    print(f"{answered} steps, {lost} attempts lost")
    assert lost < answered


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_two_hundred_kills(
    engine: str, local_stack: local.LocalStack, namespace: str, tmp_path: Path, seed: int
) -> None:
    """25 at a time: after each, the steps of the episodes are done again in fresh sandboxes."""
    killing = kill_again_and_again(engine, local_stack, namespace, tmp_path, kills=25, seed=seed)
    answered, lost = asyncio.run(asyncio.wait_for(killing, 1_800))
    print(f"{answered} steps, {lost} attempts lost")


async def kill_during_a_pull(
    host: str, stack: local.LocalStack, namespace: str, state: Path
) -> tuple[str, int]:
    """Returns what the episode's first command printed, and how many containers it had."""
    async with image_registry(host) as registry:
        image = registry.add("killed", 100_000)
        text = Path(RECIPE).read_text().replace("image = ", f"images = ['{image}'], image = ")
        path = state / "recipe.toml"
        path.write_text(text)
        cluster = ClusterConfig(
            state, stack.bootstrap_servers, stack.registry_url, namespace=namespace
        )
        recipe = read_recipe(str(path))
        variables = {**os.environ, **cluster_variables(stack, namespace, state)}
        workers = Workers({**variables, "DOCKER_HOST": host}, state, str(path))
        engine = DockerEngine(host)
        async with connect(cluster, "test") as connection:
            topics = Topics(namespace, tuple(recipe.policies), recipe.partitions)
            log = await connection.writing_log(topics)
            await apply(log, recipe)
            actor = Actor(log, 0, image)
            partitions = [Partition(topics.name(OBSERVATIONS), number) for number in range(2)]
            reader = follow_events(log, dict.fromkeys(partitions, "first"))
            routing = asyncio.create_task(route(reader, {0: actor}))
            registry.released.clear()
            workers.start()
            try:
                beginning = asyncio.create_task(actor.begin())
                await asyncio.wait_for(registry.asked.wait(), ANSWER_S)
                workers.kill()
                workers.start()
                async with asyncio.timeout(ANSWER_S):
                    while (state / "env.log").read_text().count(f"pulling {image}") < 2:
                        await asyncio.sleep(0.1)
                registry.released.set()
                await beginning
                said = await actor.ask("step", "head -c 6 /own")
                assert said is not None
                held = await engine.containers({"headrace.namespace": namespace})
                await actor.ask("close")
                await none_left(engine, namespace)
            finally:
                workers.kill()
                routing.cancel()
                await asyncio.gather(routing, return_exceptions=True)
                await reader.aclose()
                await engine.aclose()
        return said.text, len(held)


@pytest.mark.long
def test_a_kill_during_a_pull_costs_no_attempt(
    engine: str, local_stack: local.LocalStack, namespace: str, tmp_path: Path
) -> None:
    killing = kill_during_a_pull(engine, local_stack, namespace, tmp_path)
    assert asyncio.run(asyncio.wait_for(killing, 300)) == ("killed", 1)
