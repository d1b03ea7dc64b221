"""The statistics of items on a real Kafka: compaction, kill -9, fencing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from random import Random

from headrace.schemas.events import GroupClosed
from headrace.schemas.topics import ITEMS
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import apply
from headrace.services.tasks.curation.read_items import read_items
from headrace.stream_jobs import measure_items
from tests.integration.job_process import a_kafka_context, start_job
from tests.unit.stream_jobs.test_assemble_batches import BOUND_S
from tests.unit.stream_jobs.test_batches import a_recipe
from tests.unit.stream_jobs.test_measure_items import follow_and_recover, values, written
from tests.unit.tasks.test_item_statistics import a_closed_group


def test_items_are_measured_as_groups_come_and_after_a_restart(
    kafka: str, namespace: str, tmp_path: Path
) -> None:
    async def main() -> None:
        contexts = [a_kafka_context(kafka, namespace, tmp_path) for _ in range(2)]
        await follow_and_recover(*contexts)
        for context in contexts:
            await context.log.broker.close()

    asyncio.run(main())


def test_the_topic_of_items_is_compacted_and_has_time_to_be_read(
    kafka: str, namespace: str, tmp_path: Path
) -> None:
    async def main() -> None:
        log = a_kafka_context(kafka, namespace, tmp_path).log
        await apply(log, a_recipe())
        await apply(log, a_recipe())  # what it made itself is right
        name = log.topics.name(ITEMS, "default")
        settings = (await log.broker.topic_settings([name]))[name]
        assert settings["cleanup.policy"] == "compact"
        assert int(settings["min.compaction.lag.ms"]) >= 3_600_000
        # Only closed segments are compacted. With Kafka's defaults, that of a week or of 1 GiB.
        assert int(settings["segment.ms"]) == 3_600_000
        assert int(settings["segment.bytes"]) == 64 * 1024 * 1024
        await log.broker.close()

    asyncio.run(main())


def test_a_killed_job_has_the_statistics_of_an_undisturbed_one(
    kafka: str, namespace: str, tmp_path: Path
) -> None:
    job = (measure_items.SERVICE, kafka, namespace, tmp_path)

    async def send(log: EventLog, groups: list[GroupClosed]) -> None:
        await asyncio.gather(*map(log.send, groups))

    async def some_items(log: EventLog, more_than: int) -> int:
        """Waits until another item was written, so that the kill comes between two writes."""
        async with asyncio.timeout(2 * BOUND_S):
            while (count := len(await read_items(log, "default"))) <= more_than:
                await asyncio.sleep(0.02)
        return count

    async def main() -> None:
        log = a_kafka_context(kafka, namespace, tmp_path).log
        await apply(log, a_recipe())
        random = Random(0)
        groups = [
            a_closed_group(task, f"item {random.randrange(400)}", random.randrange(2), 1.0)
            for task in range(601)  # the last one is for the last process, which must write
        ]
        groups += [groups[number] for number in range(0, 600, 50)]
        process = start_job(*job)
        try:
            measured = 0
            for part in range(3):
                await send(log, groups[part * 200 : (part + 1) * 200])
                measured = await some_items(log, measured)
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = start_job(*job)
            await send(log, groups[600:])
            await written(log, groups)
            assert len(values(await read_items(log, "default"))) > 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0
        finally:
            process.kill()
            process.wait()
            await log.broker.close()

    asyncio.run(main())
