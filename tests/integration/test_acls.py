"""A broker with ACLs: what `prune` sees and leaves alone, what `doctor` says, who may watch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, Producer, ThrottleEvent, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from headrace.errors import DependencyError, UsageError
from headrace.infra import local
from headrace.services.kafka.broker import Outgoing
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.cli import cli
from headrace.services.operate.doctor.doctor import diagnose
from headrace.services.operate.doctor.finding import Finding
from tests.guarded_stack import guarded_stack, properties_of
from tests.integration.test_dashboard import dashboard, write
from tests.unit.operate.prune.shared_cluster import SharedCluster
from tests.written_run import Size

LIMIT_S = 90
USERS = ("team", "worker", "reader", "flooder", "agent")
"""Each of them is another test's, and so are the namespaces."""


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[local.LocalStack, str]]:
    """A stack whose broker has an authorizer, and the broker's address for its users."""
    with (
        pytest.MonkeyPatch.context() as patch,
        guarded_stack(tmp_path_factory.mktemp("guarded"), patch, USERS) as found,
    ):
        yield found


def test_prune_leaves_alone_what_acls_hide(
    guarded: tuple[local.LocalStack, str], tmp_path: Path
) -> None:
    stack, team_servers = guarded
    servers = stack.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def permit(
        kind: ResourceType,
        name: str,
        pattern: ResourcePatternType,
        operation: AclOperation,
        permission: AclPermissionType = AclPermissionType.ALLOW,
    ) -> None:
        acl = AclBinding(kind, name, pattern, "User:team", "*", operation, permission)
        for made in admin.create_acls([acl]).values():
            made.result(30)

    async def sees_all(broker: KafkaBroker, expected: bool) -> None:
        """A broker applies a new ACL a moment later."""
        while await broker.sees_all_topics() != expected:
            await asyncio.sleep(0.05)

    async def main() -> None:
        async with AsyncExitStack() as closing:
            owner = KafkaBroker(KafkaSettings(servers, "owner"))
            team = KafkaBroker(KafkaSettings(team_servers, "team", properties_of("team")))
            closing.push_async_callback(owner.close)
            closing.push_async_callback(team.close)
            cluster = SharedCluster(tmp_path, owner, await owner.cluster_id())
            ours = await cluster.make("ours", b"base", b"1", b"2")
            theirs = await cluster.make("theirs", b"base", b"x")
            pruner = cluster.pruner(broker=team)

            literal, prefixed = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
            permit(ResourceType.TOPIC, "ours.", prefixed, AclOperation.ALL)
            while len(found := await team.list_topics()) < len(await owner.list_topics()) // 2:
                await asyncio.sleep(0.05)
            assert {name.partition(".")[0] for name in found} == {"ours"}
            assert await team.cluster_id() == await owner.cluster_id()
            assert await owner.sees_all_topics()
            assert not await team.sees_all_topics()
            with pytest.raises(UsageError, match="ACLs may hide topics"):
                await pruner.plan(1, True, ())

            gone = await pruner.carry_out(await pruner.plan(1, False, ()))
            assert sorted(item.kind for item in gone) == ["blob", "marker"]
            assert cluster.held([*ours, *theirs]) == [True, False, True, True, True]
            assert cluster.owners(theirs[0]) == {f"{cluster.cluster_id}.theirs"}

            permit(ResourceType.BROKER, "kafka-cluster", literal, AclOperation.DESCRIBE)
            for _ in range(20):  # It may read ACLs now, but still not describe each topic.
                assert not await team.sees_all_topics()
                await asyncio.sleep(0.05)
            permit(ResourceType.TOPIC, "*", literal, AclOperation.DESCRIBE)
            await sees_all(team, True)
            deny = AclPermissionType.DENY
            permit(ResourceType.TOPIC, "theirs.", prefixed, AclOperation.DESCRIBE, deny)
            await sees_all(team, False)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_the_doctor_names_the_permission_that_a_worker_lacks(
    guarded: tuple[local.LocalStack, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stack, team_servers = guarded
    recipe = read_recipe("null", ())
    ours = ClusterConfig(tmp_path, stack.bootstrap_servers, stack.registry_url, namespace="works")
    team = replace(ours, bootstrap_servers=team_servers, kafka_properties=properties_of("worker"))
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})

    def permit(*uses: tuple[ResourceType, str, ResourcePatternType, AclOperation]) -> None:
        acls = [
            AclBinding(kind, name, pattern, "User:worker", "*", what, AclPermissionType.ALLOW)
            for kind, name, pattern, what in uses
        ]
        for made in admin.create_acls(acls).values():
            made.result(30)

    async def found(text: str) -> Finding:
        """What the doctor says of permissions, once it has this text."""
        while True:
            diagnosis = await diagnose(team, None)
            assert not [one for one in diagnosis.findings if "not known" in one.text]
            said = [one for one in diagnosis.findings if one.check == "permissions"]
            if len(said) == 1 and text in said[0].text:
                return said[0]
            await asyncio.sleep(0.1)

    async def main() -> None:
        async with connect(ours, "test") as connection:
            await apply(await connection.writing_log(topics_of(recipe, "works")), recipe)
        topic, prefixed = ResourceType.TOPIC, ResourcePatternType.PREFIXED
        permit(
            (topic, "works.", prefixed, AclOperation.READ),
            (topic, "works.", prefixed, AclOperation.DESCRIBE_CONFIGS),
            (ResourceType.GROUP, "works.", prefixed, AclOperation.READ),
        )
        watching = await found("it can watch, and not work")
        assert watching.state == "ok"
        literal = ResourcePatternType.LITERAL
        for topic_name in (one.name for one in topics_of(recipe, "works")):
            if topic_name != "works.actions.v1":
                permit((topic, topic_name, literal, AclOperation.WRITE))
        lacking = await found("may not write to works.actions.v1, which agent must")
        assert lacking.state == "problem"
        assert "--operation Write --topic works.actions.v1" in lacking.help
        permit((topic, "works.", prefixed, AclOperation.WRITE))
        assert (await found("may read and write all 24 topics")).state == "ok"

    with caplog.at_level(logging.INFO, "headrace.services.operate.waits"):
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    # The principal may not use the group of the doctor's readers, which is never joined.
    assert "begins again" not in caplog.text


READER = properties_of("reader")


def let_read(stack: local.LocalStack, namespace: str) -> None:
    """Lets `reader` read the topics of a namespace, and see its consumer groups."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    uses = (
        (ResourceType.TOPIC, AclOperation.READ),
        (ResourceType.GROUP, AclOperation.DESCRIBE),
    )
    prefixed, allow = ResourcePatternType.PREFIXED, AclPermissionType.ALLOW
    acls = [
        AclBinding(kind, f"{namespace}.", prefixed, "User:reader", "*", what, allow)
        for kind, what in uses
    ]
    for made in admin.create_acls(acls).values():
        made.result(30)
    time.sleep(1)  # the broker applies them a moment later


def test_each_send_of_a_principal_that_may_only_read_fails(
    guarded: tuple[local.LocalStack, str], tmp_path: Path
) -> None:
    stack, team_servers = guarded
    asyncio.run(write(stack, "sends", tmp_path, Size(tasks=1)))
    let_read(stack, "sends")
    record = Outgoing("sends.tasks.v1", b"1", b"x", [])

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(team_servers, "reader", READER))
        for number in (3, 1):
            sends = [broker.send(record) for _ in range(number)]
            for outcome in await asyncio.gather(*sends, return_exceptions=True):
                assert isinstance(outcome, DependencyError)
                assert "Write on a topic" in str(outcome)
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_principal_that_may_only_read_watches_a_run(
    guarded: tuple[local.LocalStack, str], tmp_path: Path
) -> None:
    stack, team_servers = guarded
    asyncio.run(write(stack, "watched", tmp_path / "owner", Size(tasks=2)))
    let_read(stack, "watched")
    properties = [word for pair in READER.items() for word in ("--kafka-property", "=".join(pair))]
    options = ("--bootstrap-servers", team_servers, *properties)
    with dashboard(stack, "watched", tmp_path / "team", *options) as (browser, _):
        run = browser.until("/api/run", lambda tree: tree["index"]["caught_up"])
        assert (run["namespace"], run["tasks"]["submitted"]) == ("watched", 2)
        browser.until_answered("/api/waits")
        assert browser.get("/api/episodes/0/0")["turns"]
        assert browser.get("/api/topics")["items"]
        status, _, body = browser.ask(
            "/api/actions/cancel", "POST", {"task": 1},
            X_Headrace_Token=browser.get("/api/session")["action_token"],
        )  # fmt: skip
        assert (status, b"Write on a topic" in body) == (503, True), (status, body)


def grant(stack: local.LocalStack, namespace: str, *words: str) -> str:
    """Runs `headrace acls --apply` as the administrator, and returns what it says."""
    where = ("--bootstrap-servers", stack.bootstrap_servers, "--registry-url", stack.registry_url)
    target = ("acls", "quickstart", "--namespace", namespace, "--apply", *where)
    done = CliRunner().invoke(cli, [*target, *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_acls_that_no_role_needs_are_shown_and_pruned(
    guarded: tuple[local.LocalStack, str],
) -> None:
    stack, _ = guarded
    both = ("--principal", "User:changed", "--role", "env", "--role", "guest")
    one = both[:4]

    def until(holds: Callable[[str], bool], *words: str) -> str:
        """The broker that answers knows a change of ACLs a moment later."""
        for _ in range(100):
            if holds(said := grant(stack, *words)):
                return said
            time.sleep(0.05)
        raise AssertionError(said)

    grant(stack, "shrunk", *both)
    grant(stack, "shrunken", *both)  # Its name begins with the other one.
    surplus = "User:changed WRITE TOPIC shrunk.cancellations.v1"
    shown = f"not needed by these roles: {surplus}"
    said = until(lambda said: shown in said, "shrunk", *one)
    assert "User:changed READ GROUP shrunk.guest" in said
    assert "--prune deletes" in said
    assert "WRITE TOPIC shrunk.observations.v1" not in said
    assert "shrunken" not in said
    assert f"deleted: {surplus}" in grant(stack, "shrunk", *one, "--prune")
    until(lambda said: "needed" not in said, "shrunk", *one)
    until(lambda said: "WRITE TOPIC shrunken.cancellations.v1" in said, "shrunken", *one)


def test_a_quota_stays_until_it_is_changed(guarded: tuple[local.LocalStack, str]) -> None:
    stack, _ = guarded
    guest = ("--principal", "User:slow", "--role", "guest")
    said = grant(stack, "slow", *guest, "--quota", "consumer_byte_rate=7")
    own = "consumer_byte_rate 7, request_percentage 25"
    assert f"quotas of slow on each broker: producer_byte_rate 1,048,576, {own}" in said
    time.sleep(0.5)  # The broker that answers may not know yet.
    assert "quotas of" not in grant(stack, "slow", *guest)
    said = grant(stack, "slow", *guest, "--quota", "consumer_byte_rate=none")
    assert "quotas of slow on each broker: no consumer_byte_rate" in said


BODY, BODIES = b"x" * 65_536, 40
"""Together 2.5 MiB, which is 40 times the quota."""
FLOOD_S = 30.0


def throttled(use: Callable[[dict[str, Any], Callable[[], bool]], int], user: str) -> bool:
    """Returns whether the broker says that it throttles a client. Otherwise `use` must end."""
    found = list[float]()
    until = time.monotonic() + FLOOD_S

    def enough() -> bool:
        assert time.monotonic() < until
        return bool(found)

    def said(event: ThrottleEvent) -> None:
        if event.throttle_time > 0:
            found.append(event.throttle_time)

    left = use({"log_level": 0, **properties_of(user), "throttle_cb": said}, enough)
    assert found or left == 0
    return bool(found)


def test_a_guest_that_floods_is_throttled_and_the_run_is_not(
    guarded: tuple[local.LocalStack, str], tmp_path: Path
) -> None:
    stack, team_servers = guarded
    servers = {"bootstrap.servers": team_servers}
    asyncio.run(write(stack, "flooded", tmp_path, Size(tasks=1)))
    keys = ("producer_byte_rate=65536", "consumer_byte_rate=65536", "request_percentage=none")
    quotas = [word for key in keys for word in ("--quota", key)]
    grant(stack, "flooded", "--role", "guest", "--principal", "User:flooder", *quotas)
    grant(stack, "flooded", "--role", "agent", "--principal", "User:agent")
    time.sleep(1)  # The broker applies both a moment later.

    def writes(topic: str) -> Callable[[dict[str, Any], Callable[[], bool]], int]:
        def flood(client: dict[str, Any], enough: Callable[[], bool]) -> int:
            producer = Producer(client | servers)
            for _ in range(BODIES):
                producer.produce(topic, BODY, partition=0)
            while len(producer) and not enough():
                producer.poll(0.05)
            left = len(producer)
            producer.purge()
            return left

        return flood

    def reads(client: dict[str, Any], enough: Callable[[], bool]) -> int:
        own = {"group.id": "flooded.guest", "fetch.max.bytes": 1_000_000}
        consumer = Consumer(client | servers | own)
        consumer.assign([TopicPartition("flooded.trajectories.v1", 0, 0)])
        left = BODIES
        while left and not enough():
            message = consumer.poll(0.05)
            left -= message is not None and message.value() == BODY
        consumer.close()
        return left

    trajectories, tasks = (f"flooded.{name}.v1" for name in ("trajectories", "tasks"))
    assert not throttled(writes(trajectories), "agent")
    assert throttled(writes(tasks), "flooder")
    assert throttled(reads, "flooder")
    assert not throttled(writes(trajectories), "agent")
