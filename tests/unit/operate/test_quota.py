"""What `headrace quota` counts for a tenant."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.schemas.events import Failure
from headrace.services.operate.quota.quota import read_tenants
from tests.memory.memory_broker import MemoryBroker
from tests.unit.stream_jobs.test_assemble_batches import BOUND_S, a_context, make_topics
from tests.unit.stream_jobs.test_batches import a_start
from tests.unit.tasks.test_curation import curated


def test_a_task_that_is_not_run_is_no_live_episode_of_its_tenant(tmp_path: Path) -> None:
    async def main() -> None:
        recipe, broker = curated(), MemoryBroker()
        log = a_context(broker, "space", recipe, tmp_path).log
        await make_topics(log)
        tasks = [a_start(task, 0).submitted for task in range(4)]
        for task in tasks:
            await log.send(task)
        verdict = Failure(origin="operator", code="cancelled", message="by its tenant")
        await log.send(a_start(0, 0))
        await log.send(a_start(1, 0).model_copy(update={"verdict": verdict}))
        (row,) = await read_tenants(log, recipe)
        assert (row.tenant, row.live, row.queued) == (tasks[0].tenant, 1, 2)
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))
