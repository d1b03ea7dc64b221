"""Consumers of other teams that are slow, crash or lag behind change nothing for a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from headrace.infra import local
from tests.commands import cluster_variables, run_command
from tests.integration.test_other_teams import headrace, read_all

pytestmark = pytest.mark.long

RECIPE = (
    *("null", "--set", "tasks.options.items=16", "--set", "tasks.samples=4"),
    *("--set", "partitions=2"),
)
READ = ("results", "trajectories")
CRASH = """
import os, signal, sys
import pytest
from confluent_kafka import Consumer
consumer = Consumer({
    "bootstrap.servers": sys.argv[1], "group.id": "team.crashing",
    "auto.offset.reset": "earliest", "enable.auto.commit": False,
})
consumer.subscribe(sys.argv[2:])
while (message := consumer.poll(60)) is not None and message.error() is not None:
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A member that reads one record, commits nothing, and dies without leaving its group."""


class Crashing(threading.Thread):
    """Starts a member of a group that crashes, again and again."""

    def __init__(self, servers: str, topics: list[str]) -> None:
        super().__init__()
        self._command = [sys.executable, "-c", CRASH, servers, *topics]
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.crashes = 0

    def run(self) -> None:
        while not self._stopping.is_set():
            self._process = subprocess.Popen(self._command)
            self.crashes += self._process.wait() == -signal.SIGKILL

    def stop(self) -> None:
        self._stopping.set()
        while self.is_alive():
            if self._process is not None:
                self._process.terminate()
            self.join(0.1)


def consumer(servers: str, group: str, topics: list[str]) -> Consumer:
    """A member that has its partitions, and holds what it read until it is closed."""
    made = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"team.{group}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "queued.min.messages": 1,
        }
    )
    made.subscribe(topics)
    while not made.assignment():
        made.poll(0.1)
    return made


def records(stack: local.LocalStack, namespace: str, topic: str) -> list[dict[str, Any]]:
    name = f"{namespace}.{topic}.v1"
    with SchemaRegistryClient({"url": stack.registry_url}) as registry:
        deserialize = AvroDeserializer(registry)
        context = SerializationContext(name, MessageField.VALUE)
        return [
            deserialize(one.value(), context) for one in read_all(stack.bootstrap_servers, name)
        ]


def facts(stack: local.LocalStack, namespace: str) -> dict[str, Any]:
    """What a run has decided and recorded, without times and places."""
    results, trajectories = (records(stack, namespace, topic) for topic in READ)
    return {
        "results": sorted(
            (
                one["source"],
                one["task_id"],
                one["closed_by"],
                tuple((each["ending"], each["reward"]) for each in one["outcomes"]),
            )
            for one in results
        ),
        "trajectories": sorted(
            (one["task"], one["sample"], tuple(len(turn["tokens"]) for turn in one["turns"]))
            for one in trajectories
        ),
    }


def run(stack: local.LocalStack, namespace: str, state: Path) -> dict[str, Any]:
    done = run_command(("run", *RECIPE, "--json"), cluster_variables(stack, namespace, state))
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_foreign_consumers_change_nothing(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    alone, read = f"{namespace}-alone", f"{namespace}-read"
    servers = local_stack.bootstrap_servers
    topics = [f"{read}.{topic}.v1" for topic in READ]
    assert run(local_stack, alone, tmp_path / "alone")["restarts"] == 0

    headrace(("apply", *RECIPE), cluster_variables(local_stack, read, tmp_path / "read"))
    slow, lagging = (consumer(servers, group, topics) for group in ("slow", "lagging"))
    crashing = Crashing(servers, topics)
    crashing.start()
    try:
        assert run(local_stack, read, tmp_path / "read")["restarts"] == 0
        message = slow.poll(60)  # Its first record, when the run is over.
        assert message is not None
        assert message.error() is None
    finally:
        crashing.stop()
        slow.close()
    assert crashing.crashes > 0

    with_readers = facts(local_stack, read)
    assert len(with_readers["results"]) == 16
    assert len(with_readers["trajectories"]) == 64
    assert with_readers == facts(local_stack, alone)
    seen = 0  # The one that lagged behind from the beginning finds all of it.
    while seen < 16 + 64:
        message = lagging.poll(60)
        assert message is not None
        seen += message.error() is None
    lagging.close()
    verify = ("verify", "--json")
    for name in (alone, read):
        found = json.loads(headrace(verify, cluster_variables(local_stack, name, tmp_path)))
        assert (found["lost"], found["doubled"], found["violations"]) == (0, 0, [])
        assert sum(found["endings"].values()) == 64
