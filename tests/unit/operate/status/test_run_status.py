"""The status of a run, from the ends of its topics."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.schemas.events import (
    EnvironmentLoad,
    InstanceStateEntered,
    LoadReported,
    PoolLoad,
    RunStateEntered,
)
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import DEAD_LETTERS
from headrace.services.kafka.broker import Outgoing
from headrace.services.log.dead_letter import WHY
from headrace.services.namespace.apply import commit_first_offsets
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.dead_letters.dead_letters import REDRIVEN
from headrace.services.operate.status.run_status import run_status_of
from tests.unit.operate.run.test_training_health import SANE
from tests.unit.operate.show.world import TOPICS, World, in_a_world

RECIPE = Recipe.model_validate({"name": "r", "policies": {"default": {"model": "tiny-llama"}}})
LIFE = RunLife(
    RunStateEntered(
        namespace="test", state="started", recipe=RECIPE.canonical(), digest=RECIPE.digest
    )
)


async def a_run(world: World) -> None:
    """Six tasks of two episodes, three versions, and a task that waits."""
    await commit_first_offsets(world.log.broker, TOPICS)
    await world.publish(0)
    for version in range(1, 4):
        tasks = [await world.run_task(f"{version}-{n}") for n in range(2)]
        await world.publish(version, await world.batch(version, tasks, tasks[-1] + 1))
    await world.submit("waits")
    for headers in ([], [(f"{WHY}offset", b"1")], [(REDRIVEN, b"0")]):
        letter = Outgoing(TOPICS.name(DEAD_LETTERS), b"", b"garbage", headers)
        await world.log.broker.send(letter)
    await asyncio.sleep(0.01)  # the last transaction's mark


@pytest.mark.parametrize("recent", [1, 4, 1_000])
def test_the_status_is_the_same_however_little_is_read(recent: int) -> None:
    async def test(world: World) -> None:
        await a_run(world)
        status = await run_status_of(world.log, LIFE, recent)
        assert (status.state, status.versions) == ("started", {"default": 3})
        counts = (status.tasks_submitted, status.tasks_started, status.tasks_ended)
        assert (*counts, status.episodes, status.failures) == (7, 0, 6, 12, 0)
        assert status.failures_of <= 12
        assert (status.dead_letters, status.redriven) == (1, 1)
        assert "  dead letters  1   redriven 1" in status.lines()
        partitions = [at for one in TOPICS for at in one.all_partitions()]
        before = await world.log.broker.ends(partitions)
        await run_status_of(world.log, LIFE, recent)
        assert await world.log.broker.ends(partitions) == before, "it leaves no trace"

    in_a_world(test)


def test_what_was_not_counted_one_by_one_is_said() -> None:
    async def test(world: World) -> None:
        await a_run(world)
        few = await run_status_of(world.log, LIFE, 1)
        assert f"failed 0 of the last {few.failures_of}" in "\n".join(few.lines())
        assert "of the last" not in "\n".join((await run_status_of(world.log, LIFE)).lines())

    in_a_world(test)


def test_the_metrics_of_a_run_are_figures_a_table_and_advice() -> None:
    async def test(world: World) -> None:
        await commit_first_offsets(world.log.broker, TOPICS)
        await world.publish(0, metrics={})
        for version in range(1, 5):
            metrics = SANE | {"engine_kl": 0.1, "loss": 1.0 / version}
            await world.publish(version, metrics=metrics)
        await asyncio.sleep(0.01)  # the last transaction's mark
        status = await run_status_of(world.log, LIFE)
        text = "\n".join(status.lines())
        assert "off-policy  engine gap 0.093" in text
        assert "hint: engine and trainer disagree" in text
        rows = {name: (newest, curve) for _, name, newest, curve in status.metric_rows()}
        assert rows["loss"] == ("0.25", "█▃▂▁")
        assert rows["entropy"] == ("0.412", "▁▁▁▁")
        assert SANE.keys() <= rows.keys()

    in_a_world(test)


def test_a_run_without_a_process_is_paused() -> None:
    async def test(world: World) -> None:
        await a_run(world)
        assert (await run_status_of(world.log, LIFE)).paused_at is None, "nobody was heard of"
        for number, state in enumerate(("gone", "ready")):
            life = {"instance": state, "worker": "trainer-a-1", "service": "trainer"}
            await world.log.send(
                InstanceStateEntered.model_validate(
                    {**life, "number": number, "kind": "worker", "state": state}
                )
            )
            await asyncio.sleep(0.01)  # the last transaction's mark
            status = await run_status_of(world.log, LIFE)
            assert (status.paused_at is not None) == (state == "gone")
            lines = "\n".join(status.lines())
            assert ("test: started, paused, recipe r" in lines) == (state == "gone")
            assert ("`headrace run RECIPE` continues it" in lines) == (state == "gone")

    in_a_world(test)


def test_the_workers_are_shown_with_their_load() -> None:
    async def test(world: World) -> None:
        await a_run(world)
        for number in range(10):
            load = PoolLoad(
                policy="default",
                partitions=pack_i32([number]),
                slots=8,
                busy=number % 8,
                waiting=2,
                run_ms=1500,
                version=3,
            )
            name = f"inference-{number}"
            await world.log.send(LoadReported(worker=name, number=0, every_ms=1000, pools=(load,)))
        gone = LoadReported(worker="inference-9", number=1, every_ms=1000, pools=(), leaving=True)
        await world.log.send(gone)
        environment = EnvironmentLoad(
            environment="default",
            partitions=pack_i32([0]),
            slots=64,
            busy=60,
            waiting=1,
            run_ms=250,
            open_ms=9000,
        )
        report = LoadReported(
            worker="env-0", number=0, every_ms=1000, pools=(), environments=(environment,)
        )
        await world.log.send(report)
        status = await run_status_of(world.log, LIFE)
        assert [one.worker for one in status.workers] == [f"inference-{n}" for n in range(9)]
        text = "\n".join(status.lines())
        assert "workers       default: 9   slots 72   busy 28   waiting 18" in text
        assert "inference-7   slots 8   busy 7   waiting 2   1.5 s a generation   version 3" in text
        assert "inference-8" not in text
        assert "… and 1 more" in text
        assert "workers       environment default: 1   slots 64   busy 60   waiting 1" in text
        assert "env-0   slots 64   busy 60   waiting 1   0.25 s an action   9 s open" in text
        ended = "\n".join(replace(status, state="ended").lines())
        assert "workers" not in ended

    in_a_world(test)
