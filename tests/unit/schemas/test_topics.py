"""The table of topics is the design's."""

from __future__ import annotations

import pytest

from headrace.schemas import events, topics
from headrace.schemas.events import EVENTS, GenerationRequested, Sampling, TaskEnded
from headrace.schemas.topics import TOPICS, Topics

# Name; event; key fields; one partition, P, or those of a pool; one a policy; who writes; how long
# it is kept.
TABLE = """
runs         RunStateEntered     namespace      1 -      operator                 forever
tasks        TaskSubmitted       source,task_id 1 -      any-team                 long
cancellations TaskCancelled      source,task_id 1 -      any-team                 long
quotas       QuotaSet            tenant         1 -      operator                 forever
waiting      WaitingRecorded     topic          1 -      scheduler,fenced         forever
limits       LimitSet            limit          1 -      operator                 forever
audit        OperationRecorded   operation      1 -      operator                 forever
episodes     EpisodeStarted      task           P -      scheduler,fenced         days
prompts      GenerationRequested task           pool policy agent,inference          days
generations  GenerationCompleted task           P -      inference                days
actions      ActionRequested     task           pool - agent                    days
observations ObservationRecorded task           P -      env                      days
trajectories TrajectoryRecorded  task           P -      agent                    long
outcomes     EpisodeEnded        task           P -      agent                    long
results      TaskEnded           task           P -      agent                    long
turns        TurnProjected       task           P -      project-turns            long
groups       GroupClosed         task           1 policy assemble-groups          long
items        ItemMeasured        item_id        1 policy item-statistics,fenced   forever
batches      BatchAssembled      policy         1 policy assemble-batches,fenced  long
policies     PolicyPublished     policy         1 -      trainer,fenced           long
instances    InstanceStateEntered instance      1 -      every-service            history
loads        LoadReported        worker         1 -      inference,env            hour
shares       LimitShared         limit          1 -      scheduler,fenced         forever
dead-letters -                   -              1 -      any-consumer             long
"""


def test_the_topics_are_the_design_s() -> None:
    rows = [
        (
            topic.name,
            topic.event.__name__ if topic.event else "-",
            ",".join(topic.event.key_fields) if topic.event else "-",
            "1" if topic.single else "pool" if topic.pool else "P",
            "policy" if topic.per_policy else "-",
            topic.writer.replace(", ", ",").replace(" ", "-"),
            topic.kept,
        )
        for topic in TOPICS
    ]
    assert rows == [tuple(line.split()) for line in TABLE.strip().splitlines()]
    assert [topic.event for topic in TOPICS if topic.event] == list(EVENTS)


def test_every_event_s_id_and_key_are_its_fields() -> None:
    for event_type in EVENTS:
        assert {*event_type.id_fields, *event_type.key_fields} <= set(event_type.model_fields)


def test_a_namespace_s_topics() -> None:
    demo = Topics("demo", ["a", "b"], partitions=4, pool_partitions=9)
    assert [(topic.name, topic.partitions) for topic in demo] == [
        ("demo.runs.v1", 1),
        ("demo.tasks.v1", 1),
        ("demo.cancellations.v1", 1),
        ("demo.quotas.v1", 1),
        ("demo.waiting.v1", 1),
        ("demo.limits.v1", 1),
        ("demo.audit.v1", 1),
        ("demo.episodes.v1", 4),
        ("demo.prompts.a.v1", 9),
        ("demo.prompts.b.v1", 9),
        ("demo.generations.v1", 4),
        ("demo.actions.v1", 9),
        ("demo.observations.v1", 4),
        ("demo.trajectories.v1", 4),
        ("demo.outcomes.v1", 4),
        ("demo.results.v1", 4),
        ("demo.turns.v1", 4),
        ("demo.groups.a.v1", 1),
        ("demo.groups.b.v1", 1),
        ("demo.items.a.v1", 1),
        ("demo.items.b.v1", 1),
        ("demo.batches.a.v1", 1),
        ("demo.batches.b.v1", 1),
        ("demo.policies.v1", 1),
        ("demo.instances.v1", 1),
        ("demo.loads.v1", 1),
        ("demo.shares.v1", 1),
        ("demo.dead-letters.v1", 1),
    ]
    assert demo.by_name("demo.prompts.b.v1").policy == "b"
    assert demo.by_name("demo.prompts.b.v1").subject == "demo.prompts.b.v1-value"
    with pytest.raises(KeyError):
        demo.by_name("other.runs.v1")


def test_events_are_routed_by_type_and_policy() -> None:
    demo = Topics("demo", ["a"], partitions=4)
    prompt = GenerationRequested(
        task=12,
        sample=0,
        call="1",
        policy="a",
        sampling=Sampling(max_tokens=1),
        expires_at=1,
        digest=bytes(16),
    )
    assert demo.route(prompt) is demo.by_name("demo.prompts.a.v1")
    assert (prompt.key, prompt.event_id) == (b"12", "12/0/0/1")
    with pytest.raises(KeyError, match=r"demo\.prompts\.b\.v1"):
        demo.route(prompt.model_copy(update={"policy": "b"}))
    with pytest.raises(KeyError, match="no topic carries Event"):
        demo.route(events.Event.model_construct())


def test_a_digest_in_an_id_is_hexadecimal() -> None:
    published = events.PolicyPublished(
        policy="a", version=3, status="trained", digest=b"\xab" * 32, full_version=3
    )
    assert published.event_id == "a/3/" + "ab" * 32


def test_cancellations_by_two_tenants_of_one_task_id_are_two_events() -> None:
    """Each counts for its own tenant's task, so none may hide the other from who reads by ids."""
    tenants = ("search", "support", None)
    cancelled = [events.TaskCancelled(source="s", task_id="t", tenant=one) for one in tenants]
    assert [one.event_id for one in cancelled] == ["s/t/search", "s/t/support", "s/t"]
    assert {one.key for one in cancelled} == {b"s/t"}


@pytest.mark.parametrize(("topic", "policy"), [(topics.PROMPTS, None), (topics.RUNS, "a")])
def test_a_policy_is_named_exactly_if_the_topic_has_one(
    topic: topics.Topic[TaskEnded], policy: str | None
) -> None:
    with pytest.raises(ValueError, match=f"topic {topic.name} "):
        topic.real_name("demo", policy)


@pytest.mark.parametrize("name", ["", "A", "a.b", "-a", "a b", "a\n", "x" * 64, "é"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't be a name"):
        Topics(name, [], 1)
    with pytest.raises(ValueError, match="can't be a name"):
        Topics("demo", [name], 1)


def test_a_name_on_the_broker_tells_its_row() -> None:
    for topic in Topics("some-run", ("default", "judge"), 3):
        assert topics.topic_of(topic.name) is topic.topic
    for name in (
        "runs",
        "a.runs.v2",
        "a.runs.default.v1",
        "a.batches.v1",
        "a.nope.v1",
        "",
        "a.b.c",
    ):
        with pytest.raises(KeyError):
            topics.topic_of(name)
