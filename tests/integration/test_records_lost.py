"""Records deleted on a real broker under what still needs them: said, never passed over."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource

from headrace.errors import RecordsLost
from headrace.infra import local
from headrace.schemas.topics import EPISODES, OBSERVATIONS, POLICIES, TRAJECTORIES
from headrace.services.kafka.broker import Broker, Outgoing, Partition
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.worker.shard import ShardContext
from headrace.services.worker.worker import Worker
from headrace.trainer import service
from tests.commands import cluster_variables, run_command
from tests.integration.test_trainer import Bench, facts

BOUND_S = 60.0


async def delete_records(servers: str, place: Partition, before: int) -> None:
    """As retention does."""
    with AdminClient({"bootstrap.servers": servers}) as admin:
        asked = [TopicPartition(place.topic, place.number, before)]
        for gone in admin.delete_records(asked).values():
            await asyncio.wrap_future(gone)


def on_kafka(servers: str, test: Callable[[Broker], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(servers, "test"))
        try:
            async with asyncio.timeout(BOUND_S):
                await test(broker)
        finally:
            await broker.close()

    asyncio.run(main())


@pytest.fixture
def headrace(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> Callable[..., subprocess.CompletedProcess[str]]:
    environment = cluster_variables(local_stack, namespace, tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command(arguments, environment, timeout_s=BOUND_S)

    return run


def test_a_consumer_group_whose_records_are_gone_exits_4(
    headrace: Callable[..., subprocess.CompletedProcess[str]], kafka: str, namespace: str
) -> None:
    one_partition = ("null", "--set", "partitions=1")
    assert headrace("apply", *one_partition).returncode == 0
    groups = {"scheduler": f"{namespace}.tasks.v1", "assemble-groups": f"{namespace}.results.v1"}

    async def lose(broker: Broker) -> None:
        for topic in groups.values():
            for _ in range(3):
                await broker.send(Outgoing(topic, b"k", b"never read"))
            await delete_records(kafka, Partition(topic, 0), 2)

    on_kafka(kafka, lose)
    for name, topic in groups.items():
        done = headrace("serve", name, *one_partition)
        assert done.returncode == 4, done.stderr
        lost = f"{topic}/0: 2 records are lost, offsets 0 to 1: the consumer group"
        assert f"error: {lost} {namespace}.{name}" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_companion_whose_records_are_gone_ends_the_worker(
    tmp_path: Path, kafka: str, namespace: str
) -> None:
    class Shard:
        def __init__(self, context: ShardContext) -> None: ...

        async def on_event(self, delivery: object) -> None: ...

        async def on_caught_up(self) -> None: ...

        async def aclose(self) -> None: ...

    async def test(broker: Broker) -> None:
        bench = Bench(broker, tmp_path, namespace)
        await bench.make_topics()
        topics, group = bench.log.topics, f"{namespace}.env"
        main = [Partition(topics.name(EPISODES), number) for number in range(2)]
        await broker.commit_first(group, main)
        await stand_at(kafka, group, main[0], "[1]")
        side_partition = Partition(topics.name(OBSERVATIONS), 0)
        for _ in range(4):
            await broker.send(Outgoing(side_partition.topic, b"k", b"never read", partition=0))
        await delete_records(kafka, side_partition, 4)
        worker = Worker(
            bench.log,
            topics=[main[0].topic],
            consumer_group=group,
            make_shard=Shard,
            stopping=asyncio.Event(),
            side_partitions=lambda place: {
                Partition(side_partition.topic, place.number): "committed"
            },
        )
        with pytest.raises(RecordsLost, match=f"{side_partition.topic}/0: 3 .* offsets 1 to 3: "):
            await worker.run()

    on_kafka(kafka, test)


async def stand_at(servers: str, group: str, place: Partition, note: str) -> None:
    """Commits offset 0 with a note, as an owner does."""
    with AdminClient({"bootstrap.servers": servers}) as admin:
        from confluent_kafka import ConsumerGroupTopicPartitions

        at = TopicPartition(place.topic, place.number, 0, note)
        asked = [ConsumerGroupTopicPartitions(group, [at])]
        for done in admin.alter_consumer_group_offsets(asked).values():
            await asyncio.wrap_future(done)


def test_a_new_batch_whose_trajectories_are_gone_is_skipped(
    tmp_path: Path, kafka: str, namespace: str
) -> None:
    async def test(broker: Broker) -> None:
        bench = Bench(broker, tmp_path, namespace)
        await bench.make_topics()
        await bench.submit(1)
        places = [Partition(bench.log.topics.name(TRAJECTORIES), number) for number in range(2)]
        for place, (_, end) in (await broker.ends(places)).items():
            await delete_records(kafka, place, end)
        await bench.submit(2)
        published = await bench.train(2)
        assert facts(published) == [(0, "initial", 0), (1, "skipped", 0), (2, "trained", 2)]
        place = Partition(bench.log.topics.name(POLICIES), 0)
        await delete_records(kafka, place, (await broker.ends([place]))[place][1])
        with pytest.raises(RecordsLost, match="no version of policy learner"):
            await service.run(bench.context(), "learner")

    on_kafka(kafka, test)


def test_apply_refuses_retention_that_cuts_what_is_needed(
    headrace: Callable[..., subprocess.CompletedProcess[str]], kafka: str, namespace: str
) -> None:
    assert headrace("apply", "null").returncode == 0
    topic = f"{namespace}.trajectories.v1"
    alter(kafka, topic, {"retention.ms": "3600000", "cleanup.policy": "compact"})
    refused = headrace("apply", "null")
    assert refused.returncode == 2
    assert f"{topic}: cleanup.policy is compact, and must be delete" in refused.stderr
    assert f"{topic}: retention.ms is 3600000 (0.0417 days)" in refused.stderr
    command = refused.stderr.strip().splitlines()[-1]
    assert f"--entity-name {topic} --add-config " in command

    mended = dict(one.split("=") for one in command.split()[-1].split(","))
    alter(kafka, topic, mended)
    assert headrace("apply", "null").returncode == 0


def alter(servers: str, topic: str, settings: dict[str, str]) -> None:
    """What the command that mends does."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    with AdminClient({"bootstrap.servers": servers}) as admin:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        for done in admin.incremental_alter_configs([resource]).values():
            done.result(30)
