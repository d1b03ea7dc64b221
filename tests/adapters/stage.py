"""A stage for an adapter: the env worker's own code on a log in memory, and who acts in it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from headrace.schemas.codec import Codec
from headrace.schemas.events import ActionRequested, EnvironmentUse, ObservationRecorded
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import OBSERVATIONS, Topics
from headrace.services.base.clock import now_ms
from headrace.services.base.shown import shown
from headrace.services.base.types import TaskView
from headrace.services.env import service
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, EventStream, follow_events
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.namespace.apply import apply
from headrace.services.worker.service_context import ServiceContext
from tests.memory.memory_broker import MemoryCluster
from tests.memory.memory_registry import MemoryRegistry

ANSWER_S = 60.0
"""Most seconds until an action is answered."""


def view(seed: int = 0, payload: Mapping[str, Any] | None = None, sample: int = 0) -> TaskView:
    """A task as an environment sees it."""
    return TaskView(number=0, sample=sample, payload=payload or {}, options={}, seed=seed)


def recipe(use: str, options: Mapping[str, Any], **more: Any) -> Recipe:
    """A recipe of one environment. `more` are further keys of it."""
    tree = {
        "name": "stage",
        "partitions": 1,
        "environments": {"default": {"use": use, "options": options, **more}},
        "policies": {"default": {"model": "tiny-llama", "training": False}},
    }
    return parse_recipe(tree, "the stage")


class Stage:
    """Env workers come and go; episodes are acted in by their actions alone."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._recipe = recipe
        self._folder = folder
        self._cluster = MemoryCluster()
        self._registry = MemoryRegistry()
        self._topics = Topics("stage", tuple(recipe.policies), recipe.partitions)
        self._answers: asyncio.Queue[ObservationRecorded] = asyncio.Queue()
        self._workers: list[tuple[ServiceContext, asyncio.Task[None]]] = []
        self._log = self._open("stage")
        self._index = -1
        self._seen: bytes | None = None
        """Digest of the last answer."""

    @asynccontextmanager
    async def played(self) -> AsyncIterator[Stage]:
        """A worker is there from the beginning; at the end all are gone."""
        await apply(self._log, self._recipe)
        observations = Partition(self._topics.name(OBSERVATIONS), 0)
        reader = follow_events(self._log, {observations: "first"})
        hearing = asyncio.create_task(self._hear(reader))
        self.start()
        try:
            yield self
        finally:
            await self.stop()
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            await reader.aclose()

    def start(self) -> None:
        """One more worker."""
        name = f"env-{len(self._workers)}"
        context = ServiceContext(
            log=self._open(name),
            recipe=self._recipe,
            blobs=LocalBlobStore(self._folder),
            worker_id=name,
            state=self._folder,
            stopping=asyncio.Event(),
            ending=asyncio.Event(),
        )
        self._workers.append((context, asyncio.create_task(service.run(context))))

    async def stop(self) -> None:
        """Every worker ends as by SIGTERM."""
        for context, running in self._workers:
            context.stopping.set()
            await running
        self._workers.clear()

    async def reset(
        self, task: int = 0, seed: int = 0, payload: Mapping[str, Any] | None = None, **more: Any
    ) -> ObservationRecorded:
        """Begins an episode. `more` goes over the event's fields."""
        self._index, self._seen = -1, None
        return await self._ask("reset", payload or {}, task=task, seed=seed, **more)

    async def step(self, action: str, task: int = 0, **more: Any) -> ObservationRecorded:
        """Acts in it. `more` goes over the event's fields."""
        return await self._ask("step", {"action": action}, task=task, **more)

    async def close(self, task: int = 0) -> None:
        """Ends it. Nothing answers."""
        await self._send("close", {}, task=task)

    async def _ask(self, kind: str, payload: Mapping[str, Any], **more: Any) -> ObservationRecorded:
        await self._send(kind, payload, **more)
        while True:
            answer = await asyncio.wait_for(self._answers.get(), ANSWER_S)
            if answer.index == self._index:
                self._seen = shown(answer)
                return answer

    async def _send(self, kind: str, payload: Mapping[str, Any], **more: Any) -> None:
        self._index += 1
        fields = {
            "sample": 0,
            "call": str(self._index + 1),
            "index": self._index,
            "kind": kind,
            "environment": EnvironmentUse(use="default"),
            "payload": json.dumps(payload),
            "expires_at": now_ms() + 600_000,
            "digest": bytes(16),
            "after": self._seen,
        }
        await self._log.send(ActionRequested(**{**fields, **more}), 0)

    async def _hear(self, reader: EventStream) -> None:
        async for item in reader:
            if not isinstance(item, CaughtUp) and isinstance(item.event, ObservationRecorded):
                self._answers.put_nowait(item.event)

    def _open(self, name: str) -> EventLog:
        codec = Codec()
        self._registry.prepare(codec, self._topics)
        client = self._cluster.client(name)
        return EventLog(client, self._topics, codec, self._registry, name)


@contextmanager
def server(command: Sequence[str], **environment: str) -> Iterator[tuple[str, int]]:
    """A server that prints its port as its first line: its address and its process."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment})
    with process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()
