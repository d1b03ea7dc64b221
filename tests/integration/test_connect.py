"""Kafka Connect with Iceberg's sink writes the topic `turns` into a table, which pyarrow reads."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.infra import local
from headrace.infra.local.detached import locked
from headrace.infra.local.jars import cache_folder, java, maven_context
from tests.commands import cluster_variables
from tests.integration.test_other_teams import headrace, read_all
from tests.unit.test_architecture import ROOT

RECIPE = (
    *("quickstart", "--set", "stop.versions=1", "--set", "stop.reward=9"),
    *("--set", "policies.default.batches.groups=1", "--set", "workers.project_turns=1"),
)
CONFIGURATION = ROOT / "infra/connect"
FETCH_S = 900.0
BOUND_S = 300.0
END_S = 20.0


@pytest.fixture(scope="module")
def jars() -> dict[str, list[Path]]:
    """The jars of the worker and of each plugin. The first run fetches about 150 MB."""
    folder = cache_folder() / "test-jars"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[tuple[str, str], Path]] = defaultdict(dict)
    with locked(folder / "fetch.lock", FETCH_S):
        context = maven_context(folder, threading.Event())
        for line in (CONFIGURATION / "jars.txt").read_text().splitlines():
            if line.startswith("#"):
                continue
            name, coordinate = line.split()
            for some in context.resolver.resolve([context.create_dependency(coordinate)]):
                for one in some:
                    at = one.groupId, one.artifactId
                    wanted = one.scope in ("compile", "runtime", None) and at not in found[name]
                    if wanted and (name == "worker" or one.groupId != "org.apache.kafka"):
                        found[name][at] = one.artifact.resolve()
    return {name: list(files.values()) for name, files in found.items()}


def configured(name: str, folder: Path, changes: dict[str, str]) -> str:
    """Writes a shipped configuration with other addresses and paths. Returns its path."""
    text = (CONFIGURATION / name).read_text()
    for shipped, real in changes.items():
        assert shipped in text
        text = text.replace(shipped, real)
    (folder / name).write_text(text)
    return str(folder / name)


def worker_command(
    jars: dict[str, list[Path]], folder: Path, stack: local.LocalStack, namespace: str
) -> list[str]:
    """The command of a worker whose plugins, offsets and warehouse are in a folder."""
    for name in set(jars) - {"worker"}:
        (folder / "plugins" / name).mkdir(parents=True)
        for jar in jars[name]:
            (folder / "plugins" / name / jar.name).symlink_to(jar)
    worker = {
        "127.0.0.1:9092": stack.bootstrap_servers,
        "http://127.0.0.1:8081/": f"{stack.registry_url.partition('/apis/')[0]}/",
        "http://127.0.0.1:8083": "http://127.0.0.1:0",
        "/opt/connect": str(folder),
        "/var/lib/connect": str(folder),
    }
    sink = {"exp-7": namespace, "/var/lib/connect": str(folder)}
    return [
        *(str(java()), "-Xmx512m", "-XX:TieredStopAtLevel=1", "--enable-native-access=ALL-UNNAMED"),
        *("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp"),
        ":".join(map(str, jars["worker"])),
        "org.apache.kafka.connect.cli.ConnectStandalone",
        configured("worker.properties", folder, worker),
        configured("iceberg-sink.properties", folder, sink),
    ]


def committed(table: Path) -> int:
    """How many rows the newest snapshot of the table has."""
    hint = table / "metadata/version-hint.text"
    if not hint.exists():
        return 0
    metadata = json.loads(
        (table / f"metadata/v{hint.read_text().strip()}.metadata.json").read_text()
    )
    return max(
        (int(one["summary"].get("total-records", 0)) for one in metadata.get("snapshots", ())),
        default=0,
    )


def identity(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in ("task", "sample", "attempt", "turn", "part"))


@pytest.mark.long
def test_connect_writes_turns_into_an_iceberg_table(
    jars: dict[str, list[Path]], tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    environment = cluster_variables(local_stack, namespace, tmp_path)
    headrace(("run", *RECIPE), environment)
    lines = tmp_path / "rows.jsonl"
    headrace(("trajectories", "--format", "jsonl", "--to", str(lines)), environment)
    expected = {identity(row): row for row in map(json.loads, lines.read_text().splitlines())}
    written = len(list(read_all(local_stack.bootstrap_servers, f"{namespace}.turns.v1")))
    assert written > 0

    admin = AdminClient({"bootstrap.servers": local_stack.bootstrap_servers})
    topic = NewTopic(f"{namespace}-iceberg-control", 1, 1)
    admin.create_topics([topic])[topic.topic].result(30)
    folder = tmp_path / "connect"
    folder.mkdir()
    table, log = folder / "warehouse/headrace/turns", folder / "connect.log"
    command = worker_command(jars, folder, local_stack, namespace)
    with open(log, "wb") as output, subprocess.Popen(command, stderr=output, stdout=output) as one:
        try:
            until = time.monotonic() + BOUND_S
            while committed(table) < written and time.monotonic() < until and one.poll() is None:
                time.sleep(0.5)
        finally:
            one.terminate()
            try:
                one.wait(END_S)
            except subprocess.TimeoutExpired:
                one.kill()
    assert committed(table) == written, log.read_text(errors="replace")[-3000:]

    rows = [
        row
        for file in (table / "data").glob("*.parquet")
        for row in pyarrow.parquet.read_table(file).to_pylist(maps_as_pydicts="strict")
    ]
    assert len(rows) == written
    for row in rows:
        for moment in ("started", "ended"):
            row[moment] = round(row[moment].timestamp() * 1000)
        assert row == expected[identity(row)]
