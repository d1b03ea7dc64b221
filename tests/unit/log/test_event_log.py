"""The typed log: headers and traces, dead letters, fetching by reference."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import aclosing
from typing import Any

import pytest
from prometheus_client import REGISTRY

from headrace.errors import DecodeError, RecordsLost
from headrace.schemas.codec import Codec, avsc
from headrace.schemas.events import Failure, ObservationRecorded, RunStateEntered, TaskEnded
from headrace.schemas.topics import DEAD_LETTERS, OBSERVATIONS, RUNS, Topics
from headrace.services.base.redactor import REDACTOR
from headrace.services.kafka.broker import MAX_MESSAGE_BYTES, Outgoing, Partition, Record
from headrace.services.log.dead_letter import MAX_KEPT_HEADERS, WHY
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.log.trace import enter_trace
from tests.unit.log.log_bench import RUNS_PARTITION, TOPICS, Bench, run, started


def test_a_record_says_what_it_is_in_its_headers() -> None:
    async def test(bench: Bench) -> None:
        ref = await bench.log.send(started())
        (record,) = await bench.records(RUNS_PARTITION)
        headers = dict(record.headers)
        trace = headers.pop("traceparent").decode()
        assert headers == {
            "ce_specversion": b"1.0",
            "ce_source": b"writer-1",
            "ce_id": b"run-0/started",
            "ce_type": b"headrace.RunStateEntered",
            "content-type": b"application/avro",
        }
        version, trace_id, span_id, flags = trace.split("-")
        assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "01")
        assert (record.key, ref.offset) == (b"run-0", record.offset)

    run(test)


def test_only_what_no_turn_waits_for_may_be_gathered() -> None:
    gathered = {one.topic.name for one in TOPICS if one.topic.gathered}
    assert gathered == {"trajectories", "outcomes", "results", "turns", "groups"}

    async def test(bench: Bench) -> None:
        result = TaskEnded(
            task=1, source="s", task_id="1", item_id="1", closed_by="refused", outcomes=()
        )
        assert bench.log.outgoing(result).gathered
        assert not bench.log.outgoing(started()).gathered

    run(test)


def test_what_an_event_causes_continues_its_trace() -> None:
    async def test(bench: Bench) -> None:
        async def send(parent: Delivery[Any] | None) -> list[str]:
            if parent is not None:
                enter_trace(parent.traceparent)
            await bench.log.send(started())
            record = (await bench.records(RUNS_PARTITION))[-1]
            return dict(record.headers)["traceparent"].decode().split("-")

        first = await asyncio.create_task(send(None))
        (record,) = await bench.records(RUNS_PARTITION)
        delivery = await bench.log.decode(record)
        caused = await asyncio.create_task(send(delivery))
        foreign = await asyncio.create_task(send(None))
        assert caused[1] == first[1]
        assert caused[2] != first[2]
        assert foreign[1] != first[1]

    run(test)


@pytest.mark.parametrize("header", [b"", b"\xff\xfe", b"nonsense", b"00-short-1-1"])
def test_a_trace_that_is_none_begins_a_new_one(header: bytes) -> None:
    async def test(bench: Bench) -> None:
        value = bench.log.outgoing(started()).value
        record = await bench.put(value, headers=[("traceparent", header)])
        enter_trace((await bench.log.decode(record)).traceparent)
        sent = dict(bench.log.outgoing(started()).headers)["traceparent"]
        assert len(sent) == len("00-") + 32 + 1 + 16 + len("-01")

    run(test)


def test_no_secret_is_in_a_record_except_in_the_recipe() -> None:
    async def test(bench: Bench) -> None:
        REDACTOR.add("LOG", "log-canary-1234")
        failure = Failure(origin="operator", code="x", message="no log-canary-1234!")
        observed = ObservationRecorded(
            task=1, sample=0, call="1", index=0, digest=bytes(16),
            text="log-canary-1234", data='{"log-canary-1234": ["log-canary-1234"]}',
            instance="i", failure=failure,
        )  # fmt: skip
        record = bench.log.outgoing(observed)
        partition = TOPICS.partitions_of(OBSERVATIONS)[0]
        assert b"canary" not in record.value
        delivery = await bench.log.decode(
            Record(partition, 0, 0.0, record.key, record.value, record.headers)
        )
        event = delivery.event
        assert isinstance(event, ObservationRecorded)
        assert (event.task, event.text) == (1, "[secret LOG]")
        assert event.data == '{"[secret LOG]": ["[secret LOG]"]}'
        assert event.failure == failure.model_copy(update={"message": "no [secret LOG]!"})
        # A recipe with another text would have another digest.
        run = started().model_copy(update={"recipe": "log-canary-1234"})
        assert b"log-canary-1234" in bench.log.outgoing(run).value

    run(test)


def test_a_dead_letter_is_the_record_whole_and_says_where_it_lay_and_why() -> None:
    async def test(bench: Bench) -> None:
        record = await bench.put(b"\x07garbage", headers=[("theirs", b"kept")])
        assert await bench.log.decode_or_dead_letter(record) is None
        (dead,) = await bench.records(TOPICS.partition(DEAD_LETTERS))
        assert (dead.key, dead.value) == (b"key", b"\x07garbage")
        headers = dict(dead.headers)
        assert headers.pop("theirs") == b"kept"
        assert headers.pop("__connect.errors.exception.message").startswith(b"no Confluent framing")
        assert headers == {
            "__connect.errors.topic": RUNS_PARTITION.topic.encode(),
            "__connect.errors.partition": b"0",
            "__connect.errors.offset": b"0",
            "__connect.errors.connector.name": b"writer-1",
            "__connect.errors.stage": b"VALUE_CONVERTER",
        }

    run(test)


@pytest.mark.parametrize(
    "changed",
    [
        {"value": b"\xff" * (MAX_MESSAGE_BYTES + 1)},
        {"key": b"k" * (MAX_MESSAGE_BYTES // 2), "value": b"\xff" * (MAX_MESSAGE_BYTES // 2)},
        {"headers": [("large", bytes(MAX_MESSAGE_BYTES))]},
        {"headers": [("", b"")] * (MAX_KEPT_HEADERS + 1)},
    ],
    ids=["value", "key", "header", "headers"],
)
def test_the_dead_letter_of_a_record_that_is_too_large_says_only_where_it_lies(
    changed: dict[str, Any],
) -> None:
    async def test(bench: Bench) -> None:
        record = Record(RUNS_PARTITION, 4, 0.0, b"key", b"garbage", [])
        assert await bench.log.decode_or_dead_letter(record._replace(**changed)) is None
        (dead,) = await bench.records(TOPICS.partition(DEAD_LETTERS))
        assert (dead.key, dead.value) == (b"", b"")
        headers = {name.removeprefix(WHY): text for name, text in dead.headers}
        assert headers.pop("exception.message")
        assert (headers.pop("topic"), headers.pop("offset")) == (
            RUNS_PARTITION.topic.encode(),
            b"4",
        )
        assert len(headers) == 3

    run(test)


def test_a_tombstone_is_a_dead_letter_too() -> None:
    async def test(bench: Bench) -> None:
        record = Record(RUNS_PARTITION, 4, 0.0, None, None, [])
        assert await bench.log.decode_or_dead_letter(record) is None
        (dead,) = await bench.records(TOPICS.partition(DEAD_LETTERS))
        assert dict(dead.headers)["__connect.errors.exception.message"].startswith(b"a tombstone")

    run(test)


def test_foreign_topics_and_dead_letters_hold_no_events() -> None:
    async def test(bench: Bench) -> None:
        for topic in ("other.runs.v1", TOPICS.name(DEAD_LETTERS)):
            value = bench.log.outgoing(started()).value
            with pytest.raises(DecodeError):
                await bench.log.decode(Record(Partition(topic, 0), 0, 0.0, b"", value, []))

    run(test)


def test_an_unknown_writers_schema_is_asked_of_the_registry() -> None:
    async def test(bench: Bench) -> None:
        older = json.loads(json.dumps(avsc(RunStateEntered)))
        older["fields"] = [field for field in older["fields"] if field["name"] != "versions"]
        schema_id = bench.registry.register("elsewhere", json.dumps(older))
        codec = Codec()
        codec.add_schema(schema_id, json.dumps(older))
        value = bench.log.outgoing(started()).value
        assert value.endswith(b"\0")  # the empty `versions` that the older schema lacks
        foreign = b"\0" + schema_id.to_bytes(4, "big") + value[5:-1]
        delivery = await bench.log.decode(await bench.put(foreign))
        assert delivery.event == started()

    run(test)


def test_a_schema_that_nobody_knows_is_a_dead_letter() -> None:
    async def test(bench: Bench) -> None:
        value = bench.log.outgoing(started()).value
        unknown = await bench.put(b"\0" + (999).to_bytes(4, "big") + value[5:])
        with pytest.raises(DecodeError, match="999 is not known"):
            await bench.log.decode(unknown)

    run(test)


def test_references_are_fetched_in_the_order_asked_and_their_digests_checked() -> None:
    async def test(bench: Bench) -> None:
        refs = [await bench.log.send(started(number)) for number in range(3)]
        fetched = await bench.log.fetch([refs[2], refs[0], refs[2]])
        assert fetched == [started(2), started(0), started(2)]
        with pytest.raises(RecordsLost, match="its digest differs"):
            await bench.log.fetch([refs[0].model_copy(update={"digest": bytes(16)})])
        bench.cluster.expire(RUNS_PARTITION, 1)
        with pytest.raises(RecordsLost):
            await bench.log.fetch([refs[0]])

    run(test)


def test_a_reference_may_lead_into_a_namespace_that_the_log_may_read() -> None:
    async def test(bench: Bench) -> None:
        other = Topics("other", ("default",), 2, reads_from=["unit"])
        await bench.broker.create_topics({t.name: (t.partitions, {}) for t in other})
        ref = await bench.log.send(started(7))
        codec = Codec()
        bench.registry.prepare(codec, other)
        reader = EventLog(bench.broker, other, codec, bench.registry, "replay")
        assert await reader.fetch([ref]) == [started(7)]
        with pytest.raises(DecodeError, match=r"reads_from.* does not name the namespace 'other'"):
            await bench.log.fetch([ref.model_copy(update={"topic": other.name(RUNS)})])

        position = await bench.broker.send(Outgoing(other.name(DEAD_LETTERS), b"", b"x"))
        digest = hashlib.sha256(b"x").digest()[:16]
        foreign = ref.model_copy(
            update={"topic": position.partition.topic, "offset": position.offset, "digest": digest}
        )
        with pytest.raises(DecodeError, match="holds no events"):
            await reader.fetch([foreign])

    run(test)


def test_a_reference_that_leads_nowhere_is_lost_and_not_waited_for() -> None:
    async def test(bench: Bench) -> None:
        ref = await bench.log.send(started())
        nowhere = {"topic": "nowhere.trajectories.v1"}
        reader = EventLog(
            bench.broker, Topics("unit", ("default",), 2, ["nowhere"]), Codec(), bench.registry, "r"
        )
        for changes in (
            {"partition": 99}, {"partition": 2**31 - 1}, {"offset": ref.offset + 1},
            {"offset": 10**9}, nowhere,
        ):  # fmt: skip
            with pytest.raises(RecordsLost):
                await reader.fetch([ref, ref.model_copy(update=changes)])
        for topic in ("1", "", "run-0.trajectories", "__consumer_offsets"):
            with pytest.raises(DecodeError, match="not a topic of Headrace"):
                await bench.log.fetch([ref.model_copy(update={"topic": topic})])

    run(test)


def test_a_log_that_only_reads_leaves_no_trace() -> None:
    async def test(bench: Bench) -> None:
        await bench.put(b"garbage")
        await bench.log.send(started())
        looking = EventLog(bench.broker, TOPICS, Codec(), bench.registry, "looker", read_only=True)
        async with aclosing(read_events(looking, {RUNS_PARTITION: WHOLE})) as deliveries:
            assert [one.event async for one in deliveries] == [started()]
        assert await bench.records(TOPICS.partition(DEAD_LETTERS)) == []

    run(test)


def test_an_alert_sees_the_first_dead_letter() -> None:
    """The increase of a series that begins with 1 is 0, so it must begin with 0."""

    async def test(bench: Bench) -> None:
        topics = Topics("sees-first", ("default",), 2)
        labels = {"topic": topics.name(RUNS)}
        EventLog(bench.broker, topics, Codec(), bench.registry, "looker", read_only=True)
        assert REGISTRY.get_sample_value("headrace_dead_letters_total", labels) is None
        EventLog(bench.broker, topics, Codec(), bench.registry, "worker")
        assert REGISTRY.get_sample_value("headrace_dead_letters_total", labels) == 0.0

    run(test)
