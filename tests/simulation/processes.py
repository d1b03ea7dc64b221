"""A whole run in one loop: each service as a process of its own, to be killed and frozen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from schemas.codec import Codec
from schemas.events import BatchAssembled, PolicyPublished, TaskEnded
from schemas.recipe import Recipe
from schemas.topics import BATCHES, POLICIES, RESULTS, Topics
from services.agent import service as agent
from services.apply import apply
from services.blobs import LocalBlobStore
from services.clock import now
from services.context import ServiceContext
from services.env import service as env
from services.errors import DependencyError
from services.inference import service as inference
from services.kafka.broker import Partition
from services.kafka.memory import MemoryBroker, MemoryCluster
from services.kafka.memory_faults import Faults
from services.kafka.memory_registry import MemoryRegistry
from services.log import CaughtUp, Delivery, EventLog, EventReader
from services.scheduler import service as scheduler
from services.shard import ShardContext
from services.source import service as source
from services.weights import weights_digest
from services.worker import Worker
from stream_jobs import assemble_batches
from stream_jobs.groups import GroupAssembler
from tests.simulation.loop_child import LoopChild
from tests.simulation.virtual_time import VirtualTimeLoop

RESTART_S = 0.5
LATENCY_S = 0.004
"""Mean virtual seconds of each way to the log."""
SERVICES: dict[str, tuple[Callable[[ServiceContext], Awaitable[None]], int]] = {}
"""Service to what it runs and how many processes of it there are."""

_process: ContextVar[Process | None] = ContextVar("process", default=None)


def this_process() -> Process:
    """The one that the running task belongs to."""
    process = _process.get()
    assert process is not None
    return process


class Process:
    """One service's process: started again whenever it ends before the run does."""

    def __init__(self, run: Run, service: str, number: int) -> None:
        self.service = service
        self.name = f"{service}-{number}"
        self.starts = 0
        self.client: MemoryBroker | None = None
        self._run = run
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._supervisor = asyncio.create_task(self._supervise(), name=self.name)

    async def stop(self) -> None:
        """Ends it in order. Raises what it failed with, if a restart is no answer to that."""
        self._stopping.set()
        await self._supervisor

    def kill(self) -> None:
        """Ends it as SIGKILL does: first nothing reaches the log any more."""
        if self.client is not None:
            self.client.kill()
        for task in list(self._tasks):
            task.cancel()

    def own(self, task: asyncio.Task[Any]) -> None:
        """Counts a task as part of this process."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _supervise(self) -> None:
        finished = False
        while not finished and not self._stopping.is_set():
            self.starts += 1
            self.client = self._run.cluster.client(f"{self.name}-{self.starts}")
            _process.set(self)
            main = asyncio.create_task(self._main(self.client))
            _process.set(None)
            stop = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({main, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            with suppress(asyncio.CancelledError, DependencyError):  # killed, or cut off
                await main
                finished = self.service == "source"
            self.client.kill()
            if not finished and not self._stopping.is_set():
                await asyncio.sleep(RESTART_S)

    async def _main(self, client: MemoryBroker) -> None:
        service, _ = SERVICES[self.service]
        context = self._run.context(client, f"{self.name}-{self.starts}", self._stopping)
        try:
            await service(context)
        finally:
            await client.close()


class Run:
    """A namespace in memory, and the processes that work on it."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe = recipe
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.set_task_factory(_task_of_process)
        self.cluster = MemoryCluster(faults=Faults(loop.random, latency_s=LATENCY_S))
        self.topics = Topics(recipe.name, tuple(recipe.policies), recipe.partitions)
        self.ending = asyncio.Event()
        self.processes: list[Process] = []
        self._folder = folder
        self._registry = MemoryRegistry()
        self._blobs = LocalBlobStore(folder / "blobs")

    def log(self, client: MemoryBroker, name: str) -> EventLog:
        """The typed log, as one process sees it."""
        codec = Codec()
        self._registry.prepare(codec, self.topics)
        return EventLog(client, self.topics, codec, self._registry, name)

    def context(self, client: MemoryBroker, name: str, stopping: asyncio.Event) -> ServiceContext:
        """A process's surroundings."""
        log = self.log(client, name)
        return ServiceContext(
            log, self.recipe, self._blobs, name, self._folder, stopping, self.ending
        )

    async def start(self) -> EventLog:
        """Makes the namespace and starts all processes; returns a log to look on."""
        log = self.log(self.cluster.client("test"), "test")
        await apply(log, self.recipe)
        for service, (_, count) in SERVICES.items():
            self.processes += [Process(self, service, number) for number in range(count)]
        return log

    async def stop(self) -> None:
        """Ends all processes in order."""
        await asyncio.gather(*(process.stop() for process in self.processes))


def _task_of_process(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    process = _process.get()
    if process is not None:
        process.own(task)
    return task


class _GroupShard:
    """The core of the Faust job, hosted by Worker: a result's groups, durable before the next."""

    def __init__(self, shard: ShardContext, recipe: Recipe) -> None:
        self._shard = shard
        self._assembler = GroupAssembler(recipe)
        self._early: list[tuple[Delivery[TaskEnded], Callable[[], None]]] = []

    async def on_event(self, delivery: Delivery[TaskEnded]) -> None:
        """Closes the task's groups."""
        if not self._shard.caught_up:
            self._early.append((delivery, self._shard.hold(delivery)))
            return
        recorded_at_ms = round(delivery.recorded_at * 1000)
        await self._shard.send_all(self._assembler.on_task(delivery.event, recorded_at_ms))

    async def on_caught_up(self) -> None:
        """Closes what came before."""
        for delivery, release in self._early:
            await self.on_event(delivery)
            release()

    async def aclose(self) -> None:
        """Nothing to say."""


async def assemble_groups(context: ServiceContext) -> None:
    """Stands in for `stream_jobs.assemble_groups`, which needs a real Kafka."""
    await Worker(
        context.log,
        topics=[context.log.topics.name(RESULTS)],
        consumer_group=context.consumer_group("assemble-groups"),
        make_shard=lambda shard: _GroupShard(shard, context.recipe),
        stopping=context.stopping,
    ).run()


async def run_agent(context: ServiceContext) -> None:
    """The agent worker, whose children are no processes."""
    await agent.run(context, partial(LoopChild.start, context.recipe))


async def train(context: ServiceContext) -> None:
    """Stands in for the trainer: publishes version n a moment after batch n."""
    work = asyncio.create_task(_train(context))
    stop = asyncio.create_task(context.stopping.wait())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, stop):
            task.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)


async def _train(context: ServiceContext) -> None:
    log, topics = context.log, context.log.topics
    writer = await log.broker.fenced(context.consumer_group("trainer"))
    weights = _weights()
    digest = weights_digest(weights)
    blob = context.blobs.put(weights)

    async def publish(version: int, batch: Any) -> None:
        published = PolicyPublished(
            policy="default",
            version=version,
            status="trained" if version else "initial",
            batch=batch,
            digest=digest,
            full=blob,
            full_version=version,
        )
        await log.send_all(writer, [published])

    newest = -1
    history = EventReader(log, {Partition(topics.name(POLICIES), 0): "first"})
    async for item in history:
        if isinstance(item, CaughtUp):
            break
        newest = max(newest, item.event.version)  # type: ignore[attr-defined]
    await history.aclose()
    if newest < 0:
        await publish(0, None)
    async for item in EventReader(log, {Partition(topics.name(BATCHES, "default"), 0): "first"}):
        if isinstance(item, Delivery) and isinstance(item.event, BatchAssembled):
            if item.event.version <= newest:
                continue
            began = now()
            await log.fetch([sample.trajectory for sample in item.event.samples])
            await asyncio.sleep(max(0.0, began + 0.3 - now()))
            newest = item.event.version
            await publish(newest, item.ref)


def _weights() -> bytes:
    """A sound safetensors file of one number."""
    header: Mapping[str, Any] = {"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0"


SERVICES.update(
    {
        "source": (source.run, 1),
        "scheduler": (scheduler.run, 2),
        "agent": (run_agent, 2),
        "env": (env.run, 2),
        "inference": (inference.run, 2),
        "assemble-groups": (assemble_groups, 2),
        "assemble-batches": (assemble_batches.run, 1),
        "trainer": (train, 1),
    }
)
