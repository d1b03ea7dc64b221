"""Stalls on a real broker, with a real scheduler and agent worker: the wait graph names each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.infra import local
from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    EnvironmentLoad,
    EnvironmentUse,
    EpisodeStarted,
    Event,
    GroupClosed,
    InstanceStateEntered,
    LoadReported,
    PoolLoad,
)
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.env import service as env_service
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import read_life
from headrace.services.operate.doctor.doctor import diagnose
from headrace.services.operate.doctor.finding import Finding
from headrace.services.operate.quota.limits import set_limit
from headrace.services.operate.quota.quota import set_quota
from headrace.services.operate.status.run_status import run_status_of
from headrace.services.operate.waits.side_watch import BROKER, SideWatch
from headrace.services.operate.waits.wait_graph import Wait, likely_cause, wait_lines
from headrace.services.operate.waits.waits_reader import WaitsReader, reading_waits
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.worker.service_context import ServiceContext
from tests.chaos.disks import MIB, Disk
from tests.commands import cluster_variables
from tests.integration.test_cancel import SETTINGS, VERSION_0, serving

NAMED_S = 15.0
LIMIT_S = 120.0
PARTITIONS = pack_i32(list(range(16)))

Work = Callable[["World"], Any]


class World:
    """A namespace on a real broker, and what reads who waits there."""

    def __init__(
        self, log: EventLog, recipe: Recipe, cluster: ClusterConfig, reader: WaitsReader
    ) -> None:
        self.log, self.recipe, self.cluster, self.reader = log, recipe, cluster, reader

    async def send(self, *events: Event) -> None:
        """Writes events."""
        for event in events:
            await self.log.send(event)

    async def submit(self, number: int = 1, first: int = 0) -> None:
        """Submits tasks."""
        maker = TaskMaker(self.recipe, "team")
        await self.send(*(maker.make(Item("item"), str(first + one)) for one in range(number)))

    async def named(self, *texts: str, limit_s: float = NAMED_S) -> list[Wait]:
        """Waits until the likely cause has these texts. Returns the graph."""
        until, waits = time.monotonic() + limit_s, list[Wait]()
        while time.monotonic() < until:
            waits = await self.reader.waits()
            cause = likely_cause(waits)
            if cause is not None and all(one in f"{cause.name} {cause.cause}" for one in texts):
                return waits
            await asyncio.sleep(0.2)
        raise AssertionError("\n".join([str(texts), *wait_lines(waits, time.time())]))

    @asynccontextmanager
    async def reporting(self, *events: Callable[[int], LoadReported]) -> AsyncIterator[None]:
        """Has workers report each half a second."""

        async def report() -> None:
            for number in range(1_000):
                await self.send(*(event(number) for event in events))
                await asyncio.sleep(0.5)

        task = asyncio.create_task(report())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def playing_environments(world: World) -> AsyncIterator[None]:
    """A real env worker."""
    stopping = asyncio.Event()
    blobs, state = world.cluster.open_blobs(None), world.cluster.state
    context = ServiceContext(
        world.log, world.recipe, blobs, "env-a-3", state, stopping, asyncio.Event()
    )
    task = asyncio.create_task(env_service.run(context))
    try:
        yield
    finally:
        stopping.set()
        await asyncio.wait_for(task, 20)


def inference(number: int, **load: Any) -> LoadReported:
    fields = {"slots": 8, "busy": 0, "waiting": 0, "run_ms": 20, "version": 0, **load}
    pool = PoolLoad(policy="default", partitions=PARTITIONS, **fields)
    return LoadReported(worker="inference-a-1", number=number, every_ms=500, pools=(pool,))


def env(number: int, use: str = "default") -> LoadReported:
    load = EnvironmentLoad(
        environment=use, partitions=PARTITIONS, slots=8, busy=1, waiting=0, run_ms=20,
        open_ms=100,
    )  # fmt: skip
    return LoadReported(
        worker="env-a-2", number=number, every_ms=500, pools=(), environments=(load,)
    )


@pytest.fixture
def run_in(tmp_path: Path, local_stack: local.LocalStack, namespace: str) -> Callable[..., None]:
    """Runs a test in a namespace, with a scheduler and an agent worker unless it is `alone`."""

    def run(
        work: Work,
        settings: Sequence[str] = SETTINGS,
        *,
        recipe: str | Recipe = "null",
        alone: bool = False,
    ) -> None:
        read = read_recipe(recipe, settings) if isinstance(recipe, str) else recipe
        cluster = ClusterConfig(
            tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
        )

        async def main() -> None:
            async with connect(cluster, "test") as connection:
                log = await connection.writing_log(topics_of(read, namespace))
                await apply(log, read)
                side = SideWatch(cluster, namespace, cluster.open_blobs(None))
                reading = connection.log(log.topics)
                async with reading_waits(reading, read, side) as reader:
                    world = World(log, read, cluster, reader)
                    if alone:
                        await work(world)
                    else:
                        async with serving(log, read, tmp_path):
                            await work(world)

        asyncio.run(asyncio.wait_for(main(), LIMIT_S))

    return run


def stored(world: World) -> Event:
    """Version 0, whose weights are in the blob store."""
    blob = world.cluster.open_blobs(None).put(b"weights")
    return VERSION_0.model_copy(update={"full": blob})


def test_env_workers_are_dead_without_a_successor(run_in: Callable[..., None]) -> None:
    async def work(world: World) -> None:
        await world.send(stored(world), env(0))
        await world.submit()
        waits = await world.named("no env worker runs", "env-a-2, reported")
        kinds = [one.kind for one in waits]
        assert kinds[-1] == "service"
        assert {"group", "episode", "action"} <= set(kinds)
        # Another reader, which begins now, finds the same.
        async with reading_waits(world.log, world.recipe) as reader:
            again = likely_cause(await reader.waits())
            assert again is not None
            assert again.id == "service/env"

    run_in(work)


def test_a_quota_holds_tasks_that_a_new_reader_finds(
    run_in: Callable[..., None], tmp_path: Path
) -> None:
    async def work(world: World) -> None:
        quota: dict[str, Any] = {"weight": None, "unlimited": False, "reason": ""}
        await set_quota(world.log, world.recipe, "default", live_episodes=0, **quota)
        await world.send(stored(world))
        # A scheduler that ran already could read the tasks before the quota.
        async with serving(world.log, world.recipe, tmp_path):
            await world.submit(5)
            waits = await world.named("the quota of tenant 'default' is 0 live episodes")
            assert waits[-1].name == "task 0 and 4 more"
            async with reading_waits(world.log, world.recipe) as reader:
                assert [one.name for one in await reader.waits()] == ["task 0 and 4 more"]
            quota["unlimited"] = True
            await set_quota(world.log, world.recipe, "default", live_episodes=None, **quota)
            await world.named("no env worker runs")

    run_in(work, alone=True)


def test_an_image_is_full(run_in: Callable[..., None]) -> None:
    async def work(world: World) -> None:
        await world.send(stored(world))
        await world.submit()
        async with world.reporting(inference):
            await world.named("scheduler.images.box allows 0 live episodes")
            await set_limit(
                world.log, world.recipe, "scheduler.images.box", units=4, period_s=None, reason=""
            )
            await world.named("no env worker runs")

    images = ("environments.default.options.image=box", "scheduler.images.box=0")
    run_in(work, (*SETTINGS, *images))


def test_an_engine_is_stuck(run_in: Callable[..., None]) -> None:
    async def work(world: World) -> None:
        await world.send(stored(world))
        await world.submit()
        async with playing_environments(world), world.reporting(lambda n: inference(n, busy=2)):
            await world.named("inference-a-1", "the engine may be stuck")

    run_in(work)


def test_weights_are_missing(run_in: Callable[..., None]) -> None:
    async def work(world: World) -> None:
        await world.send(VERSION_0)
        await world.submit()
        async with playing_environments(world), world.reporting(lambda n: inference(n, version=-1)):
            waits: list[Wait] = []
            async with asyncio.timeout(NAMED_S):
                while not any(one.kind == "prompt" for one in waits):
                    waits = await world.named("weights of default version 0", "lacks 1 blobs")

    run_in(work)


def test_a_filter_drops_everything(run_in: Callable[..., None]) -> None:
    async def work(world: World) -> None:
        await world.send(stored(world))
        for task in range(8):
            await world.send(
                GroupClosed(task=task, policy="default", item_id="0", verdict="dropped",
                            reason="too_easy")
            )  # fmt: skip
        await world.named("batch 1 of default", "all 8 groups, for 'too_easy'")

    run_in(work, (), recipe="quickstart", alone=True)


def test_a_judge_is_slow(run_in: Callable[..., None]) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "tasks": {"use": "count"},
            "environments": {"default": {"use": "null"}, "grader": {"use": "null"}},
            "policies": {"default": {"model": "tiny-llama", "training": False}},
        }
    )

    async def work(world: World) -> None:
        task = TaskMaker(recipe, "team").make(Item("item"), "0")
        await world.send(stored(world), task)
        episode: dict[str, Any] = {"task": 0, "sample": 0}
        deadline = int(1000 * (time.time() + 600))
        await world.send(EpisodeStarted(submitted=task, seed=0, deadline=deadline, **episode))
        judged: dict[str, Any] = {"environment": EnvironmentUse(use="grader"), **episode}
        await world.send(
            ActionRequested(
                call="9", index=0, kind="score", expires_at=deadline, digest=bytes(16), **judged
            )
        )
        async with world.reporting(inference, lambda number: env(number, "grader")):
            await world.named("the judge grader has not scored", "it is slow or stuck")

    run_in(work, recipe=recipe, alone=True)


def test_the_version_barrier_holds_a_policy(run_in: Callable[..., None]) -> None:
    policy = {"model": "tiny-llama", "batches": {"groups": 4}}
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "tasks": {"use": "count", "roles": {"a": "fast", "b": "slow"}},
            "policies": {"fast": policy, "slow": policy},
            "barrier": {"versions": 1},
        }
    )

    async def work(world: World) -> None:
        version = stored(world)
        for name, number in (("slow", 0), ("fast", 0), ("fast", 1)):
            update = {"policy": name, "version": number, "full_version": number}
            await world.send(version.model_copy(update=update))
        found: dict[str, Wait] = {}
        async with asyncio.timeout(NAMED_S):
            while "batch/fast" not in found or found["batch/fast"].on != ("trainer/slow",):
                found = {one.id: one for one in await world.reader.waits()}
                await asyncio.sleep(0.2)
        assert "barrier holds it: slow must publish first" in found["batch/fast"].cause

    run_in(work, recipe=recipe, alone=True)


def test_a_run_is_paused(run_in: Callable[..., None]) -> None:
    async def work(world: World) -> None:
        for number, state in enumerate(("ready", "gone")):
            life = {"instance": "trainer-a-1", "worker": "trainer-a-1", "service": "trainer"}
            await world.send(
                InstanceStateEntered.model_validate(
                    {**life, "number": number, "kind": "worker", "state": state}
                )
            )
            text = "it has not published version 0" if state == "ready" else "so it is paused"
            waits = await world.named(text)
        assert [one.kind for one in waits] == ["run"]
        [found] = [one for one in (await diagnose(world.cluster, None)).findings
                   if one.check == "waits"]  # fmt: skip
        assert found.state == "warning"
        assert "no process of this run runs, so it is paused" in found.text
        status = await run_status_of(world.log, await read_life(world.log))
        assert "`headrace run RECIPE` continues it" in status.lines()[1]

    run_in(work, (), recipe="quickstart", alone=True)


def test_a_disk_is_full(run_in: Callable[..., None], tmp_path: Path) -> None:
    disk = Disk(tmp_path / "blobs", 128 * MIB)
    disk.folder.mkdir()
    try:
        disk.mount()
    except AssertionError:
        pytest.skip("file systems can't be mounted here")

    async def work(world: World) -> None:
        await world.send(
            stored(world),
            BatchAssembled(policy="default", version=1, recipe=bytes(32), seed=0, samples=(),
                           sampled_tokens=0, low_mark=0, groups_read=0),
        )  # fmt: skip
        # The trainer trains on the batch, and the disk has room.
        waits = await world.named("it trains version 1")
        assert not any("disk of" in one.name for one in waits)
        assert not [one for one in await disk_findings(world) if one.state == "problem"]
        disk.fill(0)
        await world.named("disk of the blob store", "is full: 0.0 MiB are free")
        assert [one for one in await disk_findings(world) if one.state == "problem"]
        disk.free()
        await world.named("it trains version 1")

    try:
        run_in(work, (), recipe="quickstart", alone=True)
    finally:
        disk.unmount()


def test_the_disk_of_a_local_broker_is_watched(local_stack: local.LocalStack) -> None:
    stack = local_stack.bootstrap_servers, local_stack.registry_url
    folder = SideWatch(ClusterConfig(local_stack.state, *stack), "test", None).folders()[BROKER]
    assert (folder / "meta.properties").exists()


async def disk_findings(world: World) -> list[Finding]:
    """What the doctor says about the disk of the blob store."""
    found = await diagnose(world.cluster, None)
    return [one for one in found.findings if one.check == "disk" and "blob store" in one.text]


def test_the_doctor_prints_checks_and_waits_as_text_and_json(
    run_in: Callable[..., None], local_stack: local.LocalStack, tmp_path: Path
) -> None:
    async def work(world: World) -> None:
        await world.send(stored(world), env(0))
        await world.submit()
        await world.named("no env worker runs")
        found = await diagnose(world.cluster, None)
        states = {one.check: one.state for one in found.findings}
        fine = ("kafka", "registry", "blobs", "permissions", "versions", "clocks", "retention")
        assert {name: states[name] for name in fine} == dict.fromkeys(fine, "ok")
        assert found.lines[0].startswith("Likely cause: env")
        tree = json.loads(json.dumps(found.to_tree()))
        names = {"id", "kind", "name", "since", "on", "cause", "help", "busy"}
        assert set(tree["waits"][0]) == names
        variables = cluster_variables(local_stack, world.log.topics.namespace, tmp_path)
        checked = await verified(variables)
        assert (checked["lost"], checked["doubled"], checked["under_way"]) == (0, 0, 1)

    run_in(work)


async def verified(variables: dict[str, str]) -> dict[str, Any]:
    """What `headrace verify --json` prints, which must find nothing."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "verify", "--quiet", "--json"),
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_doctor_says_that_no_broker_answers(tmp_path: Path) -> None:
    cluster = ClusterConfig(tmp_path, "127.0.0.1:1", "http://127.0.0.1:1")
    began = time.monotonic()
    found = asyncio.run(diagnose(cluster, None))
    assert time.monotonic() - began < NAMED_S
    assert found.has_problem
    assert found.findings[0].check == "kafka"
    assert "no Kafka broker answers" in found.findings[0].text
    assert not found.lines


@pytest.mark.long
def test_a_broker_is_paused(tmp_path: Path, namespace: str) -> None:
    recipe = read_recipe("null", SETTINGS)
    stack = local.up(tmp_path / "stack", kafka_port=0, registry_port=0, owner_pid=os.getpid())
    cluster = ClusterConfig(tmp_path, stack.bootstrap_servers, stack.registry_url)

    async def main() -> None:
        async with connect(cluster, "test") as connection:
            log = await connection.writing_log(topics_of(recipe, namespace))
            await apply(log, recipe)
            async with reading_waits(log, recipe) as reader:
                world = World(log, recipe, cluster, reader)
                os.kill(stack.kafka_pid, signal.SIGSTOP)
                try:
                    await world.named("the Kafka broker", "does not answer")
                finally:
                    os.kill(stack.kafka_pid, signal.SIGCONT)
                async with asyncio.timeout(60):
                    while any(one.kind == "broker" for one in await reader.waits()):
                        await asyncio.sleep(0.2)

    try:
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    finally:
        local.down(tmp_path / "stack", wipe=True)
