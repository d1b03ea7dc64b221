"""The command line on a real broker, with real processes: what an operator does and sees."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace.infra import local
from headrace.services.models.blobs import LocalBlobStore
from tests.commands import cluster_variables, run_command

HEADRACE = (sys.executable, "-m", "headrace")
BOUND_S = 120
FEW = ("--set", "tasks.options.items=4", "--set", "tasks.samples=2")
ENDLESS = ("--set", "tasks.options.items=1000000")


class Operator:
    """Runs commands on one broker and namespace, with a state folder of its own."""

    def __init__(self, state: Path, environment: dict[str, str]) -> None:
        self.state = state
        self._environment = {**os.environ, **environment, "HEADRACE_STATE": str(state)}

    def __call__(
        self, *arguments: str, code: int = 0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Runs a whole command. Fails the test if it has another exit code."""
        done = run_command(arguments, self._environment, stdin=stdin, timeout_s=BOUND_S)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that goes on."""
        with (self.state / "stderr.txt").open("w") as log:
            return subprocess.Popen(
                [*HEADRACE, *arguments], env=self._environment,
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def json(self, *arguments: str) -> Any:
        """What a command prints with `--json`."""
        return json.loads(self(*arguments, "--json").stdout)


@pytest.fixture
def operator(tmp_path: Path, local_stack: local.LocalStack, namespace: str) -> Iterator[Operator]:
    yield Operator(
        tmp_path,
        cluster_variables(local_stack, namespace),
    )
    assert not leftovers(tmp_path)


def leftovers(state: Path) -> list[psutil.Process]:
    """Processes that have to do with a state folder."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(state) in part for part in process.cmdline()):
                left.append(process)
    return left


def until(condition: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def test_apply_submit_look(operator: Operator, namespace: str) -> None:
    assert operator("apply", "null").stdout == f"{namespace}: started\n"
    assert operator("apply", "null").stdout == f"{namespace}: started\n"

    refused = operator("apply", "null", "--set", "tasks.samples=3", code=2)
    assert "tasks.samples: 8 -> 3" in refused.stderr
    assert "--namespace" in refused.stderr

    lines = '{"item_id": "a", "task_id": "x"}\n{"item_id": "b", "payload": {"n": 1}}\n'
    assert operator("submit", "-", stdin=lines).stdout.startswith("0\tx\n1\t")
    assert "line 1" in operator("submit", "-", stdin='{"nope": 1}', code=2).stderr

    shown = operator("tail", "tasks", "-n", "2", "--json").stdout.splitlines()
    tasks = [json.loads(line) for line in shown]
    assert [task["event"]["item_id"] for task in tasks] == ["a", "b"]
    assert tasks[0]["event"]["roles"]["policy"]["policy"] == "default"
    assert "it has: runs" in operator("tail", "nope", code=2).stderr

    rows = operator.json("topics")
    assert isinstance(rows, list)
    table = {row["topic"]: row for row in rows}
    assert table[f"{namespace}.tasks.v1"]["records"] == 2
    assert table[f"{namespace}.results.v1"]["partitions"] == 4

    status = operator.json("status")
    assert isinstance(status, dict)
    assert (status["state"], status["tasks_submitted"], status["tasks_ended"]) == ("started", 2, 0)
    assert status["lags"]["scheduler"] == 2


@pytest.mark.long
def test_commands_that_read_know_namespaces_without_a_newer_topic(
    operator: Operator, namespace: str, kafka: str
) -> None:
    """Such as one that was made before there were statistics of items."""
    operator("apply", "null")
    operator("submit", "-", stdin='{"item_id": "a", "task_id": "x"}')
    with AdminClient({"bootstrap.servers": kafka}) as admin:
        for done in admin.delete_topics([f"{namespace}.items.default.v1"]).values():
            done.result(BOUND_S)
    rows = operator.json("topics")
    assert isinstance(rows, list)
    assert f"{namespace}.tasks.v1" in {row["topic"] for row in rows}
    status = operator.json("status")
    assert isinstance(status, dict)
    assert (status["state"], status["tasks_submitted"]) == ("started", 1)
    operator("status", "--metrics")
    assert '"a"' in operator("show", "0", "--json").stdout
    assert operator("tail", "tasks", "-n", "1", "--json").stdout
    assert "does not exist" in operator("tail", "items.default", "-n", "1", code=75).stderr
    assert operator.json("dead-letters", "list") == []
    operator("prune")
    assert "trains no policy" in operator("replay", "batches", code=2).stderr
    assert "no replay to compare with" in operator("compare", code=2).stderr
    assert operator("end").stdout == f"{namespace}: ended by headrace end\n"


def test_a_dead_letter_is_redriven_once(operator: Operator, namespace: str, kafka: str) -> None:
    operator("apply", "null")
    operator("submit", "-", stdin='{"item_id": "a", "task_id": "x"}')
    park_first_task(kafka, namespace)

    (kind,) = operator.json("dead-letters", "list")
    assert (kind["reason"], kind["count"], kind["redriven"]) == ("a bug", 1, 0)
    shown = operator("dead-letters", "show", "0").stdout
    assert f"{namespace}.tasks.v1/0@0" in shown
    assert "possible" in shown

    assert "redriven" in operator("dead-letters", "redrive", "0").stdout
    assert "redriven already" in operator("dead-letters", "redrive", "0", code=1).stdout
    assert "holds 0 to" in operator("dead-letters", "redrive", "9", code=2).stderr
    again = operator("show", "1").stdout
    assert "task:submit/x" in again


def park_first_task(servers: str, namespace: str) -> None:
    """Writes a dead letter of the first task, as a consumer with a bug would."""
    settings = {"bootstrap.servers": servers, "group.id": "parking"}
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(f"{namespace}.tasks.v1", 0, 0)])
    message = consumer.poll(20)
    consumer.close()
    assert message is not None
    why = {"topic": message.topic(), "partition": "0", "offset": "0", "exception.message": "a bug"}
    headers: list[tuple[str, str | bytes | None]] = [
        (f"__connect.errors.{name}", str(text).encode()) for name, text in why.items()
    ]
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(
        f"{namespace}.dead-letters.v1", message.value(), message.key(), headers=headers
    )
    assert producer.flush(20) == 0


def test_serve_refuses_another_recipe_and_no_run(operator: Operator) -> None:
    assert "apply" in operator("serve", "agent", "null", code=2).stderr
    operator("apply", "null")
    wrong = operator("serve", "agent", "null", "--set", "tasks.seed=5", code=2)
    assert "tasks.seed: 0 -> 5" in wrong.stderr


def test_serve_drains_on_sigterm(operator: Operator) -> None:
    operator("apply", "null")
    process = operator.start("serve", "agent", "null")
    log = operator.state / "stderr.txt"
    until(lambda: "serving agent" in log.read_text())
    process.send_signal(signal.SIGTERM)

    assert process.wait(15) == 0
    assert "ended cleanly" in log.read_text()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.long
def test_run_goes_to_its_end_and_the_next_takes_another_name(
    operator: Operator, namespace: str
) -> None:
    first = operator("run", "null", *FEW, "--json", "--check", "episodes==8")
    summary = json.loads(first.stdout)
    assert (summary["namespace"], summary["reason"]) == (namespace, "all tasks published")
    assert (summary["episodes"], summary["tasks"], summary["failures"]) == (8, 4, 0)
    logs = operator.state / namespace / "logs"
    assert "ended cleanly" in (logs / "agent.log").read_text()

    blobs = LocalBlobStore(operator.state / "blobs")
    marked = {one.name for one in blobs.owners.markers() if one.owner.endswith(f".{namespace}")}
    assert marked == {blob.name for blob in blobs.stored()} != set()
    assert "--forget nope: this broker has" in operator("prune", "--forget", "nope", code=2).stderr
    assert operator("prune", "--yes").stderr == "nothing to remove\n"

    second = operator("run", "null", *FEW, "--check", "reward>=0.5", "--quiet", code=3)
    assert f"{namespace}-2: ended by all tasks published" in second.stdout
    assert "reward>=0.5 does not hold" in second.stderr


def test_ctrl_c_pauses_the_run_and_end_ends_it(operator: Operator, namespace: str) -> None:
    log = operator.state / "stderr.txt"
    process = operator.start("run", "null", *ENDLESS)
    until(lambda: re.search("episodes [1-9]", log.read_text()) is not None)
    second = operator("run", "null", *ENDLESS, code=2)
    assert f"another `headrace run` runs the namespace {namespace} now" in second.stderr
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 130
    assert f"{namespace}: paused" in out
    assert "ended with exit code" not in log.read_text(), "a second run disturbed it"
    command = f"`headrace run null {' '.join(ENDLESS)}` continues"
    assert f"pausing the run; {command} it; press Ctrl-C again" in log.read_text()
    assert f"\nthe run is paused: {command} it" in log.read_text()
    assert operator.json("status")["state"] == "started"

    ended = operator.json("end", "--reason", "seen enough")
    assert ended == {"namespace": namespace, "reason": "seen enough"}
    status = operator.json("status")
    assert (status["state"], status["reason"]) == ("ended", "seen enough")
    assert status["tasks_ended"] == status["tasks_submitted"] > 0
    again = operator("end", "--reason", "late")
    assert again.stdout == f"{namespace}: ended by seen enough\n", "it stays as it is"
    assert f"the run of namespace {namespace} has ended already" in again.stderr


@pytest.mark.long
def test_end_ends_a_run_that_goes_on_elsewhere(operator: Operator, namespace: str) -> None:
    process = operator.start("run", "null", *ENDLESS)
    log = operator.state / "stderr.txt"
    until(lambda: "running" in log.read_text())

    assert operator("end").stdout == f"{namespace}: ended by headrace end\n"
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, log.read_text()
    assert f"{namespace}: ended by headrace end" in out


@pytest.mark.long
def test_a_run_killed_as_it_begins_leaves_nothing_and_can_go_on(
    operator: Operator, namespace: str
) -> None:
    process = operator.start("run", "null", *FEW)
    until(lambda: (operator.state / namespace / "logs").exists())
    process.kill()
    process.communicate()
    until(lambda: not leftovers(operator.state), 30)

    again = operator("run", "null", *FEW)
    assert f"{namespace}: ended by all tasks published" in again.stdout
    assert "episodes 8 of 4 tasks" in again.stdout
