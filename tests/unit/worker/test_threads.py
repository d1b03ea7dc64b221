"""How many calls of `asyncio.to_thread` run at once in the workers that run users' code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace.schemas.codec import Codec
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.topics import Topics
from headrace.services.agent import service as agent
from headrace.services.env import service as env
from headrace.services.log.event_log import EventLog
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.namespace.apply import apply
from headrace.services.worker.service_context import ServiceContext
from tests.memory.memory_broker import MemoryCluster
from tests.memory.memory_registry import MemoryRegistry

ASYNCIO_MOST = 32
"""Most threads that asyncio has by itself, on any machine."""


@pytest.mark.parametrize(
    ("run", "threads"), [(env.run, 3 + env.SPARE_THREADS), (agent.run, agent.MOST_THREADS)]
)
def test_a_worker_has_more_threads_than_asyncio_has_by_itself(
    run: Callable[[ServiceContext], Awaitable[None]], threads: int, tmp_path: Path
) -> None:
    recipe = parse_recipe(
        {
            "name": "test",
            "partitions": 1,
            "environments": {"default": {"use": "null", "slots": 3}},
            "policies": {"default": {"model": "tiny-llama", "training": False}},
        },
        "the test",
    )
    meeting = threading.Barrier(threads)

    async def main() -> None:
        topics = Topics("test", tuple(recipe.policies), recipe.partitions)
        codec, registry = Codec(), MemoryRegistry()
        registry.prepare(codec, topics)
        log = EventLog(MemoryCluster().client("x"), topics, codec, registry, "x")
        await apply(log, recipe)
        stopping = asyncio.Event()
        blobs = LocalBlobStore(tmp_path)
        context = ServiceContext(log, recipe, blobs, "x", tmp_path, stopping, asyncio.Event())
        running = asyncio.ensure_future(run(context))
        await asyncio.sleep(0.1)
        try:
            # Each call returns once all of them run.
            await asyncio.gather(*(asyncio.to_thread(meeting.wait, 5) for _ in range(threads)))
        finally:
            stopping.set()
            await running

    assert threads > ASYNCIO_MOST
    asyncio.run(main())
