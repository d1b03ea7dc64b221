"""A judge of another team, in a process without our code, killed in the middle of its work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from headrace.infra import local
from headrace.services.log.signatures import public_text, write_private_key
from tests.commands import cluster_variables
from tests.integration.judged import said_by
from tests.integration.test_other_teams import headrace, read_all

JUDGE = Path(__file__).with_name("foreign_judge.py")
BOUND_S = 150.0
ITEMS, SAMPLES, BEFORE_DEATH = 8, 4, 5
RECIPE = f"""
name = "judged"

[tasks]
options = {{ items = {ITEMS} }}
epochs = 1
samples = {SAMPLES}
max_turns = 1
max_tokens = 1
deadline_s = 120
environment = "jury"

[agents.default]
use = "tests.integration.judged:solve"

[environments.jury]
use = "external"

[policies.default]
model = "tiny-llama"
training = false

[policies.default.engine]
use = "scripted"
"""


@contextmanager
def started(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose stdout is read, and that ends with this, or after BOUND_S."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    late = threading.Timer(BOUND_S, process.kill)
    late.start()
    try:
        yield process
    finally:
        late.cancel()
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Programs:
    """Commands of another language. Each gets the brokers, the registry and the namespace."""

    judge: Sequence[str]
    reader: Sequence[str]
    """Also gets the number of tasks, and prints `TASK: REWARD REWARD …`."""
    submit: Sequence[str]
    """Also gets a key, the tenant, the id and the payload, and prints the task's number."""
    names_public_key: bool = False
    """Whether `submit` needs the public key behind the file of the private one."""


def submit_and_judge(programs: Programs, stack: local.LocalStack, namespace: str, at: Path) -> None:
    """Runs the recipe with a tenant that has a key, and with the programs of another language.

    Of three tasks for the tenant, only the first one has a signature that counts.
    """
    files = [at / f"{name}.pem" for name in ("tenant", "stranger")]
    keys = [public_text(write_private_key(file)) for file in files]
    recipe = at / "judged.toml"
    recipe.write_text(f'{RECIPE}\n[scheduler.tenants.search]\nkeys = ["{keys[0]}"]\n')
    environment = cluster_variables(stack, namespace, at)
    headrace(("apply", str(recipe)), environment)
    where = (stack.bootstrap_servers, stack.registry_url, namespace)
    for number, (file, key) in enumerate(zip(files, keys, strict=True)):
        named = (str(file), key) if programs.names_public_key else (str(file),)
        task = ("search", f"by-{file.stem}", '{"size": 4}')
        assert output_of(*programs.submit, *where, *named, *task) == f"{number}\n"
    submit_altered(stack.bootstrap_servers, f"{namespace}.tasks.v1")
    with subprocess.Popen([*programs.judge, *where], stdout=subprocess.DEVNULL) as judging:
        try:
            run = ("-m", "headrace", "run", str(recipe), "--json", "--quiet")
            with started(*run, **environment) as running:
                summary = json.loads(running.communicate(timeout=BOUND_S)[0])
        finally:
            judging.kill()
    assert (summary["tasks"], summary["failures"], summary["restarts"]) == (ITEMS + 3, 2, 0)
    printed = output_of(*programs.reader, *where, str(ITEMS + 3))
    found = dict(line.split(": ") for line in printed.splitlines())
    assert len(found) == ITEMS + 3
    assert [found.pop("1"), found.pop("2")] == ["null", "null"]
    for task_number, rewards in found.items():
        expected = [
            (sample + 1) / len(said_by(int(task_number), sample)) for sample in range(SAMPLES)
        ]
        assert [float(one) for one in rewards.split()] == pytest.approx(expected)
    check_ends(results_of(stack, namespace))


def output_of(*command: str) -> str:
    """What a program prints until it ends."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout


def submit_altered(servers: str, topic: str) -> None:
    """Writes the first task again with its signature, and with another payload of the same size."""
    first = next(read_all(servers, topic))
    altered = first.value().replace(b'{"size": 4}', b'{"size": 5}')
    assert altered != first.value()
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(topic, altered, first.key(), headers=first.headers())
    assert producer.flush(30) == 0


def check_ends(results: list[dict[str, Any]]) -> None:
    """The first task was the tenant's, and the forged ones were refused."""
    ends = {result["task"]: result for result in results}
    assert (ends[0]["source"], ends[0]["task_id"]) == ("team", "by-tenant")
    assert (ends[0]["tenant"], ends[0]["closed_by"]) == ("search", "all")
    for number in (1, 2):
        assert ends[number]["closed_by"] == "refused"
        assert ends[number]["outcomes"][0]["failure"]["code"] == "unproved_tenant"


def test_a_judge_without_our_code_is_killed_and_every_episode_is_judged(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe = tmp_path / "judged.toml"
    recipe.write_text(RECIPE)
    environment = cluster_variables(local_stack, namespace, tmp_path)
    headrace(("apply", str(recipe)), environment)
    where = (local_stack.bootstrap_servers, local_stack.registry_url, namespace)
    judge = ("-I", str(JUDGE), *where)  # isolated: it could not import ours if it would
    run = ("-m", "headrace", "run", str(recipe), "--json", "--quiet")
    with started(*run, **environment) as running:
        with started(*judge) as first:
            assert first.stdout is not None
            for _ in range(BEFORE_DEATH):
                assert first.stdout.readline().startswith("answered")
            first.kill()
        with started(*judge):
            summary = json.loads(running.communicate(timeout=BOUND_S)[0])
    assert running.returncode == 0
    assert (summary["tasks"], summary["failures"], summary["restarts"]) == (ITEMS, 0, 0)

    results = results_of(local_stack, namespace)
    assert len(results) == ITEMS
    for result in results:
        for outcome in result["outcomes"]:
            said = said_by(outcome["task"], outcome["sample"])
            score = (outcome["sample"] + 1) / len(said)
            assert (outcome["attempts"], outcome["reward"]) == (1, pytest.approx(score))
            assert outcome["rewards"] == {"jury": outcome["reward"]}
    page = headrace(("show", "2/1"), environment)
    assert "score by jury" in page
    assert "reward      jury 0.5" in page


def results_of(stack: local.LocalStack, namespace: str) -> list[dict[str, Any]]:
    """Every TaskEnded, of each task the first."""
    name = f"{namespace}.results.v1"
    with SchemaRegistryClient({"url": stack.registry_url}) as registry:
        deserialize = AvroDeserializer(registry)
        context = SerializationContext(name, MessageField.VALUE)
        values = (message.value() for message in read_all(stack.bootstrap_servers, name))
        first: dict[int, dict[str, Any]] = {}
        for value in values:
            ended = deserialize(value, context)
            first.setdefault(ended["task"], ended)
        return list(first.values())
