"""A member of a consumer group, told what to do by lines and telling what happens by lines.

The contract suite runs it beside a test: as a task on the in-memory log, as a process of its own
(`python broker_member.py SERVERS TOPIC GROUP SESSION_S`) on Kafka, where it can be stopped.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace.services.kafka.broker import Broker, Committed, Partition, Record
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker


async def take_part(
    broker: Broker,
    topic: str,
    group: str,
    hear: Callable[[], Awaitable[str]],
    say: Callable[[str], None],
) -> None:
    """Joins, and says `assigned NUMBERS`, `revoked NUMBERS`, `lost NUMBERS`, `read NUMBER OFFSET`.

    `commit OFFSET` commits for all that it was ever assigned, and says `committed`.
    """
    known: dict[Partition, None] = {}

    async def on_assigned(commits: Mapping[Partition, Committed]) -> None:
        known.update(dict.fromkeys(commits))
        say(f"assigned {_numbers(commits)}")

    async def on_revoked(
        partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        say(f"{'lost' if lost else 'revoked'} {_numbers(partitions)}")
        return {}

    subscription = broker.subscribe([topic], group, on_assigned, on_revoked)

    async def read() -> None:
        while True:
            for item in await subscription.read():
                if isinstance(item, Record):
                    say(f"read {item.partition.number} {item.offset}")

    reading = asyncio.create_task(read())
    try:
        while True:
            order, argument = (await hear()).split()
            assert order == "commit", order
            await subscription.commit(dict.fromkeys(known, Committed(int(argument), "zombie")))
            say("committed")
    finally:
        reading.cancel()


def _numbers(partitions: Mapping[Partition, Committed] | Sequence[Partition]) -> str:
    return ",".join(str(partition.number) for partition in sorted(partitions))


async def _main(servers: str, topic: str, group: str, session_s: str) -> None:
    broker = KafkaBroker(KafkaSettings(servers, "member", session_timeout_s=float(session_s)))
    await take_part(
        broker,
        topic,
        group,
        lambda: asyncio.to_thread(sys.stdin.readline),
        lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
