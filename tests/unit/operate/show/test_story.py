"""Stories are found without reading whole topics, made from facts alone, and readable."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import EpisodeEnded, Event, PolicyUse, TaskEnded
from headrace.schemas.topics import BATCHES, TRAJECTORIES
from headrace.services.kafka.broker import Outgoing, Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, Patience, read_records
from headrace.services.operate.show.facts import Fact, fact_of, story_tree
from headrace.services.operate.show.gather import Gatherer, only_policy
from headrace.services.operate.show.pages import Part, Table
from headrace.services.operate.show.step_page import step_page
from headrace.services.operate.show.step_story import (
    StepStory,
    TrainedSample,
    make_sample,
)
from headrace.services.operate.show.task_page import task_page
from headrace.services.operate.show.task_story import make_task_story
from tests.unit.operate.show.world import SAMPLES, TOPICS, World, in_a_world


async def whole_log(log: EventLog, patience: Patience) -> list[Fact[Event]]:
    """Every fact of the namespace."""
    ranges = {partition: WHOLE for one in TOPICS for partition in one.all_partitions()}
    async with aclosing(read_records(log.broker, ranges, patience)) as records:
        return [await fact_of(log, record) async for record in records]


def text_of(page: list[Part]) -> str:
    rows = [
        part if isinstance(part, str) else "\n".join(" | ".join(row) for row in part.rows)
        for part in page
    ]
    return "\n".join(rows)


async def a_run(world: World) -> tuple[int, int]:
    """Two tasks among others, decided by batch 2 of 3; both are published."""
    await world.publish(0)
    first = await world.run_task("a")
    await world.publish(1, await world.batch(1, [first], first + 1))
    second, third = await world.run_task("b"), await world.run_task("c")
    await world.publish(2, await world.batch(2, [second, third], third + 1))
    fourth = await world.run_task("d")
    await world.publish(3, await world.batch(3, [fourth], fourth + 1))
    return second, third


def test_a_task_story_is_whole_though_little_is_read() -> None:
    async def test(world: World) -> None:
        number, _ = await a_run(world)
        gatherer = Gatherer(world.log, world.patience)
        found = make_task_story(number, await gatherer.task(number))
        every = [
            fact
            for fact in await whole_log(world.log, world.patience)
            if getattr(fact.event, "task", number) == number
            and getattr(fact.event, "task_id", "b") in ("b", "x")
            and getattr(fact.event, "version", 2) == 2
        ]
        assert story_tree(found) == story_tree(make_task_story(number, every))
        assert gatherer.remarks == []

        assert [episode.sample for episode in found.episodes] == [0, 1]
        lost, second = found.episodes[1].attempts
        assert (lost.trajectory, [one.call for one in lost.exchanges]) == (None, ["1", "2"])
        assert found.episodes[1].counting is second.trajectory
        (training,) = found.policies
        assert training.batch is not None
        assert (training.batch.trained, training.batch.dropped) == ([1], {0: "stale"})
        assert training.published is not None
        assert training.published.event.version == 2
        json.dumps(story_tree(found))

    in_a_world(test)


def test_one_episode_comes_without_the_others() -> None:
    async def test(world: World) -> None:
        number, _ = await a_run(world)
        gatherer = Gatherer(world.log, world.patience)
        story = make_task_story(number, await gatherer.task(number, 1), 1)
        assert [episode.sample for episode in story.episodes] == [1]
        page = text_of(task_page(story, lambda policy, ids, digest: None, whole=True))
        assert f"episode {number}/1: finished, reward 1, 2 attempts" in page
        assert "where⏎am I" in page
        assert "infrastructure: worker_lost (retryable)" in page
        assert "2 tokens | a | 1 | 4" in page  # no tokenizer: their number

    in_a_world(test)


def test_duplicates_are_not_counted_and_texts_are_decoded() -> None:
    async def test(world: World) -> None:
        number, _ = await a_run(world)
        await world.exchange(number, 0, 0)
        facts = await Gatherer(world.log, world.patience).task(number)
        story = make_task_story(number, facts)
        assert story.duplicates == 4
        page = text_of(task_page(story, lambda policy, ids, digest: policy, whole=False))
        assert "4 repeated records" in page
        assert "default | default | a | 1 | 4" in page  # its policy, then its context decoded

    in_a_world(test)


def test_a_task_that_waits_and_one_that_does_not_exist() -> None:
    async def test(world: World) -> None:
        await a_run(world)
        number = await world.submit("waits")
        gatherer = Gatherer(world.log, world.patience)
        story = make_task_story(number, await gatherer.task(number))
        assert text_of(task_page(story, lambda *_: None, whole=False)).startswith(
            f"task {number}: waiting for the scheduler"
        )
        assert await gatherer.number_of("team/b") == 1
        with pytest.raises(UsageError, match=f"holds 0 to {number}.*--namespace"):
            await gatherer.task(number + 1)
        with pytest.raises(UsageError, match="tail tasks"):
            await gatherer.number_of("team/nope")

    in_a_world(test)


def test_garbage_of_the_tasks_key_is_a_remark() -> None:
    async def test(world: World) -> None:
        number, _ = await a_run(world)
        await world.log.broker.send(
            Outgoing(TOPICS.name(TRAJECTORIES), str(number).encode(), b"garbage")
        )
        gatherer = Gatherer(world.log, world.patience)
        assert make_task_story(number, await gatherer.task(number)).result is not None
        (remark,) = gatherer.remarks
        assert "does not decode: no Confluent framing" in remark

    in_a_world(test)


async def step_of(world: World, version: int) -> StepStory:
    gatherer = Gatherer(world.log, world.patience)
    batch = await gatherer.batch("default", version)
    published = await gatherer.publications("default", version, 0.0)
    samples: list[TrainedSample] = []
    if batch is not None:
        refs = [sample.trajectory for sample in batch.event.samples]
        async for trajectory in world.log.fetch_each(refs):
            samples.append(make_sample(batch.event, len(samples), trajectory))
    return StepStory("default", version, batch, samples, published, {"02" * 32: True}, None, [])


def test_a_step_story_has_its_samples_drops_and_weights() -> None:
    async def test(world: World) -> None:
        second, third = await a_run(world)
        story = await step_of(world, 2)
        assert [(one.task, one.sample) for one in story.samples] == [(second, 1), (third, 1)]
        assert story.samples[0].reward == 1.0
        assert (story.samples[0].versions, story.samples[0].staleness) == ((4,), -3)
        assert story.samples[0].advantages == (1.0,)
        page = text_of(step_page(story))
        assert "batch 2: 2 samples, 2 dropped" in page
        assert f"{second}/0 | stale" in page
        assert "3 bytes, in the blob store" in page
        assert "by          writer-1" in page
        json.dumps(story_tree(story))

    in_a_world(test)


def evaluated(task: int, version: int, *rewards: float) -> TaskEnded:
    use = PolicyUse(policy="default", tokens=1, longest=1, oldest_version=version)
    outcomes = [
        EpisodeEnded(
            task=task, sample=sample, attempt=0, item_id="item", ending="finished", reward=reward,
            attempts=1, policies=(use,),
        )
        for sample, reward in enumerate(rewards)
    ]  # fmt: skip
    return TaskEnded(
        task=task, source="evaluation", task_id=str(task), item_id="item", purpose="evaluate",
        closed_by="all", outcomes=tuple(outcomes),
    )  # fmt: skip


def test_the_story_of_a_version_has_its_evaluation() -> None:
    async def test(world: World) -> None:
        await a_run(world)
        half, none, other = evaluated(80, 2, 1.0, 0.0), evaluated(81, 2, 0.0), evaluated(82, 1, 1.0)
        for event in (half, none, other, half):  # one of them twice
            await world.log.send(event)
        gatherer = Gatherer(world.log, world.patience)
        found = await gatherer.evaluation("default", 2, 0.0, 1.0)
        assert found is not None
        assert sorted(found.rewards.values()) == [(0.0,), (1.0, 0.0)]
        assert await gatherer.evaluation("default", 3, 0.0, 1.0) is None
        story = replace(await step_of(world, 2), evaluation=found)
        assert "  evaluation  avg@2 0.250 [" in text_of(step_page(story))
        assert "2 items" in text_of(step_page(story))
        json.dumps(story_tree(story))

    in_a_world(test)


def test_a_trajectory_that_is_gone_is_said_to_be() -> None:
    async def test(world: World) -> None:
        await a_run(world)
        for number in range(TOPICS.partitions):
            partition = Partition(TOPICS.name(TRAJECTORIES), number)
            world.cluster.expire(
                partition, (await world.log.broker.ends([partition]))[partition][1]
            )
        story = await step_of(world, 2)
        assert [one.reward for one in story.samples] == [None, None]
        assert "lost" in story.samples[0].gone
        assert text_of(step_page(story)).count("| gone |") == 2

    in_a_world(test)


@pytest.mark.parametrize("kept_from", [0, 60])
def test_any_batch_is_found_from_the_end(kept_from: int) -> None:
    async def test(world: World) -> None:
        for version in range(1, 101):
            await world.batch(version, [], 0)
        partition = Partition(TOPICS.name(BATCHES, "default"), 0)
        # As in Kafka, the last batch can be read only a moment after it was committed.
        while (await world.log.broker.ends([partition]))[partition][1] < 200:
            await asyncio.sleep(0.001)
        world.cluster.expire(partition, kept_from)
        gatherer = Gatherer(world.log, world.patience)
        for version in (1, 2, 30, 31, 50, 99, 100, 101):
            found = await gatherer.batch("default", version)
            there = kept_from // 2 < version <= 100
            assert (found is not None) == there
            assert found is None or found.event.event_id == f"default/{version}"

    in_a_world(test)


def test_a_policy_must_be_named_if_there_are_several() -> None:
    assert only_policy(("a",), None) == "a"
    with pytest.raises(UsageError, match="batch:a/7"):
        only_policy(("a", "b"), None)
    with pytest.raises(UsageError, match="it has: a, b"):
        only_policy(("a", "b"), "c")


def test_a_page_has_headings_lines_and_tables() -> None:
    async def test(world: World) -> None:
        number, _ = await a_run(world)
        story = make_task_story(number, await Gatherer(world.log, world.patience).task(number))
        page = task_page(story, lambda *_: None, whole=False)
        headings = [part for part in page if isinstance(part, str) and not part.startswith(" ")]
        assert headings[0] == f"task {number}: ended"
        assert len(headings) == 1 + SAMPLES
        for part in page:
            if isinstance(part, Table):
                assert {len(row) for row in part.rows} == {len(part.head)}

    in_a_world(test)


def test_a_scan_ends_early_when_it_is_closed() -> None:
    async def test(world: World) -> None:
        await a_run(world)
        partition = Partition(TOPICS.name(BATCHES, "default"), 0)
        records: list[Record] = []
        async with aclosing(
            read_records(world.log.broker, {partition: WHOLE}, world.patience)
        ) as scanned:
            async for record in scanned:
                records.append(record)
                break
        assert [record.offset for record in records] == [0]
        await asyncio.sleep(0)

    in_a_world(test)
