"""A record that refers to a trajectory elsewhere is no event: whoever reads it may not follow."""

from __future__ import annotations

import pytest

from headrace.errors import DecodeError
from headrace.schemas.events import (
    BatchAssembled,
    BatchSample,
    EpisodeEnded,
    Event,
    GroupClosed,
    GroupSample,
    ObservationRecorded,
    Ref,
    TaskEnded,
)
from headrace.schemas.topics import BATCHES, DEAD_LETTERS, GROUPS, OUTCOMES, RESULTS, Topic, Topics
from headrace.services.kafka.broker import Outgoing
from headrace.services.log.references import check_partition, check_trajectories
from tests.unit.log.log_bench import TOPICS, Bench, run


def ref(topic: str = "unit.trajectories.v1", partition: int = 0) -> Ref:
    return Ref(topic=topic, partition=partition, offset=3, digest=bytes(16))


def outcome(named: Ref | None) -> EpisodeEnded:
    return EpisodeEnded(task=1, sample=0, item_id="i", ending="finished", trajectory=named)


def result(named: Ref) -> TaskEnded:
    return TaskEnded(
        task=1, source="s", task_id="t", item_id="i", closed_by="all",
        outcomes=(outcome(None), outcome(ref()), outcome(named)),
    )  # fmt: skip


def group(named: Ref) -> GroupClosed:
    sample = GroupSample(
        sample=0, trajectory=named, reward=1.0, advantages=b"", tokens=1, longest=1,
        oldest_version=0,
    )  # fmt: skip
    return GroupClosed(task=1, policy="default", item_id="i", verdict="scored", samples=(sample,))


def batch(named: Ref) -> BatchAssembled:
    sample = BatchSample(
        task=1, sample=0, trajectory=named, advantages=b"", tokens=1, longest=1, oldest_version=0
    )
    return BatchAssembled(
        policy="default", version=1, recipe=bytes(32), seed=0, samples=(sample,),
        sampled_tokens=1, low_mark=1, groups_read=1,
    )  # fmt: skip


EVENTS = {OUTCOMES: outcome, RESULTS: result, GROUPS: group, BATCHES: batch}
REFUSED = {
    "another namespace": (ref("theirs.trajectories.v1"), "'theirs'"),
    "another topic": (ref("unit.tasks.v1"), "names unit.tasks.v1"),
    "another policy's topic": (ref("unit.batches.default.v1"), "names unit.batches"),
    "no topic of Headrace": (ref("__consumer_offsets"), "not a topic of Headrace"),
    "nothing": (ref(""), "not a topic of Headrace"),
    "no such partition": (ref(partition=2), "has 2 partitions"),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("topic", EVENTS, ids=lambda topic: topic.name)
def test_a_record_with_a_wrong_reference_is_a_dead_letter_and_the_next_one_is_read(
    topic: Topic[Event], why: str
) -> None:
    named, reason = REFUSED[why]
    make = EVENTS[topic]

    async def test(bench: Bench) -> None:
        policy = "default" if topic.per_policy else None
        partition = TOPICS.partition(topic, policy)
        events = [make(named), make(ref(partition=1))]
        for event in events:
            value = bench.log.outgoing(event).value
            await bench.broker.send(Outgoing(partition.topic, b"k", value, partition=0))
        wrong, right = await bench.records(partition)
        assert await bench.log.decode_or_dead_letter(wrong) is None
        delivery = await bench.log.decode_or_dead_letter(right)
        assert delivery is not None
        assert delivery.event == events[1]
        (dead,) = await bench.records(TOPICS.partition(DEAD_LETTERS))
        assert dead.value == wrong.value
        assert reason in dict(dead.headers)["__connect.errors.exception.message"].decode()

    run(test)


def test_a_namespace_that_the_recipe_names_may_be_read_but_only_its_trajectories() -> None:
    topics = Topics("unit", ["default"], 2, reads_from=["theirs"])
    check_trajectories(result(ref("theirs.trajectories.v1", 99)), topics, b"")
    with pytest.raises(DecodeError, match=r"names theirs\.tasks\.v1"):
        check_trajectories(result(ref("theirs.tasks.v1")), topics, b"")


def test_an_answer_names_a_partition_that_the_next_actions_can_have() -> None:
    """An agent worker that sends an action there would end, and so would its successor."""
    topics = Topics("unit", ["default"], 2, pool_partitions=8)

    def answer(partition: int) -> ObservationRecorded:
        return ObservationRecorded(
            task=1, sample=0, attempt=0, call="1", index=0, digest=bytes(16), text="", data="{}",
            partition=partition,
        )  # fmt: skip

    for partition in (-1, 0, 7):
        check_partition(answer(partition), topics, b"")
    with pytest.raises(DecodeError, match=r"names partition 8 of unit\.actions.*has 8 partitions"):
        check_partition(answer(8), topics, b"")
