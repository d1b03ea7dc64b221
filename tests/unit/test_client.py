"""The client finds the cluster as the commands do."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from headrace import AsyncClient, UsageError
from headrace.async_client import _ClientSession
from headrace.schemas.codec import Codec
from headrace.schemas.events import TaskEnded
from headrace.schemas.topics import Topics
from headrace.services.log.event_log import EventLog
from headrace.services.log.unpacked import Texts
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

ADDRESSES = {"HEADRACE_BOOTSTRAP_SERVERS": "b:9092", "HEADRACE_REGISTRY_URL": "http://r:8081"}


def set_all(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_arguments_the_variables_of_the_commands_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert AsyncClient()._cluster == ClusterConfig(state=Path(".headrace"))
    set_all(monkeypatch, HEADRACE_STATE="/runs/a", HEADRACE_NAMESPACE="exp-7")
    assert AsyncClient()._cluster == ClusterConfig(state=Path("/runs/a"), namespace="exp-7")
    set_all(monkeypatch, **ADDRESSES, HEADRACE_BLOBS="s3://b", HEADRACE_KAFKA_PROPERTIES="a=1 b=2")
    assert AsyncClient()._cluster == ClusterConfig(
        Path("/runs/a"), "b:9092", "http://r:8081", "s3://b", "exp-7", {"a": "1", "b": "2"}
    )


def test_arguments_override_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, **ADDRESSES, HEADRACE_STATE="/runs/a", HEADRACE_NAMESPACE="exp-7")
    set_all(monkeypatch, HEADRACE_KAFKA_PROPERTIES="a=1 b=2")
    client = AsyncClient("c:1", "http://c:2", "mine", state="here", properties={"b": "3"})
    assert client._cluster == ClusterConfig(
        Path("here"), "c:1", "http://c:2", None, "mine", {"a": "1", "b": "3"}
    )


def test_a_property_without_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, HEADRACE_KAFKA_PROPERTIES="a")
    with pytest.raises(UsageError, match="property 'a' has no value: write key=value"):
        AsyncClient()


def test_the_time_that_the_caller_takes_is_no_wait_for_a_result() -> None:
    """A result that came meanwhile is yielded, however long the caller worked with the last one."""

    async def main() -> list[int]:
        topics, codec, registry = Topics("exp", ("default",), 1), Codec(), MemoryRegistry()
        registry.prepare(codec, topics)
        log = EventLog(MemoryBroker(), topics, codec, registry, "test")
        await log.broker.create_topics({t.name: (t.partitions, {}) for t in topics})
        recipe, client = read_recipe("quickstart"), AsyncClient()
        connection = cast("Any", None)  # Nothing is submitted.
        client._session = _ClientSession(connection, log, recipe, Texts(recipe), AsyncExitStack())

        async def end(task: int) -> None:
            fields = {"source": "s", "task_id": str(task), "item_id": "i", "outcomes": ()}
            await log.send(TaskEnded.model_validate({"task": task, "closed_by": "all", **fields}))

        await end(0)
        found = []
        async for result in client.results([0, 1], timeout_s=0.5):
            found.append(result.task)
            if len(found) == 1:
                await asyncio.sleep(0.6)
                await end(1)
        with pytest.raises(TimeoutError, match=r"no result within 0.05 s of 1 tasks: \[2\]"):
            [one async for one in client.results([0, 2], timeout_s=0.05)]
        await log.broker.close()
        return found

    assert asyncio.run(asyncio.wait_for(main(), 20)) == [0, 1]
