"""A stream job on a real Kafka, as a process of its own that a test may kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.worker.service_context import ServiceContext
from headrace.stream_jobs import assemble_groups, measure_items
from tests.unit.stream_jobs.test_assemble_batches import a_context
from tests.unit.stream_jobs.test_batches import a_recipe

ROOT = Path(__file__).parents[2]


def a_kafka_context(servers: str, namespace: str, state: Path) -> ServiceContext:
    return a_context(KafkaBroker(KafkaSettings(servers, "test")), namespace, a_recipe(), state)


def start_job(job: str, servers: str, namespace: str, state: Path) -> subprocess.Popen[bytes]:
    """Starts `assemble-groups` or `item-statistics`."""
    command = [sys.executable, __file__, job, servers, namespace, str(state)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


async def serve(job: str, servers: str, namespace: str, state: Path) -> None:
    """Runs the job until SIGTERM."""
    context = a_kafka_context(servers, namespace, state)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, context.stopping.set)
    if job == assemble_groups.SERVICE:
        await assemble_groups.run(context, servers)
    else:
        assert job == measure_items.SERVICE
        # It writes often, so that a kill finds it at work.
        measure_items.WRITE_EVERY_S = 0.01
        measure_items.MAX_CHANGED = 8
        await measure_items.run(context)
    await context.log.broker.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
