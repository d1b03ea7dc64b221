"""Every consumer under strange records: none may end, and the run's own work must."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from headrace.errors import DecodeError
from headrace.schemas.events import TaskEnded
from headrace.schemas.topics import BATCHES, DEAD_LETTERS, EPISODES, INSTANCES, QUOTAS, WAITING
from headrace.services.kafka.broker import Outgoing, Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.verify import read_all
from tests.fuzz.strange import strange_event, strange_value
from tests.simulation import virtual_time
from tests.simulation.chronicle import Chronicle
from tests.simulation.processes import Run
from tests.simulation.scenario import calm

BOUND_S = 600.0
"""Virtual seconds within which the run's own tasks have ended, whatever else there was."""
PACE_S = 0.02
UNREAD = (DEAD_LETTERS, INSTANCES)
NEVER_SUBMITTED = 10**9
"""A task number beyond those of any run here."""


def fuzz_consumers(folder: Path, seed: int, messages: int) -> None:
    """Writes so many strange records into the topics of a run, in its midst.

    AssertionError where a process ended, or a task of the run's own did not end.
    """
    virtual_time.run(lambda: _fuzz(folder, Random(seed), messages), seed)


async def _fuzz(folder: Path, chance: Random, messages: int) -> None:
    run = Run(calm(), folder, Chronicle())
    log = await run.start()
    for _ in range(messages):
        await asyncio.sleep(chance.expovariate(1 / PACE_S))
        await log.broker.send(await _strange_record(chance, log))
    async with asyncio.timeout(BOUND_S):
        while not await _own_tasks_ended(log):
            await asyncio.sleep(1.0)
            for process in run.processes:
                if (failure := process.failure()) is not None:
                    raise failure
    await run.stop()
    ended = {process.name: process.starts for process in run.processes if process.starts > 1}
    assert not ended, f"these ended and were started again: {ended}"


async def _strange_record(chance: Random, log: EventLog) -> Outgoing:
    placed = chance.choice([one for one in log.topics if one.topic not in UNREAD])
    assert placed.topic.event is not None
    event = strange_event(chance, placed.topic.event)
    if placed.policy is not None:
        event = event.model_copy(update={"policy": placed.policy})
    if placed.topic is EPISODES:  # a start of a task of the run's own counts, whoever wrote it
        event = event.model_copy(update={"task": NEVER_SUBMITTED})
    if placed.topic is QUOTAS:  # an operator may stop the tenant of the run's own tasks
        event = event.model_copy(update={"tenant": "a stranger"})
    value = log.outgoing(event).value
    if placed.topic in (BATCHES, WAITING):
        value = await _no_event(chance, log, placed.name, value)
    elif chance.random() < 0.5:
        value = strange_value(chance, value)
    return Outgoing(placed.name, event.key, value, partition=chance.randrange(placed.partitions))


async def _no_event(chance: Random, log: EventLog, topic: str, valid: bytes) -> bytes:
    """Bytes that are no event: a valid one is an order, for one writer alone to give."""
    while True:
        value = strange_value(chance, valid)
        try:
            await log.decode(Record(Partition(topic, 0), 0, 0.0, None, value, []))
        except DecodeError:
            return value


async def _own_tasks_ended(log: EventLog) -> bool:
    facts = Facts.of((await read_all(log))[0])
    own = {number for number, one in facts.tasks.items() if one.event.source == "source"}
    return own <= {one.event.task for one in facts.all(TaskEnded)}
