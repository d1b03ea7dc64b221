"""What other teams write, however wrong: parked or refused with the reason; the run goes on."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace.schemas.events import EnvironmentUse, EpisodeEnded, TaskSubmitted
from headrace.schemas.topics import DEAD_LETTERS, MAX_RECORD_BYTES
from headrace.services.kafka.broker import Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.simulation.acts import GARBAGE, NEVER_GARBAGE, no_event
from tests.simulation.judge import Result
from tests.simulation.processes import Run
from tests.simulation.scenario import calm
from tests.simulation.simulate import simulate

ALL_FINISHED = {"finished": 48}


def with_foreign_tasks(*tasks: TaskSubmitted) -> Result:
    """A run to its end, into which another team submits these tasks."""

    async def submit(run: Run, log: EventLog) -> None:
        await asyncio.sleep(1.0)
        for task in tasks:
            await log.send(task)

    result = simulate(0, scenario=calm(), meanwhile=submit)
    assert result.violations == []
    return result


def a_task(task_id: str, **changes: object) -> TaskSubmitted:
    made = TaskMaker(calm().recipe, "team").make(Item("item"), task_id)
    return made.model_copy(update=changes)


def dead_letters(run: Run) -> set[tuple[str, str, bytes]]:
    """Topic, offset and value of every dead letter; each must say why it is one."""
    log = run.cluster.state.log(Partition(run.topics.name(DEAD_LETTERS), 0))
    return {_dead_letter(record) for record in log.read(0, 10_000)[0]}


def _dead_letter(record: Record) -> tuple[str, str, bytes]:
    headers = {name: value.decode() for name, value in record.headers}
    assert headers["__connect.errors.exception.message"]
    topic, offset = (headers[f"__connect.errors.{name}"] for name in ("topic", "offset"))
    return topic, offset, record.value or b""


def test_garbage_in_every_topic_is_parked_whole_and_the_run_goes_on() -> None:
    written: set[tuple[str, str, bytes]] = set()

    async def write(run: Run, log: EventLog) -> None:
        await asyncio.sleep(1.0)
        for placed in run.topics:
            if placed.topic in NEVER_GARBAGE:
                continue
            for value in GARBAGE:
                position = await log.broker.send(no_event(Partition(placed.name, 0), value))
                written.add((placed.name, str(position.offset), value or b""))

    async def look(run: Run, log: EventLog) -> None:
        assert dead_letters(run) == written

    result = simulate(0, scenario=calm(), meanwhile=write, afterwards=look)
    assert result.violations == []
    assert result.report is not None
    assert result.report.undecodable == len(written)
    assert result.endings == ALL_FINISHED


@pytest.mark.parametrize("size", [MAX_RECORD_BYTES // 2, MAX_RECORD_BYTES - 2_000])
def test_a_task_that_is_too_large_for_its_episodes_is_refused(size: int) -> None:
    large = a_task("large", payload=json.dumps({"text": "x" * size}))
    result = with_foreign_tasks(large, a_task("small"))
    assert result.facts is not None
    refused = [one.event for one in result.facts.all(EpisodeEnded) if one.event.failure]
    assert [outcome.failure.code for outcome in refused if outcome.failure] == ["too_large"]
    assert result.endings["finished"] == ALL_FINISHED["finished"] + 3


def test_a_task_that_the_recipe_cannot_run_is_refused_with_the_reason() -> None:
    result = with_foreign_tasks(
        a_task("1", environment=EnvironmentUse(use="not-there")),
        a_task("2", agent="not-there"),
        a_task("3", payload="[]"),
        a_task("4", environment=EnvironmentUse(use="default", options='{"odd": 1}'), attempts=2),
        a_task("4"),
    )
    assert result.endings == ALL_FINISHED | {
        "unknown_environment": 1,
        "unknown_agent": 1,
        "bad_task": 1,
        "environment_error": 3,
        "duplicate": 1,
    }
