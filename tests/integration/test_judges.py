"""A judge of another team, in a process without our code, killed in the middle of its work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from headrace.infra import local
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


def judge_and_read(
    judge: Sequence[str], reader: Sequence[str], stack: local.LocalStack, namespace: str, at: Path
) -> None:
    """Runs the recipe with a judge of another language, then its reader of results.

    Both are commands that get the brokers, the registry and the namespace. The reader also gets
    the number of tasks, and prints `TASK: REWARD REWARD …`.
    """
    recipe = at / "judged.toml"
    recipe.write_text(RECIPE)
    environment = cluster_variables(stack, namespace, at)
    headrace(("apply", str(recipe)), environment)
    where = (stack.bootstrap_servers, stack.registry_url, namespace)
    with subprocess.Popen([*judge, *where], stdout=subprocess.DEVNULL) as judging:
        try:
            run = ("-m", "headrace", "run", str(recipe), "--json", "--quiet")
            with started(*run, **environment) as running:
                summary = json.loads(running.communicate(timeout=BOUND_S)[0])
        finally:
            judging.kill()
    assert (summary["tasks"], summary["failures"], summary["restarts"]) == (ITEMS, 0, 0)
    printed = subprocess.run(
        [*reader, *where, str(ITEMS)], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    found = dict(line.split(": ") for line in printed.splitlines())
    assert len(found) == ITEMS
    for task, rewards in found.items():
        expected = [(sample + 1) / len(said_by(int(task), sample)) for sample in range(SAMPLES)]
        assert [float(one) for one in rewards.split()] == pytest.approx(expected)


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
