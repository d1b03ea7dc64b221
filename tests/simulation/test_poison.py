"""What other teams write, however wrong: parked or refused with the reason; the run goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from schemas.events import EnvironmentUse, EpisodeEnded, TaskSubmitted
from schemas.topics import DEAD_LETTERS, MAX_RECORD_BYTES, TRAJECTORIES
from services.kafka.broker import Outgoing, Partition, Record
from services.log import EventLog
from services.tasks import Item, TaskMaker
from tests.simulation import virtual_time
from tests.simulation.history import History, read_history
from tests.simulation.processes import Run
from tests.simulation.test_flow import ALL_FINISHED, until_drained
from tests.simulation.world import recipe

GARBAGE = (b"", b"\xffgarbage", b"\0\x7f\xff\xff\xffof a schema that nobody registered", None)


async def with_foreign_tasks(folder: Path, *tasks: TaskSubmitted) -> History:
    """A run to its end, into which another team submits these tasks."""
    run = Run(recipe(), folder)
    log = await run.start()
    await asyncio.sleep(1.0)
    for task in tasks:
        await log.send(task)
    await until_drained(log)
    await run.stop()
    history = await read_history(log, recipe())
    history.check()
    return history


def a_task(task_id: str, **changes: object) -> TaskSubmitted:
    made = TaskMaker(recipe(), "team").make(Item("item"), task_id)
    return made.model_copy(update=changes)


async def dead_letters(log: EventLog) -> set[tuple[str, str, bytes]]:
    """Topic, offset and value of every dead letter; each must say why it is one."""
    place = Partition(log.topics.name(DEAD_LETTERS), 0)
    count = (await log.broker.ends([place]))[place][1]
    reader = log.broker.reader()
    await reader.assign({place: 0})
    found: set[tuple[str, str, bytes]] = set()
    read = 0
    while read < count:
        for item in await reader.read():
            if isinstance(item, Record):
                read += 1
                headers = {name: value.decode() for name, value in item.headers}
                assert headers["__connect.errors.exception.message"]
                where = (headers[f"__connect.errors.{name}"] for name in ("topic", "offset"))
                found.add((*where, item.value or b""))  # type: ignore[arg-type]
    await reader.close()
    return found


def test_garbage_in_every_topic_is_parked_whole_and_the_run_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(recipe(), tmp_path)
        log = await run.start()
        await asyncio.sleep(1.0)
        written = set()
        for placed in log.topics:
            # Trajectories are read by reference alone; `runs` by what hosts a service.
            if placed.topic in (DEAD_LETTERS, TRAJECTORIES) or placed.topic.name == "runs":
                continue
            for value in GARBAGE:
                garbage = Outgoing(placed.name, b"key", value, partition=0)  # type: ignore[arg-type]
                position = await log.broker.send(garbage)
                written.add((placed.name, str(position.offset), value or b""))
        await until_drained(log)
        await run.stop()
        assert await dead_letters(log) == written
        history = await read_history(log, recipe())
        history.check()
        assert history.report.undecodable == len(written)
        assert history.endings() == ALL_FINISHED

    virtual_time.run(main)


@pytest.mark.parametrize("size", [MAX_RECORD_BYTES // 2, MAX_RECORD_BYTES - 2_000])
def test_a_task_that_is_too_large_for_its_episodes_is_refused(tmp_path: Path, size: int) -> None:
    large = a_task("large", payload=json.dumps({"text": "x" * size}))
    history = virtual_time.run(lambda: with_foreign_tasks(tmp_path, large, a_task("small")))
    refused = [one.event for one in history.facts.all(EpisodeEnded) if one.event.failure]
    assert [outcome.failure.code for outcome in refused if outcome.failure] == ["too_large"]
    assert history.endings()["finished"] == ALL_FINISHED["finished"] + 3


def test_a_task_that_the_recipe_cannot_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    tasks = (
        a_task("1", environment=EnvironmentUse(use="not-there")),
        a_task("2", agent="not-there"),
        a_task("3", payload="[]"),
        a_task("4", environment=EnvironmentUse(use="default", options='{"odd": 1}'), attempts=2),
        a_task("4"),
    )
    history = virtual_time.run(lambda: with_foreign_tasks(tmp_path, *tasks))
    assert history.endings() == ALL_FINISHED | {
        "unknown_environment": 1,
        "unknown_agent": 1,
        "bad_task": 1,
        "environment_error": 3,
        "duplicate": 1,
    }
