"""A whole run in one loop: each service as a process of its own, to be killed and frozen."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any, cast

from headrace.errors import DependencyError, RecordsLost
from headrace.schemas.codec import Codec
from headrace.schemas.events import TaskEnded
from headrace.schemas.topics import RESULTS, Topics
from headrace.services.agent import service as agent
from headrace.services.env import service as env
from headrace.services.inference import service as inference
from headrace.services.kafka.broker import Broker, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.namespace.apply import apply
from headrace.services.namespace.lookup import topics_of
from headrace.services.scheduler import service as scheduler
from headrace.services.tasks import evaluation_source as evaluation
from headrace.services.tasks import source
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.shard import ShardContext
from headrace.services.worker.worker import Worker
from headrace.stream_jobs import assemble_batches, measure_items
from headrace.stream_jobs.groups import GroupAssembler
from headrace.stream_jobs.turn_rows import project_turns
from headrace.trainer.loop import Trainer
from headrace.trainer.publish import sole_publisher
from tests.memory.memory_broker import MemoryBroker, MemoryCluster
from tests.memory.memory_faults import Faults
from tests.memory.memory_registry import MemoryRegistry
from tests.simulation.blobs import SharedBlobs
from tests.simulation.calls import pauses
from tests.simulation.chronicle import Chronicle
from tests.simulation.learner import DigestLearner
from tests.simulation.loop_child import LoopChild
from tests.simulation.scenario import Scenario
from tests.simulation.teaching import TEACHER
from tests.simulation.tenant_keys import Request
from tests.simulation.virtual_time import OWNER, loop

RESTART_S = 0.5
LATE_S = {"env": 1.0}
"""Seconds that the first start of a service takes, in which the others work already."""
UNUSABLE_IN = 6
"""One in so many batches can't be trained on, where that is on."""


class Process:
    """One service's process: started again whenever it ends before it is told to."""

    def __init__(self, run: Run, service: str, number: int, policy: str | None = None) -> None:
        """`policy` is that of a service which has one process for each policy."""
        self.service = service
        self.number = number
        self.policy = policy
        kind = service if policy in (None, "default", TEACHER) else f"{service}-{policy}"
        self.name = f"{kind}-{number}"
        self.starts = self.life = 0
        self.client: MemoryBroker | None = None
        self.clock_error_s = 0.0
        self.frozen = False
        self.overslept = False
        """Whether the log has gone on without it in this life."""
        self._run = run
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._stopping = asyncio.Event()
        self._draining: asyncio.Event | None = None
        """Of this life; None before the first one."""
        self._leaving = False
        self._supervisor = asyncio.create_task(self._supervise(), name=self.name)

    async def stop(self) -> None:
        """Ends it in order, and for good. Raises what it failed with, if that is no restart's."""
        self._stopping.set()
        await self._supervisor

    async def drain(self, most_s: float) -> None:
        """Lets it finish what it has, and end for good. Returns after `most_s` in any case."""
        self._leaving = True
        if self._draining is not None:
            self._draining.set()
            await asyncio.wait({self._supervisor}, timeout=most_s)

    def done(self) -> bool:
        """Whether it has ended for good."""
        return self._supervisor.done()

    def failure(self) -> BaseException | None:
        """What it ended with, if a restart is no answer to that."""
        return self._supervisor.exception() if self._supervisor.done() else None

    def kill(self) -> None:
        """Ends it as SIGKILL does: first nothing reaches the log any more."""
        self.life += 1
        if self.client is not None:
            self.client.kill()
        for task in list(self._tasks):
            task.cancel()
        self.thaw()

    def freeze(self) -> None:
        """Stops it, as SIGSTOP does."""
        if not self.frozen and self.client is not None:
            self.frozen = self.overslept = True
            pauses(self).append([loop().time(), inf])
            self.client.freeze()
            loop().freeze(self)

    def thaw(self) -> None:
        """Lets it run on, as SIGCONT does."""
        if self.frozen and self.client is not None:
            self.frozen = False
            pauses(self)[-1][1] = loop().time()
            loop().thaw(self)
            self.client.thaw()

    def own(self, task: asyncio.Task[Any]) -> None:
        """Counts a task as part of this process."""
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def work_s(self) -> float:
        """Seconds that an update of the learner takes; now and then more than it may."""
        return loop().random.choice([0.05, 0.3, 0.3, 6.0])

    async def _supervise(self) -> None:
        finished = False
        await asyncio.sleep(LATE_S.get(self.service, 0.0))
        while not finished and not self._leaving and not self._stopping.is_set():
            self.starts += 1
            self.thaw()  # Frozen while it was down: that was nobody.
            self.life += 1
            self.frozen = self.overslept = False
            self.client = self._run.cluster.client(f"{self.name}.{self.starts}")
            OWNER.set(self)
            main = asyncio.create_task(self._main(self.client))
            OWNER.set(None)
            stop = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({main, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            with suppress(asyncio.CancelledError):  # killed
                try:
                    await main
                except (DependencyError, RecordsLost) as error:
                    # Here retention is quicker than a zombie; nobody else may miss a record.
                    if isinstance(error, RecordsLost) and not self.overslept:
                        raise
                    self._run.chronicle.note(f"exits: {error}", self.name)
                else:
                    finished = self.service == "source"
            self.thaw()
            self.client.kill()
            if not finished and not self._leaving and not self._stopping.is_set():
                await asyncio.sleep(RESTART_S)

    async def _main(self, client: MemoryBroker) -> None:
        service = SERVICES[self.service]
        context = self._run.context(client, f"{self.name}.{self.starts}", self._stopping)
        self._draining = context.draining
        try:
            await service(context)
        finally:
            await client.close()


class Run:
    """A namespace in memory, and the processes that work on it."""

    def __init__(self, scenario: Scenario, folder: Path, chronicle: Chronicle) -> None:
        self.scenario = scenario
        self.recipe = scenario.recipe
        self.chronicle = chronicle
        loop().__dict__["simulation_run"] = self
        self.cluster = MemoryCluster(faults=scenario.faults)
        recipe = self.recipe
        self.topics = topics_of(recipe, recipe.name)
        self.ending = asyncio.Event()
        self.processes: list[Process] = []
        self.struck_s = 0.0
        """Virtual seconds until the last fault struck."""
        self.expired: list[Record] = []
        """What retention deleted."""
        self.requests: list[Request] = []
        """What was written for tenants with keys, and by whom."""
        self.folder = folder
        self.blobs = SharedBlobs(folder / "blobs", scenario.blob_faults, chronicle)
        self._registry = MemoryRegistry()

    def log(self, client: MemoryBroker, name: str) -> EventLog:
        """The typed log, as one process sees it."""
        codec = Codec()
        self._registry.prepare(codec, self.topics)
        return EventLog(client, self.topics, codec, self._registry, name)

    def forger(self, broker: Broker) -> EventLog:
        """A log that knows no keys, so that it writes whatever it is told to."""
        known, codec = self.topics, Codec()
        plain = Topics(
            known.namespace, known.policies, known.partitions, pool_partitions=known.pool_partitions
        )
        self._registry.prepare(codec, plain)
        return EventLog(broker, plain, codec, self._registry, "somebody")

    def context(self, client: MemoryBroker, name: str, stopping: asyncio.Event) -> ServiceContext:
        """A process's surroundings."""
        log = self.log(client, name)
        state = self.folder / name.partition(".")[0]
        return ServiceContext(log, self.recipe, self.blobs, name, state, stopping, self.ending)

    async def start(self) -> EventLog:
        """Makes the namespace and starts all processes; returns a log to look on."""
        # Who looks on has no faults.
        log = self.log(self.cluster.client("test", Faults(Random(0))), "test")
        await apply(log, self.recipe)
        for service, count in self.scenario.processes.items():
            for _ in range(count):
                for policy in self.policies_of(service):
                    self.add(service, policy)
        for name, one in self.recipe.policies.items():
            if one.training is None:
                self.add(TEACHER, name)
        return log

    def policies_of(self, service: str) -> list[str | None]:
        """The policies that have a process of this service each. [None] if it serves all."""
        if service not in OF_A_POLICY:
            return [None]
        return [name for name, one in self.recipe.policies.items() if one.training is not None]

    def add(self, service: str, policy: str | None = None) -> Process:
        """Starts one more process of a service; if it is of a policy, of the first by default."""
        if service != TEACHER and policy is None:
            policy = self.policies_of(service)[0]
        number = sum((one.service, one.policy) == (service, policy) for one in self.processes)
        process = Process(self, service, number, policy)
        self.processes.append(process)
        return process

    def running(self, service: str | None = None, policy: str | None = None) -> list[Process]:
        """The processes that have not ended for good: of one service or policy, or all."""
        return [
            process
            for process in self.processes
            if not process.done()
            and service in (None, process.service)
            and policy in (None, process.policy)
        ]

    async def stop(self) -> None:
        """Ends all processes in order."""
        await asyncio.gather(*(process.stop() for process in self.processes))


def this_process() -> Process:
    """The one that the running task belongs to."""
    owner = OWNER.get()
    assert isinstance(owner, Process)
    return owner


class _GroupShard:
    """The core of the Faust job, hosted by Worker: a result's groups, durable before the next."""

    def __init__(self, shard: ShardContext, assembler: GroupAssembler) -> None:
        self._shard = shard
        self._assembler = assembler
        self._early: list[tuple[Delivery[TaskEnded], Callable[[], None]]] = []

    async def on_event(self, delivery: Delivery[TaskEnded]) -> None:
        """Closes the task's groups."""
        if not self._shard.caught_up:
            self._early.append((delivery, self._shard.hold(delivery)))
            return
        recorded_at_ms = round(delivery.recorded_at * 1000)
        groups = self._assembler.on_task(delivery.event, recorded_at_ms)
        await asyncio.gather(*map(self._shard.send, groups))

    async def on_caught_up(self) -> None:
        """Closes what came before."""
        for delivery, release in self._early:
            await self.on_event(delivery)
            release()

    async def aclose(self) -> None:
        """Nothing to say."""


async def assemble_groups(context: ServiceContext) -> None:
    """Stands in for `headrace.stream_jobs.assemble_groups`, which needs a real Kafka."""
    assembler = GroupAssembler(context.recipe)
    await Worker(
        context.log,
        topics=[context.log.topics.name(RESULTS)],
        consumer_group=context.consumer_group("assemble-groups"),
        make_shard=lambda shard: _GroupShard(shard, assembler),
        stopping=context.stopping,
    ).run()


async def run_agent(context: ServiceContext) -> None:
    """The agent worker, whose children are no processes."""
    await agent.run(context, partial(LoopChild.start, context.recipe))


async def train(context: ServiceContext) -> None:
    """The trainer's own loop, around a learner without a model."""
    owner = this_process()
    run: Run = loop().__dict__["simulation_run"]

    def on_saving(half: Path) -> None:
        if loop().random.random() < run.scenario.crash_while_saving:
            run.chronicle.fault("dies while it writes a checkpoint", owner.name)
            folder = half.parent
            # What SIGKILL leaves behind: this process will clear up, being only cancelled.
            shutil.copytree(folder, folder.with_name(f"{folder.name}-left"))
            owner.kill()

    assert owner.policy is not None
    learner = new_learner(run.scenario, owner.policy, on_saving)
    async with sole_publisher(context, owner.policy) as publisher:
        thread = ThreadPoolExecutor(1)  # never used: the loop runs what it is given
        stand_in = cast("Any", learner)
        await Trainer(context, publisher, stand_in, thread).run()


async def keep_teacher(context: ServiceContext) -> None:
    """Stands in for the trainer of a policy that is not trained: publishes version 0."""
    policy = this_process().policy or TEACHER
    weights = DigestLearner(policy=policy).weights()
    async with sole_publisher(context, policy) as publisher:
        if publisher.history.newest is None:
            await publisher.publish(0, "initial", weights)
        else:
            await publisher.resume(publisher.history.newest, weights)
        while not context.stopping.is_set():
            await asyncio.sleep(1.0)
            await publisher.repair(0)


def new_learner(
    scenario: Scenario, policy: str, on_saving: Callable[[Path], None] = lambda _: None
) -> DigestLearner:
    """The learner of a policy of a scenario, at version 0."""
    chance = loop().random if "weights differ" in scenario.misbehaviour else None
    unusable_in = UNUSABLE_IN if "batches unusable" in scenario.misbehaviour else 0
    return DigestLearner(chance, unusable_in, on_saving, policy)


async def batch(context: ServiceContext) -> None:
    """Batch assembly of the process's policy."""
    await assemble_batches.run(context, this_process().policy)


async def measure(context: ServiceContext) -> None:
    """The statistics of items, of the process's policy."""
    await measure_items.run(context, this_process().policy)


OF_A_POLICY = ("assemble-batches", "item-statistics", "trainer")
"""Services that have a process for each policy."""
SERVICES: dict[str, Callable[[ServiceContext], Awaitable[None]]] = {
    "source": source.run,
    "evaluation": evaluation.run,
    "scheduler": scheduler.run,
    "agent": run_agent,
    "env": env.run,
    "inference": inference.run,
    "assemble-groups": assemble_groups,
    "assemble-batches": batch,
    "item-statistics": measure,
    "project-turns": project_turns.run,
    "trainer": train,
    TEACHER: keep_teacher,
}
