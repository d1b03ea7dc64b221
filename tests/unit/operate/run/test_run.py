"""How a run of one machine ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Interrupted
from headrace.schemas.events import RunStateEntered
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.run.live_view import Status
from headrace.services.operate.run.report import Summary
from headrace.services.operate.run.run import LocalRun
from tests.memory.memory_broker import MemoryBroker
from tests.unit.operate.run.test_progress import ended, submitted
from tests.unit.stream_jobs.test_assemble_batches import a_context, make_topics

RECIPE = Recipe.model_validate({"name": "r", "policies": {"default": {"model": "tiny-llama"}}})


ENDING = RunStateEntered(namespace="r", state="ending", digest=RECIPE.digest, reason="a rule")


def made(folder: Path, **options: Any) -> LocalRun:
    return LocalRun(RECIPE, ClusterConfig(state=folder), quiet=True, **options)


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_recorded_end_is_used_once_the_whole_log_is_read(
    tmp_path: Path, interrupted: bool
) -> None:
    """Otherwise its summary would be empty, and all its tasks would seem to have ended."""

    async def test() -> None:
        run = made(tmp_path)
        run._life = RunLife(ending=ENDING)
        reason = asyncio.create_task(run._until_stop())
        if interrupted:
            run.interrupted.set()
        await asyncio.sleep(0.05)
        assert not reason.done()

        run._on_progress()  # caught up
        assert await asyncio.wait_for(reason, 10) == "a rule"

    asyncio.run(test())


def test_ctrl_c_pauses_and_an_end_by_another_process_ends(tmp_path: Path) -> None:
    async def test() -> None:
        run = made(tmp_path)
        run._on_progress()
        reason = asyncio.create_task(run._until_stop())
        run._life = RunLife(ending=ENDING)
        run._changed.set()
        assert await asyncio.wait_for(reason, 10) == "a rule"

        paused = made(tmp_path)
        paused.interrupted.set()
        assert await asyncio.wait_for(paused._until_stop(), 10) is None

        ended = made(tmp_path, end="enough")
        ended._on_progress()
        assert await asyncio.wait_for(ended._until_stop(), 10) == "enough"

    asyncio.run(test())


async def that_ends(folder: Path) -> tuple[EventLog, LocalRun, asyncio.Task[None]]:
    """Returns a run that has just begun to end."""
    log = a_context(MemoryBroker(), "r", RECIPE, folder).log
    await make_topics(log)
    run = made(folder)
    run._life = RunLife(ending=ENDING)
    end = asyncio.create_task(run._end(log, "a rule"))
    await asyncio.sleep(0.05)
    return log, run, end


def test_a_run_ends_only_after_what_its_sources_submitted_last(tmp_path: Path) -> None:
    """A task that they sent just before they saw the end has no result yet."""

    async def test() -> None:
        log, run, end = await that_ends(tmp_path)
        task = await log.send(submitted())
        assert not end.done(), "the source still runs"

        run._supervisor.finished.add("source")
        run._on_progress()
        await asyncio.sleep(0.05)
        assert not end.done(), "its last task was not read yet"

        run.progress.on_event(submitted(), 1.0, task.offset)
        run.progress.on_event(ended(task.offset), 2.0, 0)
        run._on_progress()
        await asyncio.wait_for(end, 10)
        await log.broker.close()

    asyncio.run(test())


def test_a_run_that_another_process_has_ended_waits_for_nothing(tmp_path: Path) -> None:
    """Its processes have ended then, and its sources may be among them."""

    async def test() -> None:
        log, run, end = await that_ends(tmp_path)
        assert not end.done()

        run._life.ended = ENDING.model_copy(update={"state": "ended"})
        run._beside = [asyncio.create_task(asyncio.sleep(0), name="children")]
        await asyncio.wait_for(end, 10)
        await log.broker.close()

    asyncio.run(test())


def test_a_run_that_ends_for_the_reason_paused_is_not_paused(tmp_path: Path) -> None:
    """`headrace end --reason paused` may say so."""
    run = made(tmp_path)
    ended = Summary.of(Status("r"), "r", "paused", run.progress)
    run.judge(ended)
    assert ended.lines()[0] == "r: ended by paused"

    paused = Summary.of(Status("r"), "r", None, run.progress)
    with pytest.raises(Interrupted, match="headrace end --namespace r"):
        run.judge(paused)
    assert (paused.lines()[0], paused.reason) == ("r: paused", "paused")
