"""The scheduler. The owner of `tasks` decides and is fenced; the others are standbys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from math import inf
from typing import Any

from prometheus_client import Gauge

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    GroupClosed,
    LoadReported,
    PolicyPublished,
    QuotaSet,
    TaskCancelled,
    TaskSubmitted,
)
from headrace.schemas.topics import (
    BATCHES,
    CANCELLATIONS,
    LOADS,
    OFFSETS_OF_A_BATCH,
    POLICIES,
    QUOTAS,
    TASKS,
)
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery
from headrace.services.log.log_reader import Tail, read_events
from headrace.services.scheduler.core import SchedulerCore
from headrace.services.worker.open_episodes import SCHEDULER, SCHEDULER_TOPICS
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.shard import ShardContext
from headrace.services.worker.worker import SideStart, Worker

logger = logging.getLogger(__name__)

QUEUE_HIGH, QUEUE_LOW = 10_000, 5_000
"""Tasks in memory. Reading `tasks` pauses above the first number and resumes below the second."""
STARTS_A_TRANSACTION = 512
SILENCE_S = 120.0
"""After so many seconds without a report of a worker, the log says why no task starts. To load a
large model may take minutes."""

QUEUED = Gauge("headrace_tasks_queued", "Tasks that wait to be started.")
LIVE = Gauge("headrace_episodes_started", "Episodes that were started and have not ended.")
ROOM = Gauge("headrace_room_groups", "Groups that may start now.", ["policy"])


async def run(context: ServiceContext) -> None:
    """Admits tasks until `context.stopping` is set. Raises Fenced if a standby became active."""
    topics = context.log.topics
    starts: dict[Partition, SideStart] = {
        topics.partition(POLICIES): "first",
        topics.partition(CANCELLATIONS): "first",
        topics.partition(QUOTAS): "first",
        topics.partition(LOADS): Tail(),
    }
    for topic in SCHEDULER_TOPICS:
        starts |= dict.fromkeys(topics.partitions_of(topic), "committed")
    for name, policy in context.recipe.policies.items():
        back = OFFSETS_OF_A_BATCH * policy.batches.batches_needed
        starts[topics.partition(BATCHES, name)] = Tail(back)

    await Worker(
        context.log,
        topics=[topics.name(TASKS)],
        consumer_group=context.consumer_group(SCHEDULER),
        make_shard=lambda shard: SchedulerShard(shard, context),
        side_partitions=lambda _: starts,
        side_partitions_first=True,
        fenced=context.consumer_group(SCHEDULER),
        stopping=context.stopping,
    ).run()


class SchedulerShard:
    """Passes events to the core, and writes the starts that the core allows."""

    def __init__(self, shard: ShardContext, context: ServiceContext) -> None:
        self._shard = shard
        self._context = context
        self._core = SchedulerCore(context.recipe)
        self._releases: dict[int, Callable[[], None]] = {}
        self._wake = asyncio.Event()
        self._first: int | None = None
        self._paused = False
        self._early: list[EpisodeEnded | GroupClosed] = []
        """Events that were read while catching up, perhaps before their task's start."""
        self._waiting: list[tuple[int, TaskSubmitted]] = []
        self._silent_since: float | None = None
        """Since when tasks wait because no worker reports. Infinite after the warning."""

    async def on_event(self, delivery: Delivery[Any]) -> None:
        """Handles a task, or an event about one."""
        event = delivery.event
        if isinstance(event, TaskSubmitted):
            await self._on_task(delivery)
        elif isinstance(event, EpisodeStarted):
            if not self._shard.caught_up:  # Its own starts are known already.
                self._core.on_started(event)
        elif isinstance(event, EpisodeEnded | GroupClosed):
            if self._shard.caught_up:
                self._on_progress(event)
            else:
                self._early.append(event)
        elif isinstance(event, BatchAssembled):
            self._core.on_batch(event.policy, event.version, event.frontier(), event.samples)
            for number in list(self._releases):
                self._release(number)
        elif isinstance(event, TaskCancelled):
            self._core.on_cancelled(event)
        elif isinstance(event, PolicyPublished):
            skipped = event.status == "skipped"
            self._core.on_policy(event.policy, event.version, skipped=skipped)
        elif isinstance(event, QuotaSet):
            self._core.tenants.set(event)
        elif isinstance(event, LoadReported) and self._shard.caught_up:
            # A report that it reads while catching up may be old.
            self._core.pools.on_report(event, now())
        self._wake.set()

    async def on_caught_up(self) -> None:
        """Reads the ids of the tasks before the commit, then starts to decide."""
        self._shard.begun_below = self._core.started_below  # Before the next commit.
        tasks = self._shard.partition
        first = self._first
        if first is None:
            group = self._context.consumer_group(SCHEDULER)
            first = (await self._context.log.broker.committed(group, [tasks]))[tasks].offset
        await self._recall(first)
        self._core.forget_below(first)
        waiting, self._waiting = self._waiting, []
        for number, submitted in waiting:
            self._core.on_task(number, submitted)
        # After the tasks: a finished task is forgotten, so a late task event would look new.
        for event in self._early:
            self._on_progress(event)
        self._early.clear()
        self._shard.spawn(self._start_tasks(), "start tasks")
        self._shard.spawn(self._cancel_when_ending(), "ending")

    async def aclose(self) -> None:
        """Sends nothing: the log has all that was started."""

    def _on_progress(self, event: EpisodeEnded | GroupClosed) -> None:
        if isinstance(event, EpisodeEnded):
            self._core.on_outcome(event.task, event.sample)
        else:
            tokens = sum(sample.tokens for sample in event.samples)
            self._core.on_group(event.policy, event.task, oldest=_oldest(event), tokens=tokens)
        self._release(event.task)

    async def _on_task(self, delivery: Delivery[TaskSubmitted]) -> None:
        number = delivery.offset
        self._releases[number] = self._shard.hold(delivery)
        if self._first is None:
            self._first = number
        if self._shard.caught_up and not self._waiting:
            self._core.on_task(number, delivery.event)
            self._release(number)
        else:
            self._waiting.append((number, delivery.event))
        if not self._paused and self._core.queued + len(self._waiting) >= QUEUE_HIGH:
            self._paused = True
            await self._shard.pause()

    def _release(self, number: int) -> None:
        """Lets the commit pass a task if nothing about it can change any more."""
        if number in self._releases and self._core.finished(number):
            self._releases.pop(number)()

    async def _recall(self, end: int) -> None:
        """Reads the ids of the tasks below `end`, as far back as duplicates are recognised."""
        tasks = self._shard.partition
        kept, _ = (await self._context.log.broker.ends([tasks]))[tasks]
        begin = max(kept, end - self._context.recipe.scheduler.duplicates_window)
        if begin >= end:
            return
        async with aclosing(read_events(self._context.log, {tasks: (begin, end)})) as deliveries:
            async for delivery in deliveries:
                assert isinstance(delivery.event, TaskSubmitted)
                self._core.remember(delivery.offset, delivery.event)

    async def _start_tasks(self) -> None:
        """Writes starts as soon as they are allowed, several tasks in one transaction."""
        while True:
            self._wake.clear()
            starts: list[EpisodeStarted] = []
            while len(starts) < STARTS_A_TRANSACTION and (started := self._core.next_start(now())):
                starts += started
                for start in started:
                    self._core.on_started(start)
            await self._note()
            if starts:
                await self._shard.send_all(starts)
                continue
            self._warn_of_silence(now())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._core.wait_s(now()) or SILENCE_S):
                    await self._wake.wait()

    async def _note(self) -> None:
        QUEUED.set(self._core.queued)
        LIVE.set(self._core.live)
        for policy, room in self._core.room().items():
            ROOM.labels(policy).set(room)
        if self._paused and self._core.queued < QUEUE_LOW:
            self._paused = False
            await self._shard.resume()

    def _warn_of_silence(self, now_s: float) -> None:
        """Says once that tasks wait only because no worker reports."""
        silent = self._core.pools.silent(now_s) if self._core.queued else []
        if not silent:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now_s
        elif SILENCE_S <= now_s - self._silent_since < inf:
            self._silent_since = inf
            logger.warning(
                "tasks in which %s plays do not start: for %.0f s no inference worker of it has "
                "reported its load. Does `headrace serve inference` run? If a service of your own "
                "answers the prompts, set scheduler.require_reports = false",
                " or ".join(silent),
                SILENCE_S,
            )

    async def _cancel_when_ending(self) -> None:
        await self._context.ending.wait()
        self._core.end()
        self._wake.set()


def _oldest(group: GroupClosed) -> int | None:
    """The version of a group's oldest token, -1 if one is demonstrated; None if it is dropped."""
    if group.verdict == "dropped":
        return None
    return min((one.oldest_version for one in group.samples), default=-1)
