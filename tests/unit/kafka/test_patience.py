"""How long a request is repeated, by what the broker answers."""

from __future__ import annotations

import asyncio

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace.errors import HeadraceError
from headrace.services.kafka import admin
from headrace.services.kafka.admin import Admin
from headrace.services.kafka.broker import Partition
from headrace.services.kafka.client_settings import KafkaSettings

AT = Partition("n.things.v1", 0)


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        (KafkaError.UNKNOWN_LEADER_EPOCH, True),
        (KafkaError.NOT_LEADER_FOR_PARTITION, True),
        (KafkaError.NOT_COORDINATOR, True),
        (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, True),
        (KafkaError.COORDINATOR_NOT_AVAILABLE, False),
        (KafkaError.REQUEST_TIMED_OUT, False),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, False),
    ],
)
def test_a_partition_that_its_leader_has_not_opened_has_more_time(
    code: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local Kafka with the topics of 75 runs, on a busy machine, took a minute to open them.

    One with 4,500 partitions that stood still for 4 s coordinated no group for 2 to 4 s more.
    """
    monkeypatch.setattr(admin, "PATIENCE_S", 0.0)

    async def main() -> None:
        client = Admin(KafkaSettings("nowhere:1", "test"))
        asked = 0

        def answer(_: object) -> dict[Partition, tuple[int, int]]:
            nonlocal asked
            asked += 1
            if asked < 4:
                raise KafkaException(KafkaError(code))
            return {AT: (0, 7)}

        monkeypatch.setattr(client, "_ends", answer)
        try:
            if waits:
                assert await client.ends([AT]) == {AT: (0, 7)}
            else:
                with pytest.raises(HeadraceError):
                    await client.ends([AT])
                assert asked == 1
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))
