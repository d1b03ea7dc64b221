"""A broker with ACLs: what `prune` sees and leaves alone, what `doctor` says, who may watch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
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
from headrace.services.operate.doctor.doctor import diagnose
from headrace.services.operate.doctor.finding import Finding
from tests.guarded_stack import guarded_stack, properties_of
from tests.integration.test_dashboard import dashboard, write
from tests.unit.operate.prune.shared_cluster import SharedCluster
from tests.written_run import Size

LIMIT_S = 90
USERS = ("team", "worker", "reader")
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
