"""The contract of a namespace has every topic, and its examples are records that can be read."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pytest

from headrace.schemas.codec import Codec, avsc
from headrace.schemas.events import EVENTS, Event
from headrace.schemas.topics import RETENTION_MS, TOPICS
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.asyncapi.contract_document import contract_document
from headrace.services.operate.asyncapi.example_events import EXAMPLES
from headrace.services.operate.asyncapi.security_schemes import (
    security_schemes,
    without_secret,
)

RECIPE = read_recipe("quickstart")
TOPICS_HERE = topics_of(RECIPE, "exp-7")


def document() -> Any:
    return json.loads(json.dumps(contract_document(TOPICS_HERE, RECIPE, ClusterConfig())))


def of_json(schema: Any, value: Any, named: dict[str, Any]) -> Any:
    """The value that Avro's JSON encoding has here. fastavro's reader fails for records in maps."""
    if isinstance(schema, list):
        if value is None:
            return None
        ((branch, value),) = value.items()
        (schema,) = (one for one in schema if name_of(one) == branch)
    schema = named.get(schema, schema) if isinstance(schema, str) else schema
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind in ("record", "enum", "fixed"):
        named[schema["name"]] = schema
    match kind:
        case "record":
            assert set(value) == {field["name"] for field in schema["fields"]}
            return {
                field["name"]: of_json(field["type"], value[field["name"]], named)
                for field in schema["fields"]
            }
        case "array":
            return [of_json(schema["items"], one, named) for one in value]
        case "map":
            return {name: of_json(schema["values"], one, named) for name, one in value.items()}
        case "bytes" | "fixed":
            return value.encode("latin-1")
    return value


def name_of(schema: Any) -> str:
    """The name of a branch of a union."""
    if isinstance(schema, str):
        return schema if schema[0].islower() else f"headrace.{schema}"
    return f"headrace.{schema['name']}" if "name" in schema else str(schema["type"])


def test_every_topic_is_a_channel_with_its_settings() -> None:
    channels = {one["address"]: one for one in document()["channels"].values()}
    assert set(channels) == {topic.name for topic in TOPICS_HERE}
    for topic in TOPICS_HERE:
        channel = channels[topic.name]
        kafka = channel["bindings"]["kafka"]
        assert kafka["partitions"] == topic.partitions
        assert channel["x-owner"] == topic.topic.writer
        kept_ms = RETENTION_MS[topic.topic.kept]
        assert channel["x-retention-ms"] == kept_ms
        assert kafka["topicConfiguration"]["retention.ms"] == kept_ms


def test_every_event_has_the_schema_that_is_registered() -> None:
    messages = document()["components"]["messages"]
    assert set(messages) == {event.__name__ for event in EVENTS} | {"DeadLetter"}
    for event in EVENTS:
        assert messages[event.__name__]["payload"]["schema"] == avsc(event)


def test_other_teams_write_what_the_table_of_topics_says() -> None:
    operations = document()["operations"]
    receive = {name for name, one in operations.items() if one["action"] == "receive"}
    assert receive == {f"receive_{one.name}" for one in TOPICS if one.writer == "any team"}
    assert len(operations) == len(list(TOPICS_HERE))


@pytest.mark.parametrize(
    "event_type", dict.fromkeys(type(event) for _, event in EXAMPLES), ids=lambda one: one.__name__
)
def test_examples_are_records(event_type: type[Event]) -> None:
    examples = document()["components"]["messages"][event_type.__name__]["examples"]
    events = [event for _, event in EXAMPLES if type(event) is event_type]
    for example, event in zip(examples, events, strict=True):
        fields = of_json(avsc(event_type), example["payload"], {})
        body = io.BytesIO()
        fastavro.schemaless_writer(body, avsc(event_type), fields)
        codec = Codec()
        codec.register(event_type, 7)
        assert codec.decode(event_type, b"\0\0\0\0\x07" + body.getvalue()) == event
        assert example["headers"]["ce_id"] == event.event_id


def test_there_are_examples_of_all_that_other_teams_write() -> None:
    written = {one.event for one in TOPICS if one.writer == "any team"}
    assert written <= {type(event) for _, event in EXAMPLES}


@pytest.mark.parametrize(
    ("properties", "kinds"),
    [
        ({}, []),
        ({"security.protocol": "ssl"}, []),
        ({"security.protocol": "SSL", "ssl.certificate.location": "c"}, ["X509"]),
        ({"security.protocol": "SASL_SSL", "sasl.mechanisms": "SCRAM-SHA-256"}, ["scramSha256"]),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "AWS_MSK_IAM"}, []),
    ],
)
def test_properties_mean_schemes(properties: dict[str, str], kinds: list[str]) -> None:
    assert [one["type"] for one in security_schemes(properties).values()] == kinds


@pytest.mark.parametrize(
    "url",
    [
        "http://registry:8081/apis/ccompat/v7",
        "http://me:secret@registry:8081/apis/ccompat/v7",
        "http://me:sec/ret@registry:8081/apis/ccompat/v7",
        "http://me:sec,ret@registry:8081/apis/ccompat/v7",
        "http://me:sec#r?e@t@registry:8081/apis/ccompat/v7",
        "http://me:secret@registry:8081/apis/ccompat/v7, https://me:secret@other:8081",
        "http://registry:8081/apis/ccompat/v7?key=secret#secret",
    ],
)
def test_an_address_loses_its_secrets(url: str) -> None:
    assert without_secret(url) == "http://registry:8081/apis/ccompat/v7"


def test_an_address_without_a_scheme_loses_its_secrets() -> None:
    assert without_secret("me:secret@registry:8081/path") == "registry:8081/path"
