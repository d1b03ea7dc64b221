"""Reads what a run waits for from its log, its consumer groups and this machine. Read-only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from headrace.errors import DecodeError, HeadraceError, RecordsLost
from headrace.schemas.events import ActionRequested
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    ACTIONS,
    BATCHES,
    GENERATIONS,
    GROUPS,
    INSTANCES,
    LIMITS,
    LOADS,
    OBSERVATIONS,
    OUTCOMES,
    POLICIES,
    PROMPTS,
    QUOTAS,
    RUNS,
    TASKS,
    Topic,
)
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Partition, Position, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import (
    Back,
    CaughtUp,
    Start,
    Tail,
    follow_records,
    read_records,
)
from headrace.services.namespace.apply import CONSUMERS, shared_partitions
from headrace.services.operate.waits.run_facts import (
    ActionDetail,
    MemberCount,
    Request,
    RunFacts,
)
from headrace.services.operate.waits.side_watch import SideWatch
from headrace.services.operate.waits.wait_graph import Wait, build_waits
from headrace.services.worker.open_episodes import SCHEDULER, open_episodes, recorded_waiting

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two looks at the consumer groups, the disks and the blob store."""
AGAIN_S = 1.0
"""Seconds until reading is tried again, if it failed."""
CAUGHT_UP_S = 60.0
"""Longest time that `open` waits for the log to be read."""
REPORTS_S = 120.0
"""Older reports of workers are not read."""
MARGIN_S = 5.0
"""Clocks of several brokers differ by less."""
SHOWN_ACTIONS = 32
"""The oldest open actions that are looked up."""
BACK: dict[Topic[Any], int] = {GROUPS: 5_000, POLICIES: 2_000, INSTANCES: 5_000, TASKS: 5_000}
"""Most records of a topic that are read. Earlier ones are counted, or don't matter any more."""
CALLS = {PROMPTS.name: "prompt", ACTIONS.name: "action"}
ANSWERS = frozenset({GENERATIONS.name, OBSERVATIONS.name})


class WaitsReader:
    """Follows one run. Call `open` once, then `waits` as often as needed, then `aclose`.

    It joins no consumer group and writes nothing. Prompts, generations, actions and observations
    are known by their headers, and are not decoded.
    """

    def __init__(self, log: EventLog, recipe: Recipe, side: SideWatch | None = None) -> None:
        """`log` is read-only. `side` looks at disks, weights and logs; None: nothing does."""
        self._log = log
        self._recipe = recipe
        self._side = side
        self._facts = self._empty()
        self._caught_up = asyncio.Event()
        self._looked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._obstacle = "reading it takes long"

    def _empty(self) -> RunFacts:
        topics = self._log.topics
        return RunFacts(self._recipe, partitions=(topics.pool_partitions, topics.action_partitions))

    async def open(self) -> None:
        """Begins to follow. Returns once what is in the log is read, or after `CAUGHT_UP_S`.

        `obstacle` says why it is not read.
        """
        self._facts.answered_at = now()
        self._tasks = [
            asyncio.create_task(self._follow(), name="follow waits"),
            asyncio.create_task(self._poll(), name="poll waits"),
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(CAUGHT_UP_S):
                await self._caught_up.wait()
                await self._looked.wait()

    async def waits(self) -> list[Wait]:
        """Returns who waits for whom now. It asks nobody, so it never blocks for long."""
        return build_waits(self._facts, now())

    @property
    def live(self) -> int:
        """How many episodes are live."""
        return len(self._facts.episodes) + self._facts.more_episodes

    @property
    def obstacle(self) -> str:
        """Why the waits are not known yet. Empty: they are."""
        known = self._caught_up.is_set() and self._looked.is_set()
        return "" if known else self._obstacle

    async def aclose(self) -> None:
        """Stops following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        """Follows the log. After an error it begins again, with all that is known read again."""
        while True:
            try:
                await self._read()
            except (HeadraceError, RecordsLost) as error:
                self._obstacle = str(error)
                logger.info("reading what the run waits for begins again: %s", error)
            await asyncio.sleep(AGAIN_S)

    async def _read(self) -> None:
        facts = self._empty()
        facts.answered_at = self._facts.answered_at
        facts.members, facts.problems = self._facts.members, self._facts.problems
        facts.errors, facts.ended_here = self._facts.errors, self._facts.ended_here
        starts = await self._starts(facts)
        records = follow_records(self._log, starts)
        async with aclosing(records):
            async for item in records:
                facts.answered_at = now()
                if isinstance(item, CaughtUp):
                    self._facts = facts
                    self._caught_up.set()
                else:
                    await self._fold(facts, item)
                if facts.more_tasks and not facts.tasks and self._facts is facts:
                    return  # those that were only counted are the oldest now

    async def _starts(self, facts: RunFacts) -> dict[Partition, Start]:
        """Reads the starts and ends of episodes. Returns where to follow all topics from."""
        log, topics = self._log, self._log.topics
        group = f"{topics.namespace}.{SCHEDULER}"
        begins = await open_episodes(log, group)
        ends = await log.broker.ends(list(begins))
        ranges = {at: (_number(start, ends[at][0]), ends[at][1]) for at, start in begins.items()}
        oldest = now()
        async with aclosing(read_records(log.broker, ranges)) as records:
            async for record in records:
                oldest = min(oldest, record.timestamp)
                await self._fold(facts, record)
        existing = await log.broker.list_topics()
        starts: dict[Partition, Start] = {at: ends[at][1] for at in begins}

        def add(topic: Topic[Any], start: Start) -> None:
            for at in topics.partitions_of(topic):
                if at.topic in existing:
                    starts[at] = start

        whole: list[Topic[Any]] = [RUNS, QUOTAS, LIMITS]
        newest: list[Topic[Any]] = [POLICIES, INSTANCES, GROUPS]
        for topic in whole:
            add(topic, "first")
        add(BATCHES, Tail(2))
        for topic in newest:
            add(topic, Back(BACK[topic]))
        timed: list[Topic[Any]] = [OUTCOMES, PROMPTS, GENERATIONS, ACTIONS, OBSERVATIONS]
        starts |= await self._since(timed, oldest - MARGIN_S, existing)
        starts |= await self._since([LOADS], now() - REPORTS_S, existing)
        starts |= await self._waiting_tasks(facts, group)
        return starts

    async def _since(
        self, of: list[Topic[Any]], at: float, existing: Mapping[str, int]
    ) -> dict[Partition, Start]:
        """Returns the offsets of topics from a time on."""
        asked = [one for topic in of for one in self._log.topics.partitions_of(topic)]
        return dict(
            await self._log.broker.offsets_at([one for one in asked if one.topic in existing], at)
        )

    async def _waiting_tasks(self, facts: RunFacts, group: str) -> dict[Partition, Start]:
        """Counts the tasks that wait and are not read. Returns where to read tasks from."""
        tasks = self._log.topics.partition(TASKS)
        commits = await self._log.broker.committed(group, [tasks])
        first, end = (await self._log.broker.ends([tasks]))[tasks]
        begin = max(first, commits[tasks].offset if tasks in commits else first)
        record = await recorded_waiting(self._log)
        if record is not None:
            numbers = [one for run in record.runs() for one in run if one < begin]
            numbers = [one for one in numbers if one not in facts.known_starts]
            await self._read_oldest(facts, tasks, numbers, first)
        start = max(begin, end - BACK[TASKS])
        if start > begin:
            named = range(begin, min(start, begin + BACK[TASKS]))
            await self._read_oldest(facts, tasks, list(named), first)
            facts.more_tasks += max(0, start - named.stop)
        return {tasks: start}

    async def _read_oldest(
        self, facts: RunFacts, at: Partition, numbers: list[int], first: int
    ) -> None:
        """Reads the oldest of these tasks. The others are counted."""
        kept = [one for one in numbers if one >= first][: BACK[TASKS] // 10]
        facts.more_tasks += len(numbers) - len(kept)
        with suppress(RecordsLost):
            for record in await self._log.broker.fetch([Position(at, one) for one in kept]):
                await self._fold(facts, record)

    async def _fold(self, facts: RunFacts, record: Record) -> None:
        """Adds a record. What is no event is left out."""
        try:
            topic = self._log.topics.by_name(record.partition.topic)
        except KeyError:
            return
        name = topic.topic.name
        if name in CALLS or name in ANSWERS:
            identity = next((text for key, text in record.headers if key == "ce_id"), b"").decode(
                "utf-8", "replace"
            )
            if name in ANSWERS:
                facts.on_answer(identity, record.timestamp)
            elif identity.count("/") >= 3:
                position = Position(record.partition, record.offset)
                policy = topic.policy or ""
                facts.on_request(Request(CALLS[name], identity, record.timestamp, position, policy))
            return
        # A report counts from when it comes: the clock of a worker's host may be wrong.
        at = now() if name == LOADS.name and self._facts is facts else record.timestamp
        with suppress(DecodeError, ValueError):
            facts.on_event((await self._log.decode(record)).event, at, record.offset)

    async def _poll(self) -> None:
        """Looks at what is not in the log, once the log is read."""
        await self._caught_up.wait()
        while True:
            try:
                await self._look()
                self._looked.set()
            except HeadraceError as error:
                self._obstacle = str(error)
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        broker, topics = self._log.broker, self._log.topics
        await broker.ends([topics.partition(RUNS)])
        self._facts.answered_at = now()
        for service in CONSUMERS:
            group, partitions = shared_partitions(topics, service)
            members = await broker.members(group)
            self._facts.answered_at = now()
            ends = await broker.ends(partitions)
            committed = await broker.committed(group, partitions)
            lag = sum(
                max(0, end - (committed[at].offset if at in committed else first))
                for at, (first, end) in ends.items()
            )
            known = self._facts.members.get(service)
            since = now()
            if known is None:
                since = 0.0  # it has been so since before anybody looked
            elif known.members == members:
                since = known.since
            self._facts.members[service] = MemberCount(members, lag, since)
            self._facts.answered_at = now()
        await self._look_at_actions()
        await self._look_beside()

    async def _look_beside(self) -> None:
        """Looks at disks, weights and logs."""
        if self._side is None:
            return
        newest = [one.newest for one in self._facts.policies.values() if one.newest is not None]
        problems = await asyncio.to_thread(self._side.problems, newest, now())
        errors = await asyncio.to_thread(self._side.errors)
        lives = list(self._facts.workers.lives.values())
        self._facts.ended_here = await asyncio.to_thread(self._side.ended, lives, now())
        self._facts.problems, self._facts.errors = problems, errors

    async def _look_at_actions(self) -> None:
        """Looks up what the oldest open actions ask for."""
        facts = self._facts
        requests = [
            request
            for episode in facts.episodes.values()
            for request in episode.requests.values()
            if request.kind == "action"
        ]
        oldest = sorted(requests, key=lambda one: one.at)[:SHOWN_ACTIONS]
        known = {one.id: facts.details[one.id] for one in oldest if one.id in facts.details}
        for request in oldest:
            if request.id in known:
                continue
            with suppress(RecordsLost, DecodeError):
                (record,) = await self._log.broker.fetch([request.position])
                event = (await self._log.decode(record)).event
                if isinstance(event, ActionRequested):
                    scores = event.kind == "score"
                    known[request.id] = ActionDetail(event.environment.use, scores)
        facts.details = known


def _number(start: Start, first: int) -> int:
    return start if isinstance(start, int) else first


@asynccontextmanager
async def reading_waits(
    log: EventLog, recipe: Recipe, side: SideWatch | None = None
) -> AsyncIterator[WaitsReader]:
    """Opens a reader and closes it."""
    reader = WaitsReader(log, recipe, side)
    try:
        await reader.open()
        yield reader
    finally:
        await reader.aclose()
