"""A judge of another team: Confluent's client, fastavro and a registry, nothing of Headrace's.

Reads the actions of a namespace, answers the scores that are asked of `jury`, and commits behind
each answer. Says so in a line each.

    python foreign_judge.py BOOTSTRAP_SERVERS REGISTRY_URL NAMESPACE
"""

import io
import json
import struct
import sys
import urllib.request
from functools import cache
from typing import Any

import fastavro
from confluent_kafka import Consumer, Producer

servers, registry, namespace = sys.argv[1:]
ACTIONS, OBSERVATIONS = f"{namespace}.actions.v1", f"{namespace}.observations.v1"


@cache
def ask_registry(path: str) -> Any:
    with urllib.request.urlopen(f"{registry}/{path}", timeout=30) as answer:
        return json.load(answer)


@cache
def schema(schema_id: int) -> Any:
    return fastavro.parse_schema(json.loads(ask_registry(f"schemas/ids/{schema_id}")["schema"]))


def decode(value: bytes) -> Any:
    (schema_id,) = struct.unpack(">I", value[1:5])
    return fastavro.schemaless_reader(io.BytesIO(value[5:]), schema(schema_id), None)


def encode(topic: str, event: dict[str, Any]) -> bytes:
    newest = ask_registry(f"subjects/{topic}-value/versions/latest")
    body = io.BytesIO()
    fastavro.schemaless_writer(body, schema(newest["id"]), event)
    return b"\x00" + struct.pack(">I", newest["id"]) + body.getvalue()


def judge(payload: dict[str, str]) -> float:
    """The share of vowels."""
    said = payload["said"]
    return sum(letter in "aeiou" for letter in said) / max(1, len(said))


consumer = Consumer(
    {
        "bootstrap.servers": servers,
        "group.id": "the-jury",
        "group.instance.id": "the-jury-1",  # started again, it need not wait to be missed first
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
)
producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
consumer.subscribe([ACTIONS])
while True:
    message = consumer.poll(1.0)
    if message is None:
        continue
    if message.error() is not None:
        raise SystemExit(str(message.error()))
    value, partition = message.value(), message.partition()
    assert value is not None
    assert partition is not None
    action = decode(value)
    if action["kind"] != "score" or action["environment"]["use"] != "jury":
        continue
    echoed = ("task", "sample", "attempt", "call", "index", "digest")
    answer = {name: action[name] for name in echoed}
    answer["reward"] = judge(json.loads(action["payload"]))
    # The same key, to the same partition: there the agent reads.
    producer.produce(OBSERVATIONS, encode(OBSERVATIONS, answer), message.key(), partition)
    if producer.flush(30):
        raise SystemExit("the answer was not written")
    consumer.commit(message=message, asynchronous=False)
    print("answered", action["task"], action["sample"], flush=True)
