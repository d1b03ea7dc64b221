"""A run in which every service has its own principal, with the ACLs of `headrace acls` alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from headrace.infra import local
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.resources.service_names import SERVICES
from headrace.schemas.topics import ITEMS, SHARES, TURNS, Topics
from headrace.services.kafka.access.visibility import view_cluster
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.namespace.access_table import ACCESS, GROUPS_OF_SERVICES
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.lookup import open_namespace, topics_of
from headrace.services.operate.acls.acl_permissions import transactional_ids
from headrace.services.operate.find_versions import read_versions
from tests.commands import run_command
from tests.guarded_stack import guarded_stack, properties_of

pytestmark = pytest.mark.long

VERSIONS = 2
RUN_S, END_S = 180.0, 60.0
ASK_S = 10.0
RECIPE = """
name = "ours"

[tasks]
use = "tests.experiments.mostly_useless:items"
options = { useful = true }
curators = [{ use = "pass_rate", tries = 2 }]
samples = 4
max_turns = 1
max_tokens = 1
deadline_s = 60

[evaluation]
use = "tests.experiments.mostly_useless:items"
options = { useful = true }
items = 2
every = 1
samples = 1

[environments.default]
use = "question"
options = { grader = "tests.experiments.mostly_useless:grade" }

[agents.default]
use = "single_turn"
unfinished_reward = 0.0

[policies.default]
model = "tiny-llama"
limits = { in_flight = 16 }

[policies.default.engine]
device = "cpu"

[policies.default.sampling]
max_tokens = 1
allowed = ["0", "1", "2", "3", "4"]

[policies.default.batches]
groups = 4

[policies.default.training]
device = "cpu"

[workers]
project_turns = 1
"""


class Team:
    """A run on a guarded stack, and its commands as one role or another."""

    def __init__(self, stack: local.LocalStack, servers: str, folder: Path) -> None:
        self.stack, self.servers, self.folder = stack, servers, folder
        self.recipe_file = folder / "ours.toml"
        self.recipe_file.write_text(RECIPE)
        self.recipe: Recipe = read_recipe(str(self.recipe_file), ())
        self.topics: Topics = topics_of(self.recipe, "ours")

    def cluster(self, role: str) -> ClusterConfig:
        """Returns the cluster as a role sees it."""
        return ClusterConfig(
            self.folder / "state",
            self.servers,
            self.stack.registry_url,
            namespace="ours",
            kafka_properties=properties_of(f"headrace-{role}"),
        )

    def variables(self, role: str) -> dict[str, str]:
        """Returns the variables of a role's process."""
        cluster = self.cluster(role)
        return {
            "HEADRACE_BOOTSTRAP_SERVERS": self.servers,
            "HEADRACE_REGISTRY_URL": self.stack.registry_url,
            "HEADRACE_NAMESPACE": "ours",
            "HEADRACE_STATE": str(cluster.state),
            "HEADRACE_KAFKA_PROPERTIES": " ".join(map("=".join, cluster.kafka_properties.items())),
            "HEADRACE_GATEWAY_KEY": "a-key-of-no-client-at-all",
            "HEADRACE_GATEWAY_LISTEN": "127.0.0.1:0",
        }

    def run(self, role: str, *arguments: str, stdin: str = "") -> str:
        """Runs a command as a role, and returns what it prints."""
        done = run_command(arguments, self.variables(role), stdin=stdin, timeout_s=RUN_S)
        assert done.returncode == 0, (role, arguments, done.stdout, done.stderr)
        return done.stdout

    @contextmanager
    def serving(self) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
        """Serves the recipe with one process of each service. Kills what is left at the end."""
        with ExitStack() as closing:
            processes = {}
            for service in SERVICES:
                log = closing.enter_context((self.folder / f"{service}.log").open("wb"))
                command = [sys.executable, "-m", "headrace", "serve", service]
                processes[service] = subprocess.Popen(
                    [*command, str(self.recipe_file)],
                    env={**os.environ, **self.variables(service)},
                    stdout=log,
                    stderr=log,
                )
                closing.callback(processes[service].wait)
                closing.callback(processes[service].kill)
            yield processes

    async def learned(self, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        """Waits, as a reader, until every service has done something."""
        async with open_namespace(self.cluster("reader"), "test") as (log, _):
            wanted = [
                *log.topics.partitions_of(TURNS),
                *log.topics.partitions_of(ITEMS),
                *log.topics.partitions_of(SHARES),
            ]
            while True:
                for service, process in processes.items():
                    assert process.poll() is None, (self.folder / f"{service}.log").read_text()
                written = {
                    at.topic for at, (_, end) in (await log.broker.ends(wanted)).items() if end
                }
                versions = await read_versions(log, "default")
                if max(versions, default=0) >= VERSIONS and len(written) == 3:
                    return
                await asyncio.sleep(0.5)


def test_a_run_learns_with_these_acls_alone_and_nobody_may_do_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = [f"headrace-{role}" for role in ACCESS]
    with guarded_stack(tmp_path / "stack", monkeypatch, users) as (stack, servers):
        team = Team(stack, servers, tmp_path)
        owner = ("--bootstrap-servers", stack.bootstrap_servers, "--registry-url")
        for _ in range(2):  # The second time changes nothing.
            created = run_command(
                ("acls", str(team.recipe_file), "--apply", *owner, stack.registry_url), {}
            )
            assert created.returncode == 0, created.stderr
        refused = run_command(
            ("acls", str(team.recipe_file), "--apply"), team.variables("operator")
        )
        assert refused.returncode == 75, refused.stderr
        assert "`Alter` on the cluster" in refused.stderr

        team.run("operator", "apply", str(team.recipe_file))
        words = ("apply", str(team.recipe_file), "--namespace", "theirs", *owner)
        assert run_command((*words, stack.registry_url), {}).returncode == 0
        with team.serving() as processes:
            asyncio.run(asyncio.wait_for(team.learned(processes), RUN_S))
            line = {"payload": {"question": "a0", "answer": "0"}, "task_id": "t"}
            team.run("guest", "submit", "-", stdin=json.dumps(line))
            team.run("guest", "cancel", "--source", "submit", "t")
            team.run("operator", "quota", "busy", "--live-episodes", "8")
            team.run("redrive", "dead-letters", "redrive", "--all")
            team.run("reader", "doctor")
            team.run("reader", "status", "--json")
            team.run("operator", "end", "--state", str(tmp_path / "state"))
            until = time.monotonic() + END_S
            codes = {
                service: process.wait(max(0.1, until - time.monotonic()))
                for service, process in processes.items()
            }
            assert set(codes.values()) == {0}, codes
        team.run("reader", "verify")
        check_operations(team)
        check_produce_and_fetch(team)
        check_transactional_ids(team)


def test_one_command_runs_each_service_with_its_own_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The administrator's file creates the ACLs. No principal may do the work of another one."""
    users = [f"headrace-{role}" for role in ACCESS]
    folder = tmp_path / "credentials"
    folder.mkdir(mode=0o700)
    with guarded_stack(tmp_path / "stack", monkeypatch, [*users, "root"], "root") as found:
        team = Team(*found, tmp_path)
        for role, user in {
            **{one: f"headrace-{one}" for one in ACCESS},
            "administrator": "root",
        }.items():
            lines = "".join(f"{key}={value}\n" for key, value in properties_of(user).items())
            (folder / f"{role}.properties").write_text(lines)
        variables = {**team.variables("operator"), "HEADRACE_CREDENTIALS": str(folder)}
        del variables["HEADRACE_KAFKA_PROPERTIES"]
        words = ("run", str(team.recipe_file), "--set", f"stop.versions={VERSIONS}", "--no-check")
        env = (folder / "env.properties").rename(folder / "env.hidden")
        missing = run_command(words, variables, timeout_s=RUN_S)
        assert missing.returncode == 2, missing.stderr
        assert "can't read the credentials of env" in missing.stderr
        env.rename(folder / "env.properties")
        done = run_command((*words, "--json"), variables, timeout_s=RUN_S)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["versions"]["default"] >= VERSIONS
        check_operations(team)


def check_operations(team: Team) -> None:
    """The broker itself says what each role may do with each topic and group."""
    names = [topic.name for topic in team.topics]
    foreign = [topic.name for topic in topics_of(team.recipe, "theirs")]
    groups = [f"ours.{name}" for name in (*GROUPS_OF_SERVICES, "guest", "external-env")]
    for role, access in ACCESS.items():
        settings = settings_of(team, role)
        view = view_cluster(settings, [*names, *foreign], groups, ASK_S)
        assert {name for name, may in view.topics.items() if may} == set(names), role
        for topic in team.topics:
            expected = {"DESCRIBE", *access.manages}
            expected |= {"READ"} if topic.topic in access.reads else set()
            expected |= {"WRITE"} if topic.topic in access.writes else set()
            assert view.topics[topic.name] == expected, (role, topic.name)
        for group in groups:
            name = group.partition(".")[2]
            expected = {"READ", "DESCRIBE"} if name in access.joins else set()
            expected |= {"DESCRIBE"} if name in access.sees else set()
            assert view.groups[group] == expected, (role, group)


def check_produce_and_fetch(team: Team) -> None:
    """Each role writes to every topic, and reads it. The broker refuses what is not its own.

    The run has ended, so the records hurt nobody.
    """
    for role, access in ACCESS.items():
        properties = settings_of(team, role)
        client: dict[str, str | int] = {
            "bootstrap.servers": team.servers,
            **properties.properties,
            "log_level": 0,
        }
        wrote = failures_of_produce(client, team.topics)
        read = failures_of_fetch(client, team.topics)
        refused = KafkaError.TOPIC_AUTHORIZATION_FAILED
        for topic in team.topics:
            may = (topic.topic in access.writes, topic.topic in access.reads)
            found = (wrote[topic.name], read[topic.name])
            assert found == tuple(None if one else refused for one in may), (role, topic.name)


def failures_of_produce(client: dict[str, str | int], topics: Topics) -> dict[str, int | None]:
    """Returns why a record could not be written, by topic; None: it was written."""
    found: dict[str, int | None] = {}

    def delivered(name: str) -> Callable[..., None]:
        return lambda error, _: found.update({name: error.code() if error else None})

    producer = Producer({**client, "message.timeout.ms": 10_000})
    for topic in topics:
        producer.produce(topic.name, b"x", b"key", partition=0, on_delivery=delivered(topic.name))
    assert producer.flush(20) == 0
    return found


def failures_of_fetch(client: dict[str, str | int], topics: Topics) -> dict[str, int | None]:
    """Returns why the first partition can't be read, by topic; None: it can be read."""
    found: dict[str, int | None] = {}
    consumer = Consumer(
        {**client, "group.id": "nobody.reader", "enable.partition.eof": True}
        | {"enable.auto.commit": False, "isolation.level": "read_uncommitted"}
    )
    consumer.assign([TopicPartition(topic.name, 0, 0) for topic in topics])
    until = time.monotonic() + 30
    while len(found) < len(list(topics)):
        assert time.monotonic() < until, found
        message = consumer.poll(1)
        if message is not None and (name := message.topic()) is not None:
            error = message.error()
            fine = error is None or error.code() == KafkaError._PARTITION_EOF
            found.setdefault(name, None if error is None or fine else error.code())
    consumer.close()
    return found


def check_transactional_ids(team: Team) -> None:
    """Only its owner may fence a transactional id."""
    ids = {role: set(transactional_ids(access, team.topics)) for role, access in ACCESS.items()}
    every = set().union(*ids.values())
    assert len(every) == 5
    for role, own in ids.items():
        assert {name for name in every if may_fence(team, role, name)} == own, role


def may_fence(team: Team, role: str, name: str) -> bool:
    settings = settings_of(team, role)
    producer = Producer(settings.transactional(name) | {"log_level": 0})
    try:
        producer.init_transactions(ASK_S)
    except KafkaException as exception:
        if exception.args[0].code() != KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            raise
        return False
    return True


def settings_of(team: Team, role: str) -> KafkaSettings:
    """Returns the settings of a client that is this role."""
    return KafkaSettings(team.servers, "test", team.cluster(role).kafka_properties)
