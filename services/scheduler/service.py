"""The scheduler. The owner of `tasks` decides and is fenced; the others are standbys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
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
    WaitingRecorded,
)
from headrace.schemas.topics import (
    BATCHES,
    CANCELLATIONS,
    LOADS,
    OFFSETS_OF_A_BATCH,
    POLICIES,
    QUOTAS,
    TASKS,
    WAITING,
)
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery
from headrace.services.log.log_reader import Tail, read_events
from headrace.services.scheduler.core import SchedulerCore
from headrace.services.scheduler.limits.limit_writer import LimitWriter, limit_topics
from headrace.services.scheduler.starts import ChosenTask, in_transactions
from headrace.services.scheduler.task_bodies import TaskBodies, in_parts
from headrace.services.scheduler.waiting_record import WaitingRecords
from headrace.services.tasks.admission import MAX_START_BYTES
from headrace.services.worker.open_episodes import SCHEDULER, SCHEDULER_TOPICS
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.shard import ShardContext
from headrace.services.worker.worker import SideStart, Worker

logger = logging.getLogger(__name__)

QUEUE_HIGH, QUEUE_LOW = 1_000_000, 990_000
"""Tasks that wait. Reading `tasks` pauses above the first number and resumes below the second."""
UNRECORDED_HIGH, UNRECORDED_LOW = 100_000, 90_000
"""The same for tasks that are refused when they are read, so that no record can name them."""
UNDECIDED_HIGH = 10_000
"""Tasks in memory while the scheduler catches up. Reading `tasks` pauses above this number."""
STARTS_A_TRANSACTION = 512
BYTES_A_TRANSACTION = MAX_START_BYTES
SILENCE_S = 120.0
"""After so many seconds without a report of a worker, the log says why no task starts. To load a
large model may take minutes."""

QUEUED = Gauge("headrace_tasks_queued", "Tasks that wait to be started.")
LIVE = Gauge("headrace_episodes_started", "Live episodes, without those of refused tasks.")
ROOM = Gauge("headrace_room_groups", "Groups that may start now.", ["policy"])


async def run(context: ServiceContext) -> None:
    """Admits tasks until `context.stopping` is set. Raises Fenced if a standby became active."""
    topics = context.log.topics
    starts: dict[Partition, SideStart] = {
        topics.partition(POLICIES): "first",
        topics.partition(CANCELLATIONS): "first",
        topics.partition(QUOTAS): "first",
        topics.partition(LOADS): Tail(),
        topics.partition(WAITING): "first",  # So that garbage before the last record is parked.
    }
    starts |= limit_topics(context.recipe, topics)
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
        self._trusted = context.recipe.scheduler.trusted
        self._limits = LimitWriter(shard, context.recipe, self._core.environments.on_set)
        self._bodies = TaskBodies(context.log, shard.partition)
        self._records = WaitingRecords()
        self._open: dict[int, Callable[[], None]] = {}
        """Task that was started and is not finished, to what lets the commit pass its start."""
        self._wake = asyncio.Event()
        self._read_below = shard.begins_at
        """All tasks below it were read, by this scheduler or an earlier one."""
        self._paused = False
        self._early: list[EpisodeEnded | GroupClosed] = []
        """Events that were read while catching up, perhaps before their task's start."""
        self._undecided: list[tuple[int, TaskSubmitted, str, Callable[[], None]]] = []
        """Tasks that were read while catching up, why their tenant is not proved, and what lets the
        commit pass them."""
        self._silent_since: float | None = None
        """Since when tasks wait because no worker reports. Infinite after the warning."""

    async def on_event(self, delivery: Delivery[Any]) -> None:
        """Handles a task, or an event about one."""
        event = delivery.event
        self._limits.on_event(delivery)
        if isinstance(event, TaskSubmitted):
            await self._on_task(delivery)
        elif isinstance(event, EpisodeStarted | WaitingRecorded):
            if not self._shard.caught_up:  # What it has written itself is known already.
                self._recover(event)
        elif isinstance(event, EpisodeEnded | GroupClosed):
            if self._shard.caught_up:
                self._on_progress(event)
            else:
                self._early.append(event)
        elif isinstance(event, BatchAssembled):
            self._core.on_batch(event.policy, event.version, event.frontier(), event.samples)
            for number in list(self._open):
                self._release(number)
        elif isinstance(event, TaskCancelled):
            self._core.on_cancelled(event, delivery.signed_by(self._trusted.keys))
        elif isinstance(event, PolicyPublished):
            skipped = event.status == "skipped"
            self._core.on_policy(event.policy, event.version, skipped=skipped)
        elif isinstance(event, QuotaSet):
            self._core.tenants.set(event)
        elif isinstance(event, LoadReported):
            early_s = None if self._shard.caught_up else delivery.recorded_at
            self._core.pools.on_report(event, now(), early_s)
        self._wake.set()

    async def on_caught_up(self) -> None:
        """Reads what must be known of the tasks before the commit, then starts to decide."""
        await self._recall()
        undecided, self._undecided = self._undecided, []
        for number, submitted, unproved, release in undecided:
            self._take(number, submitted, unproved, release)
        # After the tasks: a finished task is forgotten, so a late task event would look new.
        for event in self._early:
            self._on_progress(event)
        self._early.clear()
        self._core.pools.on_begun(now(), is_first=not self._open)
        self._shard.spawn(self._start_tasks(), "start tasks")
        self._shard.spawn(self._cancel_when_ending(), "ending")
        self._shard.spawn(self._limits.run(), "limits")

    async def aclose(self) -> None:
        """Sends nothing: the log has all that was started."""

    def _recover(self, event: EpisodeStarted | WaitingRecorded) -> None:
        """Takes what a predecessor has written."""
        if isinstance(event, WaitingRecorded):
            self._records.recover(event, self._shard.hold_positions)
            return
        self._core.on_started(event)
        if event.task not in self._open:
            self._open[event.task] = self._shard.hold_positions()

    def _on_progress(self, event: EpisodeEnded | GroupClosed) -> None:
        if isinstance(event, EpisodeEnded):
            self._core.on_outcome(event.task, event.sample)
        else:
            tokens = sum(sample.tokens for sample in event.samples)
            self._core.on_group(event.policy, event.task, oldest=_oldest(event), tokens=tokens)
        self._release(event.task)

    async def _on_task(self, delivery: Delivery[TaskSubmitted]) -> None:
        number, release = delivery.offset, self._shard.hold(delivery)
        unproved = self._unproved(delivery)
        if self._shard.caught_up and not self._undecided:
            self._take(number, delivery.event, unproved, release)
        else:
            self._undecided.append((number, delivery.event, unproved, release))
        many = len(self._undecided) >= UNDECIDED_HIGH or self._is_full(QUEUE_HIGH, UNRECORDED_HIGH)
        if many and not self._paused:
            self._paused = True
            await self._shard.pause()

    def _is_full(self, most: int, unrecorded: int) -> bool:
        """Whether so many tasks wait, to be run or not, or so many that can't be recorded."""
        core = self._core
        return core.queued + len(core.refused) >= most or core.refused.unrecorded >= unrecorded

    def _unproved(self, delivery: Delivery[Any]) -> str:
        """Returns why a task does not count for its tenant; an empty text if it does."""
        tenant: str = delivery.event.tenant
        if self._trusted.is_open(tenant):
            return ""
        return self._trusted.refusal(tenant, delivery.signed_by(self._trusted.keys))

    def _take(
        self, number: int, submitted: TaskSubmitted, unproved: str, release: Callable[[], None]
    ) -> None:
        """Takes a task. `release` lets the commit pass it."""
        self._read_below = number + 1
        if unproved:
            self._core.on_unproved(number)
        else:
            self._core.on_task(number, submitted)
        if self._core.waits(number):
            if not unproved:
                self._bodies.keep(number, submitted)
            self._records.on_waiting(number, release)
        else:
            release()
            self._release(number)

    def _release(self, number: int) -> None:
        """Lets the commit pass a task's start if nothing about it can change any more.

        A task that is not read yet stays known: else it would look new.
        """
        known = number in self._open and number < self._read_below
        if known and self._core.finished(number):
            self._open.pop(number)()

    async def _recall(self) -> None:
        """Reads the tasks below the commit that wait, and the ids of the newest of them all.

        Duplicates are recognised as far back as these ids reach.
        """
        tasks, end = self._shard.partition, self._shard.begins_at
        waiting = [one for one in self._records.named_below(end) if not self._core.is_started(one)]
        for numbers in in_parts(waiting):
            for number, submitted in (await self._bodies.take(numbers)).items():
                if submitted is None:
                    self._core.on_lost(number)
                else:
                    self._core.on_task(number, submitted, accepted=True)
                    self._bodies.keep(number, submitted)
        kept, _ = (await self._context.log.broker.ends([tasks]))[tasks]
        begin = max(kept, end - self._context.recipe.scheduler.duplicates_window)
        if begin >= end:
            return
        async with aclosing(read_events(self._context.log, {tasks: (begin, end)})) as deliveries:
            async for delivery in deliveries:
                assert isinstance(delivery.event, TaskSubmitted)
                if not self._unproved(delivery):
                    self._core.remember(delivery.offset, delivery.event)

    async def _start_tasks(self) -> None:
        """Writes starts as soon as they are allowed, several tasks in one transaction."""
        while True:
            self._wake.clear()
            chosen = self._choose()
            await self._note()
            if chosen:
                await self._write_starts(chosen)
            await self._record_waiting()
            if chosen:
                continue
            self._warn_of_silence(now())
            limits = (self._core.wait_s(now()) or SILENCE_S, self._records.wait_s(now()))
            with suppress(TimeoutError):
                async with asyncio.timeout(min(limit for limit in limits if limit is not None)):
                    await self._wake.wait()

    def _choose(self) -> list[ChosenTask]:
        """Chooses what starts next, in one transaction unless it is too large for that."""
        chosen: list[ChosenTask] = []
        episodes = 0
        while (
            episodes < STARTS_A_TRANSACTION
            and (one := self._core.choose(now(), new_round=not chosen)) is not None
        ):
            self._open[one.number] = self._shard.hold_positions()
            chosen.append(one)
            episodes += self._core.samples(one.number)
        return chosen

    async def _write_starts(self, chosen: Sequence[ChosenTask]) -> None:
        tasks = await self._bodies.take([one.number for one in chosen])
        starts = (self._core.starts(one, tasks.get(one.number), now()) for one in chosen)
        for part in in_transactions(starts, BYTES_A_TRANSACTION):
            await self._shard.send_all(part)
        for one in chosen:
            self._records.on_started(one.number)

    async def _record_waiting(self) -> None:
        """Records what waits below the first task that can't be. No start may be under way."""
        below = self._core.refused.first_unrecorded(self._read_below)
        due = self._records.is_due(now(), below, many=below == self._read_below)
        if not due:
            return
        waiting = self._core.waiting(below)
        record = self._records.make(self._shard.partition.topic, waiting, below, now())
        held = self._shard.hold_positions()
        await self._shard.send_all([record])
        self._records.on_recorded(record, held)

    async def _note(self) -> None:
        QUEUED.set(self._core.queued)
        LIVE.set(self._core.live)
        for policy, room in self._core.room().items():
            ROOM.labels(policy).set(room)
        if self._paused and not self._is_full(QUEUE_LOW, UNRECORDED_LOW) and not self._undecided:
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
                "tasks that need %s do not start: for %.0f s no worker of it has reported that it "
                "has slots. Do `headrace serve inference` and `headrace serve env` run? Is a limit "
                "of calls 0 (`headrace quota`)? If a service of your own answers the prompts or "
                "actions, set scheduler.require_reports = false",
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
