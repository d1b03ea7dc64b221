"""Tasks are cancelled at moments of chance, amid kills: each ends once, none of them is trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    GroupClosed,
    TaskCancelled,
    TaskEnded,
    TaskSubmitted,
)
from schemas.topics import TASKS
from services.apply import lags
from services.kafka.broker import Partition, Position
from services.log import EventLog
from tests.simulation import virtual_time
from tests.simulation.history import History, read_history
from tests.simulation.processes import Run
from tests.simulation.test_flow import SETTLE_S, faults, until_drained
from tests.simulation.world import recipe


async def cancel_some(log: EventLog, chance: Random, count: int) -> None:
    """Cancels tasks of those submitted so far, some that nobody submits, and some twice."""
    place = Partition(log.topics.name(TASKS), 0)
    for _ in range(count):
        await asyncio.sleep(chance.uniform(0.0, 1.5))
        first, end = (await log.broker.ends([place]))[place]
        if first == end or chance.random() < 0.1:
            await log.send(TaskCancelled(source="nobody", task_id=str(chance.random())))
            continue
        (record,) = await log.broker.fetch([Position(place, chance.randrange(first, end))])
        task = (await log.decode(record)).event
        assert isinstance(task, TaskSubmitted)
        cancelled = TaskCancelled(source=task.source, task_id=task.task_id, reason="by chance")
        await log.send(cancelled)
        if chance.random() < 0.2:
            await log.send(cancelled)


async def play(folder: Path, seed: int, *, kills: int, freezes: int) -> History:
    """A run to its end, with cancellations and faults."""
    run = Run(recipe(), folder)
    log = await run.start()
    await asyncio.gather(
        cancel_some(log, Random(seed), 8),
        faults(run, Random(seed + 1), kills=kills, freezes=freezes),
    )
    await until_drained(log)
    await asyncio.sleep(SETTLE_S)
    await run.stop()
    history = await read_history(log, recipe())
    history.check()
    left = await lags(log.broker, log.topics)
    assert not any(left.values()), f"not done: {left}"
    return history


def check_cancelled(history: History) -> set[int]:
    """What must hold of cancelled tasks. Their numbers."""
    facts = history.facts
    asked = {one.event.event_id for one in facts.all(TaskCancelled)}
    cancelled = {
        one.event.task for one in facts.all(TaskEnded) if one.event.closed_by == "cancelled"
    }
    for one in facts.all(TaskEnded):
        if one.event.task in cancelled:
            assert f"{one.event.source}/{one.event.task_id}" in asked
    for outcome in (one.event for one in facts.all(EpisodeEnded)):
        if outcome.ending == "cancelled":
            assert outcome.task in cancelled
            assert outcome.failure is not None
            assert (outcome.failure.code, outcome.failure.message) == ("cancelled", "by chance")
            assert outcome.reward is None
    for group in (one.event for one in facts.all(GroupClosed)):
        assert (group.reason == "cancelled") == (group.task in cancelled)
    for batch in facts.all(BatchAssembled):
        assert not cancelled & {sample.task for sample in batch.event.samples}
    return cancelled


@pytest.mark.parametrize("seed", range(6))
def test_a_cancelled_task_ends_once_and_is_never_trained(tmp_path: Path, seed: int) -> None:
    faulty = seed % 2
    history = virtual_time.run(
        lambda: play(tmp_path, seed, kills=5 * faulty, freezes=3 * faulty), seed
    )
    cancelled = check_cancelled(history)
    assert cancelled
    assert history.endings().keys() == {"finished", "cancelled"}


def test_what_is_cancelled_before_it_starts_is_not_run(tmp_path: Path) -> None:
    async def main() -> History:
        run = Run(recipe(), tmp_path)
        log = await run.start()
        place = Partition(log.topics.name(TASKS), 0)
        while (await log.broker.ends([place]))[place][1] < 1:
            await asyncio.sleep(0.01)
        (record,) = await log.broker.fetch([Position(place, 0)])
        task = (await log.decode(record)).event
        assert isinstance(task, TaskSubmitted)
        later = task.model_copy(update={"source": "team", "task_id": "later"})
        await log.send(TaskCancelled(source="team", task_id="later", reason="by chance"))
        await asyncio.sleep(1.0)
        await log.send(later)
        await until_drained(log)
        await run.stop()
        history = await read_history(log, recipe())
        history.check()
        return history

    history = virtual_time.run(main)
    (number,) = check_cancelled(history)
    starts = [one.event for one in history.facts.all(EpisodeStarted) if one.event.task == number]
    assert [start.verdict.code for start in starts if start.verdict] == ["cancelled"]
    assert len(starts) == 1


def test_the_source_goes_on_when_all_that_waits_is_cancelled(tmp_path: Path) -> None:
    backlog = recipe().tasks.backlog

    async def main() -> History:
        run = Run(recipe(), tmp_path)
        log = await run.start()
        place = Partition(log.topics.name(TASKS), 0)
        trainer = next(one for one in run.processes if one.service == "trainer")
        trainer.kill()  # so that nothing starts yet
        while (await log.broker.ends([place]))[place][1] < backlog:
            await asyncio.sleep(0.01)
        for task in [f"0-{number}" for number in range(backlog)]:
            await log.send(TaskCancelled(source="source", task_id=task, reason="by chance"))
        await until_drained(log)
        await run.stop()
        history = await read_history(log, recipe())
        history.check()
        return history

    history = virtual_time.run(main)
    assert len(check_cancelled(history)) == backlog
    assert history.endings()["finished"] == 3 * (recipe().tasks.options["items"] - backlog)
