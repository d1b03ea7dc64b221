"""A broker with ACLs: what `prune` sees of it, and what it leaves alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from headrace.errors import UsageError
from headrace.infra import local
from headrace.infra.local import kafka_server
from headrace.infra.local.detached import free_port
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from tests.unit.operate.prune.shared_cluster import SharedCluster

LIMIT_S = 90
JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule"
TEAM = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "team",
    "sasl.password": "secret",
}


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A broker with an authorizer: its addresses for a super user, and for the user `team`."""
    render, port = kafka_server.render_properties, free_port()

    def with_authorizer(plain: int, controller: int, log_folder: str) -> str:
        team = f"TEAM://127.0.0.1:{port}"
        more = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "listeners": f"PLAINTEXT://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller},{team}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},{team}",
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TEAM:SASL_PLAINTEXT"
            ),
            "listener.name.team.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.team.plain.sasl.jaas.config": f'{JAAS} required user_team="secret";',
        }
        text = render(plain, controller, log_folder)
        return text + "".join(f"{key}={value}\n" for key, value in more.items())

    monkeypatch.setattr(kafka_server, "render_properties", with_authorizer)
    state = tmp_path / "stack"
    stack = local.up(state, kafka_port=0, registry_port=0, owner_pid=os.getpid())
    yield stack.bootstrap_servers, f"127.0.0.1:{port}"
    local.down(state, wipe=True)


def test_prune_leaves_alone_what_acls_hide(guarded: tuple[str, str], tmp_path: Path) -> None:
    servers, team_servers = guarded
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
            team = KafkaBroker(KafkaSettings(team_servers, "team", TEAM))
            closing.push_async_callback(owner.close)
            closing.push_async_callback(team.close)
            cluster = SharedCluster(tmp_path, owner, await owner.cluster_id())
            ours = await cluster.make("ours", b"base", b"1", b"2")
            theirs = await cluster.make("theirs", b"base", b"x")
            pruner = cluster.pruner(broker=team)

            literal, prefixed = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
            permit(ResourceType.GROUP, "team", prefixed, AclOperation.READ)
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
