"""What retention has removed is named, and nothing is replayed with holes."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

from headrace.errors import RecordsLost, UsageError
from headrace.schemas.codec import Codec
from headrace.schemas.events import (
    BatchAssembled,
    EnvironmentUse,
    EpisodeStarted,
    ObservationRecorded,
    PolicyPublished,
    Ref,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES, OBSERVATIONS, OUTCOMES, TRAJECTORIES, Topics
from headrace.services.kafka.broker import Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.operate.replay import recording
from headrace.services.operate.replay.recording import Recording, TaskRange, make_fresh
from headrace.services.operate.replay.replay_batches import replay_batches
from headrace.services.operate.replay.replay_episodes import replay_episodes
from headrace.services.operate.replay.replay_trajectories import replay_trajectories
from tests.memory.memory_broker import MemoryCluster
from tests.memory.memory_registry import MemoryRegistry
from tests.unit.stream_jobs.test_batches import a_recipe
from tests.unit.stream_jobs.test_groups import a_task, an_outcome

TOPICS = Topics("old", ("default",), 1, ["t"])
RECIPE = a_recipe()
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class Bench:
    """A recorded run in memory."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.broker = self.cluster.client("test")
        registry = MemoryRegistry()
        codec = Codec()
        registry.prepare(codec, TOPICS)
        self.log = EventLog(self.broker, TOPICS, codec, registry, "test")
        connection = Connection(self.broker, cast("Any", registry), "replay")
        self.recording = Recording(
            ClusterConfig(Path("none")), connection, connection.log(TOPICS), RECIPE, check_progress
        )

    def expire(self, topic: Any, before: int, policy: str | None = None) -> None:
        self.cluster.expire(Partition(TOPICS.name(topic, policy), 0), before)

    async def trajectory(self, task: int) -> Ref:
        return await self.log.send(
            TrajectoryRecorded(
                task=task,
                sample=0,
                source="s",
                task_id=str(task),
                item_id="i",
                agent="default",
                ending="finished",
                started=0,
                ended=1,
            )
        )

    async def observe(self, task: int) -> None:
        observed = {"task": task, "sample": 0, "call": "1", "index": 0, "digest": bytes(16)}
        await self.log.send(ObservationRecorded.model_validate(observed))

    async def batch(self, version: int, *refs: Ref) -> None:
        sample = {"advantages": bytes(4), "tokens": 1, "longest": 2, "oldest_version": 0}
        samples = [
            {"task": version, "sample": index, "trajectory": ref, **sample}
            for index, ref in enumerate(refs)
        ]
        tree = {"policy": "default", "version": version, "recipe": RECIPE.digest, "seed": 0}
        counts = {"sampled_tokens": len(refs), "low_mark": version, "groups_read": version}
        await self.log.send(BatchAssembled.model_validate({**tree, "samples": samples, **counts}))

    async def publish(self, version: int, status: str = "trained") -> None:
        await self.log.send(
            PolicyPublished.model_validate(
                {
                    "policy": "default",
                    "version": version,
                    "status": status,
                    "digest": bytes(32),
                    "full_version": version,
                }
            )
        )


def started_episode(task: int, payload: str = "{}") -> EpisodeStarted:
    submitted = TaskSubmitted(
        source="s",
        task_id=str(task),
        item_id="i",
        agent="default",
        environment=EnvironmentUse(use="default"),
        roles={},
        max_turns=1,
        max_tokens=1,
        deadline_s=1,
        payload=payload,
    )
    return EpisodeStarted(task=task, sample=0, submitted=submitted, seed=0, deadline=1)


def playable() -> Recipe:
    recipe = a_recipe()
    policy = recipe.policies["default"].model_copy(update={"model": "tiny-llama"})
    return recipe.model_copy(update={"policies": {"default": policy}})


def on_bench(
    test: Callable[[Bench], Coroutine[Any, Any, None]], settings: Mapping[str, str] = NO_SETTINGS
) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.broker.create_topics({t.name: (t.partitions, settings) for t in TOPICS})
        before = set(await bench.broker.list_topics())
        await test(bench)
        assert set(await bench.broker.list_topics()) == before, "no namespace was made"
        await bench.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def check_progress(what: str, done: int, total: int) -> None:
    assert done <= total, what


def test_batches_and_their_trajectories_must_all_be_there() -> None:
    async def replay(bench: Bench) -> None:
        await replay_batches(bench.recording, None, until=None, into=None)

    async def test(bench: Bench) -> None:
        with pytest.raises(UsageError, match="not trained policy default on a batch yet"):
            await replay(bench)
        await bench.publish(0)
        for version in range(1, 5):
            await bench.batch(version, *[await bench.trajectory(version) for _ in range(2)])
            await bench.publish(version)
        bench.expire(TRAJECTORIES, 3)
        with pytest.raises(RecordsLost, match=r"batches 1 to 2 refer to .* \(3 in all\)"):
            await replay(bench)
        await bench.publish(1, "skipped")
        with pytest.raises(RecordsLost, match=r"batches 2 to 2 refer to .* \(1 in all\)"):
            await replay(bench)
        bench.expire(BATCHES, 2, "default")
        with pytest.raises(RecordsLost, match="batches 1 to 2 of policy default are no longer"):
            await replay(bench)

    on_bench(test)


def test_tasks_whose_trajectories_are_gone_are_named() -> None:
    async def replay(bench: Bench, first: int, last: int | None) -> None:
        tasks = TaskRange(first, last)
        await replay_trajectories(bench.recording, RECIPE, None, tasks=tasks, into=None)

    async def test(bench: Bench) -> None:
        with pytest.raises(UsageError, match="no ended task"):
            await replay(bench, 0, None)
        for task in range(6):
            ref = await bench.trajectory(task)
            await bench.log.send(a_task([an_outcome(0, trajectory=ref, task=task)], task=task))
        bench.expire(TRAJECTORIES, 2)
        with pytest.raises(
            RecordsLost, match=r"2 of 6 tasks .* replay the later tasks with --tasks 2-"
        ):
            await replay(bench, 0, None)
        with pytest.raises(UsageError, match="from 6 to 9: its ended tasks are 0 to 5"):
            await replay(bench, 6, 9)

    on_bench(test)


def test_an_episode_whose_record_begins_before_what_is_kept_is_left_out() -> None:
    async def submit(bench: Bench, task: int) -> None:
        await bench.log.send(started_episode(task))
        await asyncio.sleep(0.02)  # the log's clock has milliseconds
        await bench.observe(task)
        await asyncio.sleep(0.02)

    async def test(bench: Bench) -> None:
        recipe = playable()

        async def replay() -> tuple[int, int, int]:
            found = await replay_episodes(bench.recording, recipe, tasks=TaskRange(), limit=2)
            return found.episodes, found.no_longer_kept, found.beyond_limit

        for task in range(4):
            await submit(bench, task)
        assert await replay() == (2, 0, 2)
        bench.expire(OBSERVATIONS, 2)
        assert await replay() == (1, 3, 0), "what began before the oldest observation kept"
        for _ in range(3):
            await submit(bench, 7)
        bench.expire(OBSERVATIONS, 6)
        with pytest.raises(RecordsLost, match="old has 5 episodes of tasks 0 to the last, but"):
            await replay()

    on_bench(test)


def test_a_partition_that_has_lost_all_records_counts() -> None:
    """Its oldest record can't say when what is kept begins: retention does."""

    async def test(bench: Bench) -> None:
        for task in range(3):
            await bench.log.send(started_episode(task))
            await bench.observe(task)
        bench.expire(OBSERVATIONS, 3)
        with pytest.raises(RecordsLost, match="old has 3 episodes of tasks 0 to the last, but"):
            await replay_episodes(bench.recording, playable(), tasks=TaskRange(), limit=9)

    on_bench(test)
    # What retention of a minute has removed is older than episodes that have just started.
    on_bench(replays_what_is_new, {"retention.ms": "60000"})


async def replays_what_is_new(bench: Bench) -> None:
    await bench.observe(0)
    bench.expire(OBSERVATIONS, 1)
    await bench.log.send(started_episode(0))
    found = await replay_episodes(bench.recording, playable(), tasks=TaskRange(), limit=9)
    assert (found.episodes, found.no_longer_kept) == (1, 0)


def test_memory_does_not_grow_with_the_episodes_that_are_not_replayed() -> None:
    async def test(bench: Bench) -> None:
        for task in reversed(range(200)):
            await bench.log.send(started_episode(task, payload=f'{{"a": "{"x" * 40_000}"}}'))
        tracemalloc.start()
        found = await replay_episodes(bench.recording, playable(), tasks=TaskRange(), limit=2)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (found.episodes, found.beyond_limit) == (2, 198)
        assert peak < 4_000_000, "200 episodes have 8 MB"

    on_bench(test)


def test_only_the_time_of_the_episodes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SKEW_S", 0.0)

    async def test(bench: Bench) -> None:
        decoded = Counter[str]()

        class CountingLog(EventLog):
            async def decode(self, record: Record) -> Any:
                decoded[record.partition.topic] += 1
                return await super().decode(record)

        for task in range(9):
            await bench.log.send(started_episode(task))
            await bench.observe(task)
            await bench.log.send(an_outcome(0, task=task, trajectory=await bench.trajectory(task)))
            await asyncio.sleep(0.005)
        bench.recording.log.__class__ = CountingLog
        found = await replay_episodes(bench.recording, playable(), tasks=TaskRange(4, 4), limit=9)
        assert (found.episodes, found.unfinished) == (1, 0)
        assert decoded[TOPICS.name(OBSERVATIONS)] == 1
        assert decoded[TOPICS.name(OUTCOMES)] <= 2

    on_bench(test)


def test_a_replay_goes_only_where_nothing_is() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.broker.create_topics({t.name: (t.partitions, {}) for t in TOPICS})
        with pytest.raises(UsageError, match="exists already"):
            await make_fresh(bench.recording, "old", RECIPE)
        with pytest.raises(UsageError, match="lower-case"):
            await make_fresh(bench.recording, "No Name", RECIPE)
        names = [
            (await make_fresh(bench.recording, into, RECIPE)).topics.namespace
            for into in (None, None, "mine")
        ]
        assert names == ["old-replay", "old-replay-2", "mine"]
        await bench.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))
