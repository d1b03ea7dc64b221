"""The schema registry, real and in memory, and what the real one alone does."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from headrace.errors import DependencyError, UsageError
from headrace.schemas.codec import Codec, avsc
from headrace.schemas.events import (
    EVENTS,
    EpisodeEnded,
    Ref,
    RunStateEntered,
    TaskEnded,
    TaskSubmitted,
)
from headrace.schemas.topics import Topics
from headrace.services.kafka.registry import Registry
from headrace.services.kafka.schema_registry import SchemaRegistry
from tests.memory.memory_registry import MemoryRegistry

RUN_STATE = json.dumps(avsc(RunStateEntered))


@pytest.fixture(params=["memory", "real"])
def registry(request: pytest.FixtureRequest) -> Iterator[SchemaRegistry]:
    if request.param == "memory":
        yield MemoryRegistry()
        return
    real = Registry(request.getfixturevalue("registry_url"))
    yield real
    real.close()


@pytest.fixture
def real(registry_url: str) -> Iterator[Registry]:
    made = Registry(registry_url)
    yield made
    made.close()


@pytest.fixture
def subject() -> str:
    return f"test.{uuid.uuid4()}.v1-value"


def changed(*more: dict[str, Any], without: str = "") -> str:
    schema = avsc(RunStateEntered)
    fields = [field for field in schema["fields"] if field["name"] != without]
    return json.dumps(schema | {"fields": [*fields, *more]})


def test_registering_twice_gives_one_id(registry: SchemaRegistry, subject: str) -> None:
    schema_id = registry.register(subject, RUN_STATE)
    assert registry.register(subject, RUN_STATE) == schema_id
    assert registry.lookup(subject, RUN_STATE) == schema_id


def test_what_is_not_registered_is_not_found(registry: SchemaRegistry, subject: str) -> None:
    assert registry.lookup(subject, RUN_STATE) is None
    registry.register(subject, RUN_STATE)
    assert registry.lookup(subject, json.dumps(avsc(TaskEnded))) is None
    for unknown in (2_000_000_000, 2**31, 2**32 - 1):
        assert registry.schema(unknown) is None


@pytest.mark.parametrize("event_type", EVENTS, ids=lambda event_type: event_type.__name__)
def test_every_event_s_schema_comes_back(registry: SchemaRegistry, event_type: Any) -> None:
    text = json.dumps(avsc(event_type))
    schema_id = registry.register(f"{event_type.__name__}-{uuid.uuid4()}", text)
    for _ in range(2):
        found = registry.schema(schema_id)
        assert found is not None
        assert json.loads(found) == avsc(event_type)


def test_what_is_no_schema_is_refused(registry: SchemaRegistry, subject: str) -> None:
    with pytest.raises(UsageError, match=subject):
        registry.register(subject, "{")


def test_a_namespace_is_prepared_once(registry: SchemaRegistry) -> None:
    topics = Topics(f"n{uuid.uuid4().hex[:8]}", ["a", "b"], partitions=2)
    outcome = EpisodeEnded(task=1, sample=0, item_id="i", ending="finished")
    event = TaskEnded(
        task=1, source="s", task_id="t", item_id="i", closed_by="all", outcomes=(outcome,)
    )
    values = []
    for _ in range(2):
        codec = Codec()
        registry.prepare(codec, topics)
        values.append(codec.encode(event))
        assert codec.decode(TaskEnded, values[0]) == event
    assert values[0] == values[1]
    for placed in topics:
        if placed.topic.event is not None:
            assert registry.lookup(placed.subject, json.dumps(avsc(placed.topic.event)))


def test_a_compatible_change_is_taken(real: Registry, subject: str) -> None:
    first = real.register(subject, RUN_STATE)
    later = changed({"name": "new", "type": "int", "default": 0}, without="reason")
    assert real.register(subject, later) != first


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (changed({"name": "new", "type": "int"}), "new at /fields"),
        (changed({"name": "digest", "type": "string"}, without="digest"), "digest|STRING"),
    ],
    ids=["a field without default", "another type"],
)
def test_an_incompatible_change_is_refused(
    real: Registry, subject: str, change: str, what: str
) -> None:
    real.register(subject, RUN_STATE)
    with pytest.raises(UsageError, match=what) as raised:
        real.register(subject, change)
    assert subject in str(raised.value)
    assert "give new fields a default" in str(raised.value)
    assert real.lookup(subject, change) is None


def test_a_change_must_fit_all_earlier_schemas(real: Registry, subject: str) -> None:
    """A field that came with a default and loses it reads its own writer, not the first."""
    real.register(subject, RUN_STATE)
    real.register(subject, changed({"name": "new", "type": "int", "default": 0}))
    with pytest.raises(UsageError, match="new at /fields"):
        real.register(subject, changed({"name": "new", "type": "int"}))


def test_confluent_s_own_deserializer_reads_what_the_codec_wrote(
    real: Registry, registry_url: str, subject: str
) -> None:
    codec = Codec()
    codec.register(EpisodeEnded, real.register(subject, json.dumps(avsc(EpisodeEnded))))
    event = EpisodeEnded(
        task=1,
        sample=2,
        item_id="i",
        ending="finished",
        trajectory=Ref(topic="t", partition=1, offset=2**40, digest=bytes(range(16))),
        rewards={"won": 1.0},
    )
    client = SchemaRegistryClient({"url": registry_url})
    context = SerializationContext("t", MessageField.VALUE)
    read = AvroDeserializer(client)(codec.encode(event), context)
    client.close()
    assert EpisodeEnded.model_validate(read) == event


def test_the_codec_reads_by_a_schema_from_the_registry(real: Registry, subject: str) -> None:
    writing, reading = Codec(), Codec()
    event = TaskSubmitted(
        source="s",
        task_id="t",
        item_id="i",
        agent="default",
        roles={},
        max_turns=1,
        max_tokens=1,
        deadline_s=1,
    )
    schema_id = real.register(subject, json.dumps(avsc(TaskSubmitted)))
    writing.register(TaskSubmitted, schema_id)
    reading.add_schema(schema_id, real.schema(schema_id) or "")
    assert reading.decode(TaskSubmitted, writing.encode(event)) == event


def test_an_id_given_out_later_is_found(
    real: Registry, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.services.kafka.registry.UNKNOWN_FOR_S", 0.0)
    newest = real.register(subject, changed({"name": "a", "type": "int", "default": 0}))
    upcoming = range(newest + 1, newest + 1_000)
    real.schema(upcoming[0])
    added = {"name": f"f{uuid.uuid4().hex}", "type": "int", "default": 0}
    schema_id = real.register(f"other-{subject}", changed(added))
    assert schema_id in upcoming
    assert real.schema(schema_id) is not None


def test_answers_are_kept(registry_url: str, subject: str) -> None:
    registry = Registry(registry_url)
    schema_id = registry.register(subject, RUN_STATE)
    known, unknown = registry.schema(schema_id), registry.schema(2_000_000_000)
    registry.close()
    assert registry.schema(schema_id) == known is not None
    assert registry.schema(2_000_000_000) is unknown is None


def test_what_another_client_knows_is_not_requested_again(registry_url: str, subject: str) -> None:
    first, other = Registry(registry_url), f"other-{subject}"
    schema_id = first.register(subject, RUN_STATE)
    assert first.lookup(other, RUN_STATE) is None
    first.close()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        second = Registry(f"http://127.0.0.1:{closed.getsockname()[1]}", first.known)
        assert second.lookup(subject, RUN_STATE) == schema_id
        changed_schema = changed({"name": "more", "type": "int", "default": 0})
        for unknown in ((other, RUN_STATE), (subject, changed_schema)):
            with pytest.raises(DependencyError):
                second.lookup(*unknown)
        second.close()


def test_a_registry_out_of_reach_is_named_without_its_password() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        registry = Registry(f"http://user:secret@127.0.0.1:{port}/path")
        for ask in (
            lambda: registry.schema(1),
            lambda: registry.lookup("s", RUN_STATE),
            lambda: registry.register("s", RUN_STATE),
        ):
            with pytest.raises(DependencyError, match=f"http://127.0.0.1:{port}/path") as raised:
                ask()
            assert "secret" not in str(raised.value)
            assert "headrace up" in str(raised.value)
        registry.close()


@pytest.mark.parametrize("password", ["a@zq", "a/zq", "a,zq", "a?zq", "1#zq", "1/z@zq"])
def test_no_error_shows_a_password(password: str) -> None:
    with pytest.raises((UsageError, DependencyError)) as raised:
        Registry(f"http://me:{password}@127.0.0.1:1,http://me:{password}@127.0.0.1:2").schema(1)
    assert "zq" not in str(raised.value)
    assert "http://127.0.0.1:1,http://127.0.0.1:2" in str(raised.value)
    assert "%2F" in str(raised.value) or "headrace up" in str(raised.value)


@pytest.mark.parametrize("path", ["/", "/apis/ccompat/v9", "/apis/registry/v3"])
def test_a_wrong_path_is_said_to_be_one(registry_url: str, path: str) -> None:
    registry = Registry(registry_url.removesuffix("/apis/ccompat/v7") + path)
    for ask in (lambda: registry.schema(1), lambda: registry.lookup("s", RUN_STATE)):
        with pytest.raises(UsageError, match="Check the path of the URL"):
            ask()
    registry.close()


@pytest.mark.parametrize("text", ["", "ftp://host", "host:8081"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not the URL of a schema registry"):
        Registry(text)
