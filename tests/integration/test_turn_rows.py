"""A run writes its turns as rows that Confluent's deserializer reads without any unpacking."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow.parquet
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from headrace.infra import local
from tests.integration.test_other_teams import headrace, read_all

NAMESPACE = "exported"


def first_of(stack: local.LocalStack, registry: SchemaRegistryClient, topic: str) -> dict[str, Any]:
    """The first record of each id in a topic."""
    deserialize = AvroDeserializer(registry)
    context = SerializationContext(topic, MessageField.VALUE)
    found: dict[str, Any] = {}
    for message in read_all(stack.bootstrap_servers, topic):
        name = dict(message.headers())["ce_id"].decode()
        found.setdefault(name, deserialize(message.value(), context))
    return found


def test_a_run_writes_its_turns_as_rows(
    tmp_path: Path, local_stack: local.LocalStack, exported: dict[str, str]
) -> None:
    with SchemaRegistryClient({"url": local_stack.registry_url}) as registry:
        rows = first_of(local_stack, registry, f"{NAMESPACE}.turns.v1")
        results = first_of(local_stack, registry, f"{NAMESPACE}.results.v1")
        groups = first_of(local_stack, registry, f"{NAMESPACE}.groups.default.v1")
        trajectories = first_of(local_stack, registry, f"{NAMESPACE}.trajectories.v1")
    done = {one["task"] for one in rows.values()}
    assert len(done) >= 2
    complete = 0
    for result in results.values():
        for outcome in result["outcomes"]:
            name = f"{outcome['task']}/{outcome['sample']}/{outcome['attempt']}"
            if outcome["task"] not in done or outcome["trajectory"] is None:
                continue
            turns = trajectories[name]["turns"]
            # The last task may be half written: the run has ended meanwhile.
            mine = [rows[row] for n in range(len(turns)) if (row := f"{name}/{n}/0") in rows]
            complete += len(mine) == len(turns)
            for row, turn in zip(mine, turns, strict=False):
                assert len(row["tokens"]) == len(row["logprobs"]) == len(turn["tokens"]) // 4
                assert len(row["versions"]) == len(row["tokens"])
                assert row["context_text"]
                assert (row["reward"], row["ending"]) == (outcome["reward"], outcome["ending"])
    assert complete >= 2
    learned = {
        (group["task"], sample["sample"]): struct.unpack("<f", sample["advantages"])[0]
        for group in groups.values()
        for sample in group["samples"]
    }
    for row in rows.values():
        if f"{row['task']}/default" in groups:
            assert row["advantage"] == learned.get((row["task"], row["sample"]))
    check_exports(tmp_path, exported, trajectories, list(results.values()))
    check_conversations(tmp_path / "sft.jsonl", exported, list(rows.values()))


def check_exports(
    folder: Path,
    environment: dict[str, str],
    trajectories: dict[str, Any],
    results: list[dict[str, Any]],
) -> None:
    """The files have all turns that count, and Parquet holds what JSON lines hold."""
    lines, table = folder / "rows.jsonl", folder / "rows.parquet"
    headrace(("trajectories", "--format", "jsonl", "--to", str(lines)), environment)
    headrace(("trajectories", "--format", "parquet", "--to", str(table)), environment)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    names = [
        f"{one['task']}/{one['sample']}/{one['attempt']}"
        for result in results
        for one in result["outcomes"]
        if one["trajectory"] is not None
    ]
    assert len(rows) == sum(len(trajectories[name]["turns"]) for name in names)
    columns = pyarrow.parquet.read_table(table).to_pylist(maps_as_pydicts="strict")
    assert len(columns) == len(rows)
    for one, other in zip(columns, rows, strict=True):
        for time in ("started", "ended"):
            assert round(one.pop(time).timestamp() * 1000) == other.pop(time)
        assert one == other
    assert sorted(path.name for path in folder.glob("*rows*")) == [lines.name, table.name]


def check_conversations(
    file: Path, environment: dict[str, str], rows: list[dict[str, Any]]
) -> None:
    """The messages are those of the agent, without the markup that the rows' texts have."""
    headrace(("trajectories", "--format", "sft", "--passing", "0", "--to", str(file)), environment)
    found = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert len(found) >= 2
    for messages in found:
        assert messages[0] == {"role": "system", "content": "Go."}
        roles = [message["role"] for message in messages[1:]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        for message in messages[1:]:
            assert len(message["content"]) == 1
            assert (message["content"] in "LDRU") == (message["role"] == "assistant")
    assert any("Go." in (row["context_text"] or "") for row in rows)
    assert all(row["context_text"] != "Go." for row in rows)
