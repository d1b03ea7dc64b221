"""Other teams at the topics of a running run: what they write wrongly, and what they read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from headrace.infra import local
from headrace.schemas.topics import (
    AUDIT,
    DEAD_LETTERS,
    INSTANCES,
    LIMITS,
    MAX_RECORD_BYTES,
    SHARES,
    TOPICS,
    TURNS,
    WAITING,
)
from headrace.schemas.topics import Topic as TopicRow
from tests.commands import cluster_variables, run_command

RECIPE = (
    *("quickstart", "--set", "stop.versions=3", "--set", "stop.reward=9"),
    *("--set", "policies.default.batches.groups=1"),
)
UNKNOWN_ID = b"\x00\x7f\xff\xff\xff"
GARBAGE = {
    "bytes": b"\xffgarbage",
    "empty": b"",
    "schema id": UNKNOWN_ID + b"payload",
    "cut": b"\x00\x00",
}


def headrace(arguments: tuple[str, ...], environment: dict[str, str]) -> str:
    done = run_command(arguments, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


UNREAD = (
    DEAD_LETTERS.name,
    INSTANCES.name,
    WAITING.name,
    LIMITS.name,
    AUDIT.name,
    SHARES.name,
    TURNS.name,
)
"""What no service consumes here: no task waits for long, no limit of calls is set, and no job
writes rows of turns."""


def name_of(topic: TopicRow[Any], namespace: str) -> str:
    return topic.real_name(namespace, "default" if topic.per_policy else None)


def write_garbage(servers: str, namespace: str) -> int:
    """Garbage of every kind into every topic of events, and a tombstone; returns how many."""
    producer = Producer({"bootstrap.servers": servers, "message.max.bytes": 2 * MAX_RECORD_BYTES})
    written = 0
    for topic in TOPICS:
        if topic.name in UNREAD:
            continue
        for value in (*GARBAGE.values(), None):
            producer.produce(name_of(topic, namespace), value, b"0", partition=0)
            written += 1
    large = b"\xff" * (MAX_RECORD_BYTES - 1024)
    producer.produce(f"{namespace}.actions.v1", large, b"0", partition=0)
    assert producer.flush(30) == 0
    return written + 1


def write_foreign(
    servers: str, registry: SchemaRegistryClient, topic: str, *events: dict[str, Any]
) -> None:
    """Events by Confluent's own serializer."""
    latest = registry.get_latest_version(f"{topic}-value")
    serialize = AvroSerializer(
        registry,
        latest.schema.schema_str,
        conf={"auto.register.schemas": False, "use.latest.version": True},
    )
    producer = Producer({"bootstrap.servers": servers})
    for event in events:
        value = serialize(event, SerializationContext(topic, MessageField.VALUE))
        producer.produce(topic, value, b"team")
    assert producer.flush(30) == 0


def a_task(task_id: str, **more: Any) -> dict[str, Any]:
    """A team's task, with what has no default alone."""
    sampling = {
        "max_tokens": 1,
        "stop_ids": b"",
        "allowed": b"",
    }  # fastavro writes no bytes default
    return {
        "source": "team",
        "task_id": task_id,
        "item_id": "1",
        "agent": "default",
        "roles": {"policy": {"policy": "default", "sampling": sampling}},
        "max_turns": 1,
        "max_tokens": 1,
        "deadline_s": 10,
        **more,
    }


def read_all(servers: str, topic: str) -> Iterator[Any]:
    """Every record of a topic that is there now."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "a-reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        numbers = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
        left = set(numbers)
        while left:
            message = consumer.poll(20)
            assert message is not None, f"{topic} came to no end"
            if message.error() is not None:
                left.discard(message.partition())
            else:
                yield message
    finally:
        consumer.close()


def test_garbage_is_parked_and_confluents_deserializer_reads_the_rest(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    with SchemaRegistryClient({"url": local_stack.registry_url}) as registry:
        run_among_others(tmp_path, local_stack, namespace, registry)


def run_among_others(
    state: Path,
    local_stack: local.LocalStack,
    namespace: str,
    registry: SchemaRegistryClient,
) -> None:
    servers = local_stack.bootstrap_servers
    environment = cluster_variables(local_stack, namespace, state)
    headrace(("apply", *RECIPE), environment)
    write_garbage(servers, namespace)
    cancelled = {"source": "team", "task_id": "2", "reason": "by its own team"}
    write_foreign(servers, registry, f"{namespace}.cancellations.v1", cancelled)
    quota = {"tenant": "team", "set_at": 1, "weight": 2.0}
    write_foreign(servers, registry, f"{namespace}.quotas.v1", quota)
    tasks = a_task("1", environment={"use": "not-there"}), a_task("2")
    write_foreign(servers, registry, f"{namespace}.tasks.v1", *tasks)

    summary = json.loads(headrace(("run", *RECIPE, "--json"), environment))
    assert summary["restarts"] == 0, summary

    deserialize = AvroDeserializer(registry)
    results: list[dict[str, Any]] = []
    for topic in TOPICS:
        if topic.name in UNREAD:
            continue
        name = name_of(topic, namespace)
        context = SerializationContext(name, MessageField.VALUE)
        values = [message.value() for message in read_all(servers, name)]
        events = [
            deserialize(value, context)
            for value in values
            if value and not value.startswith((b"\xff", UNKNOWN_ID)) and len(value) > 5
        ]
        assert events, f"{name} holds no event"
        if topic.name == "results":
            results = events
    theirs = {result["task_id"]: result for result in results if result["source"] == "team"}
    assert {name: one["closed_by"] for name, one in theirs.items()} == {
        "1": "refused",
        "2": "cancelled",
    }
    failure = theirs["1"]["outcomes"][0]["failure"]
    assert (failure["origin"], failure["code"]) == ("operator", "unknown_environment")
    assert "not-there" in failure["message"]
    failure = theirs["2"]["outcomes"][0]["failure"]
    assert (failure["code"], failure["message"]) == ("cancelled", "by its own team")

    letters = [
        ({key: value.decode() for key, value in message.headers() or ()}, message.value())
        for message in read_all(servers, f"{namespace}.dead-letters.v1")
    ]
    for name in ("tasks", "episodes", "actions", "observations", "generations", "results"):
        mine = [
            (headers["__connect.errors.exception.message"], value)
            for headers, value in letters
            if headers["__connect.errors.topic"] == f"{namespace}.{name}.v1"
        ]
        assert all(reason for reason, _ in mine)
        parked = {value for _, value in mine}
        assert set(GARBAGE.values()) <= parked, name
    assert any(len(value or b"") > MAX_RECORD_BYTES // 2 for _, value in letters)
    show_a_step(environment)


def show_a_step(environment: dict[str, str]) -> None:
    """The story of version 2, and of the first task that was trained on."""
    step = json.loads(headrace(("show", "version:2", "--json"), environment))
    assert step["publications"][-1]["writer"].startswith("trainer-")
    assert set(step["weights"].values()) == {True}, step["weights"]  # whole, and as a delta
    sample = step["samples"][0]
    assert (sample["gone"], sample["staleness"] <= 1) == ("", True)
    page = headrace(("show", f"{sample['task']}/{sample['sample']}"), environment)
    # A beginner may walk about until the limit of turns.
    endings = "finished|turn_limit"
    assert re.search(rf"episode {sample['task']}/{sample['sample']}: ({endings})\b", page), page
    assert "batch:default/2 trains on samples: " in page
    assert '{"action": ' in page
